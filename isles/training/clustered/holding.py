"""What a worker of a run in clusters holds, as its place changes: who serves what is settled at averages.

stands by              nothing, until it takes a lost one's place or a new cluster begins
serves                 its stage of the model
cluster is broken      its stage: what it did since the last average is worthless, until somebody mends the cluster
leaves                 its stage, until whoever takes its place has it
"""

from __future__ import annotations

from collections.abc import Callable

from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.pipeline.pipeline import Cut
from isles.pipeline.ravnest.agreement import ClusterAgreement
from isles.pipeline.ravnest.averaging import ClusterAverage
from isles.training.clustered.cuts import cuts_at, first_blocks, shared_segments
from isles.training.clustered.serving import Serving, layout_of_seats
from isles.training.config.sections import Config
from isles.training.text import Text


class NodeHolding:
    """cuts: of each cluster. update: called after the backward pass of an update, with how many updates its gradients
    are old. is_open: whether workers come and leave.
    """

    def __init__(
        self,
        config: Config,
        world: Mesh,
        corpus: Corpus | None,
        agreement: ClusterAgreement,
        cuts: list[Cut],
        update: Callable[[int], None],
        *,
        is_open: bool,
    ) -> None:
        self._config, self._world, self._corpus, self._agreement = config, world, corpus, agreement
        self._update, self._is_open = update, is_open
        self.cuts = cuts
        self.average = ClusterAverage(
            agreement,
            shared_segments(config, cuts),
            by_samples=getattr(config.replicas, "weights", "equal") == "samples",
            with_state=config.pipeline.ravnest.average_optimizer,
        )
        self.serving: Serving | None = None
        """None: this worker stands by."""
        self.is_broken = False
        """Whether a node of its cluster is lost, and nobody has taken its place yet."""
        self.tokens_before = 0
        """Read in places that this worker had before."""
        self._recut()
        if agreement.trains:
            self._serve()

    @property
    def text(self) -> Text | None:
        """At the root."""
        return None if self.serving is None else self.serving.text

    @property
    def trains(self) -> bool:
        """Whether it takes part in what its cluster does now."""
        return self._agreement.trains and not self.is_broken

    @property
    def tokens(self) -> int:
        """Read for the updates so far."""
        return self.tokens_before + (0 if self.serving is None else self.serving.tokens)

    @property
    def samples(self) -> int:
        """Sequences of an update."""
        return 0 if self.serving is None else self.serving.samples

    def take_place(self, steps: int, sequences: int) -> None:
        """Hold what this worker's place asks for now, after so many updates and sequences of the data's order."""
        seats, here = self._agreement.seats, self._world.rank
        is_recut = self._recut()
        place, serving = seats.place(here), self.serving
        gives, takes = ([pair[side] for pair in seats.handed] for side in (0, 1))
        if place is None and here not in gives:
            self._serve_nothing()
        elif here in gives:
            assert serving is not None
            self.average.serve(serving.model, serving.optimizer)
        elif place is not None and (place[0] in seats.complete or here in takes):
            self._begin_at(*place, steps, sequences)
        elif serving is not None and self.trains:
            world = self._arranged()
            if world.stage.ranks != serving.world.stage.ranks or world.reader != serving.world.reader:
                serving.regroup(world, steps, sequences)
            if is_recut:
                self.average.serve(serving.model, serving.optimizer)

    def _recut(self) -> bool:
        """Whether the clusters are cut anew: then what is averaged with whom is, too."""
        wanted = self._agreement.seats.cuts
        if wanted == tuple(map(first_blocks, self.cuts)):
            return False
        self.cuts = cuts_at(self._config, wanted)
        self.average.recut(shared_segments(self._config, self.cuts))
        return True

    def _begin_at(self, cluster: int, stage: int, steps: int, sequences: int) -> None:
        """In a cluster that wants the others' weights, or a place whose holder leaves."""
        is_new, seats = self.serving is None, self._agreement.seats
        self._serve().begin_after(steps, sequences)
        if is_new:
            told = f"worker {self._world.rank} serves stage {stage} of cluster {cluster} from step {steps} on"
            self.note(told if self._is_open else f"{told}, in place of one that was lost")
        if stage == 0 and self._is_open and cluster in seats.out:
            told = f"cluster {cluster} begins at step {steps} with the others' weights"
            self.note(f"{told}: {seats.told_of(cluster)}")

    def _serve(self) -> Serving:
        """Hold what this worker's place is now."""
        self._serve_nothing()
        world = self._arranged()
        self.serving = Serving(self._config, world, self.cuts[world.place.replica], self._update, self._corpus)
        self.average.serve(self.serving.model, self.serving.optimizer)
        return self.serving

    def _serve_nothing(self) -> None:
        self.tokens_before, self.serving, self.is_broken = self.tokens, None, False

    def _arranged(self) -> Mesh:
        return self._world.arranged(layout_of_seats(self._agreement.seats, self._world.size))

    def note(self, text: str) -> None:
        """Tell whoever started the run."""
        self._world.report({"notice": text})
