"""How a run of one's own ends: what is in flight lands, workers that did other numbers of inner steps end together
where they did as many rounds, and all prove that they hold the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from isles.comm.group import Group, same_text
from isles.comm.roster import Roster
from isles.replicas import start
from isles.replicas.flat import FlatParameters
from isles.replicas.start import T
from isles.replicas.state_dict import Saved


class EndsAsOne(Saved):
    """The part of `ReplicaSync`, whose attributes these are, that ends a run."""

    roster: Roster
    everything: Sequence[int]
    agrees: bool
    guards_inner: bool

    @property
    def survives(self) -> bool:
        """True if the workers that are left go on to the end of the run when others fail."""
        return self.config.survives

    def survivors(self) -> Group:
        """The workers that are still there; all of them must ask together. `group` itself, unless the method goes on
        without those it lost.
        """
        return self.group

    def together(self, collective: Callable[[Group], T]) -> T:
        """What `collective`, which is a single one or none, returns over the workers that are left; all of them must
        call this together.
        """
        return collective(self.survivors())

    def finish(self) -> None:
        """Land everything that is in flight, and the inner steps since the last exchange. Call it once, at the end, on
        all workers. One that did fewer inner steps since as many rounds counts as having stood still.

        Where workers agree, proves that they do. Bytes sent for both, on "control": at most 16 to each of the others.
        """
        if self.steps and any(group.get("train_mode") is False for group in self.param_groups):
            raise ValueError(
                "the inner optimizer is in eval mode, whose weights are not those that are trained: call "
                "optimizer.train() before finish() and consolidate()"
            )
        self.watch.refuse_forgotten()
        rounds = self.rounds_done()
        if rounds and self._is_watched:
            with start.among_even():
                self.steps = self.together(lambda group: start.same_end(group, self.steps, rounds))
        self.land_all()
        if self.level != "parameter" and self._is_watched:
            told = repr(start.settings_of(self.param_groups, everywhere=True))
            with start.among_even():
                self.together(lambda group: same_text(group, told, start.OTHER_SETTINGS, self.steps))
        if self.agrees:
            self._prove(self._named_shares())

    def land_all(self) -> None:
        """`finish` without a look at the others: where all have done as many inner steps."""
        self.catch_up()

    @contextmanager
    def landing(self, places: Sequence[int]) -> Iterator[None]:
        """Around whatever writes to the parameters of numbers `places` between two inner steps."""
        for copies in self.copies:
            copies.before_landing()
        yield
        exact = self.anchors() if self.copies else {}
        for copies in self.copies:
            copies.landed(places, exact)

    def anchors(self) -> Mapping[int, Tensor]:
        """By number of the parameter: what whole ones were rounded from when they were last written to."""
        return {}

    def rounds_done(self) -> str:
        """What must be the same on all workers where they end, "" where they need not have done anything alike."""
        return ""

    def _named_shares(self) -> dict[str, Tensor]:
        owners = self.parameters if len(self.shares) == len(self.parameters) else self.shares
        return {self.watch.name(owner): own for owner, own in zip(owners, self.shares, strict=True)}

    @property
    def _is_watched(self) -> bool:
        """Whether all workers that began end together."""
        return self.group.size > 1 and not (self.is_sketch or self.survives or self.roster.grows)

    def _prove(self, tensors: Mapping[str, Tensor]) -> None:
        """Diverged unless `tensors`, by name, are the same on all workers."""
        if tensors and self._is_watched:
            with start.among_even():
                self.together(lambda group: start.same_weights(group, tensors, self.steps))

    def _give_mean(self, tensors: Mapping[str, Tensor]) -> None:
        """Give `tensors`, by name, the mean over the survivors, and prove that all have it."""
        if tensors:
            flat = FlatParameters(list(tensors.values()))
            flat.write(self.together(lambda group: start.mean_over(group, flat.read(flat.new()), "control")))
            self._prove(tensors)

    def consolidate(self) -> nn.Module:
        """Finish, then give every worker the one model of the run and return it: where workers agree they have it
        already, else it is the mean of the survivors' weights. Floating-point buffers of the state are averaged.
        """
        self.finish()
        averaged = {} if self.agrees else self._named_shares()
        kept = self.model.state_dict()  # buffers outside of it are derived, and equal everywhere
        averaged |= {name: b for name, b in self.model.named_buffers() if name in kept and b.is_floating_point()}
        if averaged:
            with self.landing(() if self.agrees else self.everything):
                self._give_mean(averaged)
                self.replica.spread(self.everything)
        for copies in self.copies if self.level == "parameter" else ():
            self._give_mean(copies.averages())
        self.guards_inner = False
        return self.replica.whole()
