"""The small parts an outer method is composed of, as interfaces. A method's file names its parts and holds its own
rule.

    cadence   which fragment is sent at step t, and when its answer lands
    mixing    with whom
    codec     in what form (`isles.comm.codecs`), with or without error feedback
    reading   what of the answer counts as the outer gradient
    rule      what that does to the anchor
    landing   what the anchor does to the live weights

Signs: outer gradient = reference - live, positive values are subtracted. All vectors are flat, float32 (float64 for
float64 models), and the functions work on cache-sized blocks of them, in place; a rule may ask for whole parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from isles.comm.codecs.base import Codec
from isles.comm.codecs.lowrank import Form, LowRank
from isles.comm.collectives.robust_rules import ROBUST, Robust
from isles.replicas.config import Feedback, OnBroken, one_of
from isles.replicas.parts.choices import Received
from isles.replicas.parts.legal import AXES, member, refuse


class Cadence(Protocol):
    """Steps are counted from 1: step t is the t-th inner step, just done."""

    @property
    def fragments(self) -> int:
        """Number of fragments that the model is cut into."""

    def sends(self, step: int) -> Sequence[int]:
        """Fragments that are sent right after inner step `step`."""

    @property
    def rounds_late(self) -> int:
        """0: an answer lands before its fragment is sent again. d: when its fragment is sent for the d-th time after;
        a fragment then lands whenever it is sent, the first d times on an answer of nothing.
        """

    def lands(self, sent: int) -> int:
        """The step after which the answer to what was sent at step `sent` lands (>= sent)."""


class Mixing(Protocol):
    """Who exchanges with whom in a round; known in advance to everyone, without a message."""

    @property
    def agrees(self) -> bool:
        """True if all workers receive the same answer, so that their anchors stay equal to the bit."""

    def members(self, round: int, size: int, position: int) -> tuple[int, ...]:
        """Ascending positions of the group of `position` in round 1, 2, ... of a world of `size`, itself included."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back of one round, as blocks (b,) of the same entries; in a parameter's shape with `OuterRule.whole`.

    mean: the mean of what the participants sent, as every one of them decoded it; may be written to.
    anchors: the mean of the participants' anchors, where the rule shares anchors; may be written to.
    own_anchor: with them, this worker's anchor as the others decoded it: what `anchors` must be compared with, or a
    lossy codec's rounding would pull anchors to its grid.
    left: where the rule keeps it, this worker's payload less what of it got into the mean.
    """

    mean: Tensor
    anchors: Tensor | None = None
    own_anchor: Tensor | None = None
    left: Tensor | None = None

    def shaped(self, shape: Sequence[int]) -> Answer:
        """The same memory in another shape."""
        mean, *rest = (self.mean, self.anchors, self.own_anchor, self.left)
        return Answer(mean.view(shape), *(None if one is None else one.view(shape) for one in rest))


class Reading(Protocol):
    """What of an answer counts as the outer gradient."""

    @property
    def needs_own(self) -> bool:
        """True if it asks for what this worker itself sent; anchors are then each worker's own."""

    def read(self, mean: Tensor, fresh: Tensor | None, own: Tensor | None, participants: int) -> Tensor:
        """The outer gradient's block, which may be `mean`'s memory. fresh: what this worker sends just now, where it
        does; own: what it contributed to the mean; both as the others decode them. participants: of the mean.
        """


@dataclass(frozen=True, slots=True)
class RuleState:
    """What a rule keeps with a fragment, as one call of `OuterRule.apply` sees it.

    vectors: by name, the same entries as the anchor's, in its shape; written to in place.
    scalars: by name, the fragment's numbers, float64; assigned to: what one call adds, the next ones see.
    name: with `OuterRule.whole` that of the parameter, such as "blocks.0.attention.qkv.weight"; else "".
    """

    vectors: Mapping[str, Tensor]
    scalars: MutableMapping[str, float] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class OuterRule(ABC):
    """What a round does to the anchor, and what is kept for that from round to round. momentum: outer momentum in
    [0, 1); 0 without.

    Each fragment has its own vectors and scalars; in a pipeline, each stage has its own. Where anchors are each
    worker's own (pairs, groups, rounds done alone), so are these. Checkpoints hold both, and so does the state that a
    joiner begins with. They change only when a round lands. A round that all skip leaves them; an answer of nothing
    (rounds late, before the first answer) lands as zeros.

    The calls of a landing go through the fragment's parameters in the model's order, and through each parameter from
    its first entry; where they are cut depends on the shapes alone. Sums and matrix products have other bits with more
    threads, so a rule with `scalars` or `whole` runs on one thread where workers agree on anchors. Workers with the
    same torch and the same kind of CPU then hold equal bits, a joiner too, and a resumed run goes on with them.

    In an island each worker holds rows of every parameter: a rule with `scalars` or `whole` is refused there.
    """

    momentum: float = 0.0
    name: ClassVar[str] = "own"
    """What the table of what goes together knows it as."""
    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors it keeps beside the anchor, such as the momentum."""
    scalars: ClassVar[tuple[str, ...]] = ()
    """Names of the numbers it keeps, such as a learned rate."""
    whole: ClassVar[bool] = False
    """`apply` takes a parameter in its shape, such as a matrix, not a block of entries."""
    shares_anchors: ClassVar[bool] = False
    """Workers also exchange their anchors."""
    needs_residual: ClassVar[bool] = False
    """What of its payload did not get into the mean stays the worker's own; anchors are then each worker's own."""

    @property
    def mixes_entries(self) -> bool:
        """Whether what it does to an entry depends on others: a part of the model is then not enough."""
        return self.whole or bool(self.scalars)

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """Write the block that travels into `out`, from the live weights, what they were when they last landed, and
        the anchor. Unless a rule says otherwise it is the outer gradient, reference - live.
        """
        torch.sub(reference, live, out=out)

    @abstractmethod
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        """Move a block of the anchor, in place.

        Args:
            anchor: Its entries (b,); with `whole`, all of a parameter in its shape. Parameters that are frozen since
                before the round are left out where the rule has `scalars` or `whole`, and put back where it has not.
            answer: What came back of the round, of the same entries.
            state: What the rule keeps, of the same entries.
            round: How often the anchor has moved with this landing, 1, 2, ...: the same on all blocks, and on all
                workers that skipped no round of their own; kept by checkpoints.
        """

    def end(self, scalars: MutableMapping[str, float], round: int) -> None:
        """Called once after the last `apply` of a landing of a fragment: what its sums come to, for the next round.

        Args:
            scalars: The fragment's numbers by name; assigned to.
            round: As in `apply`.
        """
        del scalars, round  # nothing has been summed

    @property
    def start(self) -> Mapping[str, float]:
        """By name, what the entries of a vector, or a scalar, are before round 1; 0 where it is not named."""
        return {}


class Landing(Protocol):
    """What the moved anchor does to the live weights."""

    @property
    def moves_reference(self) -> bool:
        """True if it leaves the live weights elsewhere than on the anchor, and counts their progress from there."""

    @property
    def local_share(self) -> float | None:
        """k, if it is live = k live + (1 - k) anchor and no more: done on a GPU, weights there need not be read for it.
        None: it is something else.
        """

    def land(self, live: list[Tensor], anchor: list[Tensor], reference: list[Tensor]) -> None:
        """Write the live weights, in place, from anchors of the same shapes (the dtypes may differ), and the reference
        where it moves. All are on the CPU.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback:
    """What a codec loses of a fragment is added to the next one of it: a = x + E is sent, then

        local    E <- decay (a - what the others decoded of it)
        global   E <- decay (a - the mean that came back)

    A round in which some worker's a is not finite is skipped by all: E <- 0, anchors stay.
    """

    form: Literal["local", "global"] = "local"
    decay: float = 1.0


def feedback(form: Feedback, decay: float) -> ErrorFeedback | None:
    """The part that the settings name."""
    return None if form == "none" else ErrorFeedback(form=form, decay=decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """One choice on each axis: a whole outer method. ValueError for parts that do not go together (`legal`)."""

    cadence: Cadence
    mixing: Mixing
    codec: Form
    reading: Reading = field(default_factory=Received)
    rule: OuterRule
    landing: Landing
    fragments: Sequence[Sequence[nn.Parameter]] | None = None
    """The parameters of each; None: all in one."""
    feedback: ErrorFeedback | None = None
    anchor_codec: Codec | None = None
    prefetch_anchors: bool = False
    """Send the anchor right after it moved, for the next round, behind the next inner steps."""
    on_peer_failure: Literal["raise", "solo"] = "raise"
    """solo: a round whose partner is lost or late is done alone."""
    on_broken: OnBroken = "skip"
    """skip: all skip a round with a share that is not finite. leave out: it is the mean of the others' shares."""
    robust: Robust = "none"
    """How the shares of all become a mean (`isles.comm.collectives.robust`)."""

    def __post_init__(self) -> None:
        refuse(self.choice)
        one_of("on_broken", self.on_broken, get_args(OnBroken))
        why = self.cannot_leave_out
        if self.on_broken == "leave out" and why is not None:
            raise ValueError(f'on_broken = "leave out": {why}; choose "skip"')
        one_of("robust", self.robust, ROBUST)
        if self.robust != "none" and (why := self.cannot_be_robust) is not None:
            raise ValueError(f'robust = "{self.robust}": {why}; choose robust = "none", or other parts')
        rule = self.rule
        for name in rule.start:
            if name not in (*rule.vectors, *rule.scalars):
                raise ValueError(f"rule {rule.name}: start names {name!r}, which is none of its vectors and scalars")
        if twice := set(rule.vectors) & set(rule.scalars):
            raise ValueError(f"rule {rule.name}: {min(twice)!r} is a vector and a scalar; give one another name")
        late = self.on_peer_failure == "solo" and self.cadence.lands(0) > 0
        if isinstance(self.codec, LowRank) and (self.reading.needs_own or late):
            raise ValueError(
                f"codec = {self.codec.name!r}: what others make of a low-rank share is known only with the mean, so it "
                'cannot stand in for a lost answer: choose on_peer_failure = "raise", or another codec'
            )

    @property
    def cannot_leave_out(self) -> str | None:
        """Why a mean of what only some workers send would not do; None if it would."""
        if self.reading.needs_own:
            return (
                "an own share counts at once as a part of a mean of all, and could not be taken back from a smaller one"
            )
        if self.rule.needs_residual:
            return "a worker keeps what did not travel of its weights, which is what is broken"
        return "nothing travels, so there is no worker to leave out" if self.choice["mixing"] == "nobody" else None

    @property
    def cannot_be_robust(self) -> str | None:
        """Why a robust rule is not defined for its means; None if it is, or if only the last model is one."""
        if not self.mixing.agrees:
            return None
        if isinstance(self.codec, LowRank) or (self.codec.biased and not self.codec.shared_mask):
            return f'shares in the form codec = "{self.codec.name}" are no vectors that can be compared entry by entry'
        if self.feedback is not None and self.feedback.form == "global":
            return 'error_feedback = "global" sends again what the rule has left out'
        if self.reading.needs_own:
            return "an own share counts at once as a part of a mean of all"
        return "a worker keeps what did not get into the mean" if self.rule.needs_residual else None

    @property
    def choice(self) -> dict[str, str]:
        """Its members by axis, for `legal`."""
        made = {axis: member(axis, getattr(self, axis)) for axis in AXES if axis != "error_feedback"}
        return made | {"error_feedback": "none" if self.feedback is None else self.feedback.form}

    @property
    def own_answer(self) -> bool:
        """True if what a worker forms is, to the bit, the answer that it lands on at once in a round of its own, block
        by block.
        """
        plain = self.codec.lossless and self.feedback is None and not self.reading.needs_own
        return plain and not (self.rule.shares_anchors or self.rule.mixes_entries) and self.cadence.lands(0) == 0
