"""A fragment is the part of a model that travels together: its flat vectors, and its exchanges under way. `cut` divides
a model into fragments that are exchanged apart (Streaming DiLoCo, arXiv 2501.18512, section 2.2):

    whole         one fragment
    sequential    blocks [0, n), [n, 2n), ...; then one of everything else (embedding, last norm, head)
    strided       with P = ceil(blocks / n): blocks {q, q + P, q + 2P, ...} for q = 0..P-1; then everything else
    [[...], ...]  one's own: lists of parameter names or their beginnings, such as "blocks.0"

"Blocks" are the members of the model's ModuleList with the most parameters. Every trainable parameter belongs to
exactly one fragment, a tied one to that of its first name. Where blocks are frozen, those of sequential and strided
that hold nothing else are left out.

`Sweep` is an outer round's work on a fragment's memory, block by block while a block's entries are in cache:

    snapshot   live weights, reference -> what travels                       one sweep
    answered   what came back, anchor, vectors -> anchor, live weights       one sweep
    alone      both in one sweep, where nothing travels: the payload is its own answer and never leaves the cache

Cost is memory traffic: what is written goes to memory and is read from there again by the next sweep. A rule that asks
for whole parameters gets one after the other; a sweep of their own then lands what came of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from isles.base.modes import torch_threads
from isles.comm.collectives.averaging import averaging
from isles.comm.collectives.basic import Stamp
from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import Transfer
from isles.models.blocks import blocks_of
from isles.replicas.config import Fragments
from isles.replicas.flat import FlatParameters, VectorMaker, clean_name, digest
from isles.replicas.parts.interfaces import Answer, Composition, RuleState
from isles.replicas.start import OTHER_STATE

_ARRIVED = ("participants", "failed", "whole", "balanced", "is_own_broken")  # of an exchange, in its state
_NUMBERS = ("rounds", "landed", "sent", "digest", "progress", "left_ratio")  # of a fragment, in its state


@dataclass(slots=True)
class Exchange:
    """One buffer under way, or arrived: `buffer` is replaced by the mean over the `participants`. `transfer` None: it
    has arrived, or has failed before a checkpoint. `own`: what this worker sent, as the others decode it, where
    somebody asks for it and it differs from what can be read elsewhere.
    """

    buffer: Tensor
    transfer: Transfer[tuple[int, ...]] | None
    own: Tensor | None = None
    participants: int = 1
    failed: bool = False
    """A peer failed and the method goes on without it; `buffer` holds nothing of use."""
    whole: bool = True
    """False if all skip the round, because a member had nothing to send that is of use."""
    balanced: bool = False
    """Error feedback of it is final."""
    members: tuple[int, ...] = ()
    """The members, where one of them may have nothing to send that is of use."""
    spares: bool = False
    """Such a member is left out of the mean; else all skip the round."""
    broken: tuple[int, ...] = ()
    """Those of `members` that had nothing of use."""
    is_own_broken: bool = False
    """Known before it arrives: this worker is one of them."""
    round: int = 0
    """Of its fragment, where it is under way."""
    postponed: bool = False
    """Nothing lands now, and nothing has changed; see `isles.replicas.loop.round_exchange`."""
    learned_meanwhile: Tensor | None = None
    """What was learned after it was sent, which its landing would undo."""

    def wait(self) -> None:
        """Block until it arrived; raises PeerLost, DeadlinePassed or Diverged. May be called again."""
        if self.transfer is None:
            return
        usable = self.transfer.wait()
        if self.members:
            usable = frozenset(usable)
            self.broken = tuple(member for position, member in enumerate(self.members) if position not in usable)
            self.whole = not self.broken or (self.spares and bool(usable))
            self.participants = len(usable) if self.whole else len(self.members)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, live ones, and numbers of what has arrived (`settle`)."""
        saved = {name: getattr(self, name) for name in _ARRIVED}
        return {"buffer": self.buffer, "own": self.own, "broken": list(self.broken), **saved}


@dataclass(slots=True, eq=False)
class InFlight:
    """One round of one fragment between its snapshot and its landing, after inner step `lands`."""

    fragment: Fragment
    lands: int
    payload: Exchange
    anchors: Exchange | None
    frozen: tuple[int, ...] = ()
    """Indices in the fragment of parameters that are frozen since before what travels was learned."""

    def exchanges(self) -> list[Exchange]:
        return [self.payload] if self.anchors is None else [self.payload, self.anchors]

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers; its exchanges must have arrived (`settle`)."""
        anchors = None if self.anchors is None else self.anchors.state_dict()
        payload = self.payload.state_dict()
        saved = {"fragment": self.fragment.index, "lands": self.lands, "frozen": list(self.frozen)}
        return {**saved, "payload": payload, "anchors": anchors}


class Scalars(dict[str, float]):
    """The numbers of an outer rule, all of whose names are there from the start."""

    @override
    def __setitem__(self, name: str, value: float) -> None:
        if name not in self:
            raise ValueError(f"the outer rule has no scalar {name!r}: add it to the names in its class's `scalars`")
        super().__setitem__(name, float(value))


class Fragment:
    """Parameters (this worker's shares of number `indices` of the model's) and the flat vectors (n,) that belong to
    them, 4 bytes an entry each for float32 models: the anchor, the outer rule's `vectors`, the `residual` of error
    feedback where there is one, the `reference` that progress is counted from where it is not the anchor. `averaging`,
    `anchor_averaging`: how its means are taken. names: of the parameters, for a rule that is called with them.
    """

    def __init__(
        self,
        index: int,
        indices: Sequence[int],
        parameters: Sequence[Tensor],
        parts: Composition,
        maker: VectorMaker | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.index, self.indices, self.names = index, indices, names
        self.flat = FlatParameters(parameters, maker, pinned=True)
        self.anchor = self.flat.read(self.flat.new())
        start = parts.rule.start
        self.vectors = {name: self.flat.new().fill_(start.get(name, 0.0)) for name in parts.rule.vectors}
        self.scalars = Scalars({name: start.get(name, 0.0) for name in parts.rule.scalars})
        left_over = parts.feedback is not None or parts.rule.needs_residual
        self.residual = self.flat.new().zero_() if left_over else None
        self.reference = self.flat.new().copy_(self.anchor) if parts.landing.moves_reference else self.anchor
        robust = parts.robust if parts.mixing.agrees else "none"
        self.averaging = averaging(parts.codec, *self.flat.layout, robust)
        anchors = parts.anchor_codec
        self.anchor_averaging = None if anchors is None else averaging(anchors, *self.flat.layout)
        self.scratch = self.flat.scratch()
        self.weight = 1.0
        """What this worker's payload is scaled by before it is encoded (`weights`)."""
        self.rounds = 0
        self.landed = 0
        """Times that the outer rule moved the anchor."""
        self.sent = 0
        """Inner step of the last round."""
        self.digest = 0
        """Hash of the anchor, where workers agree on it and it has moved."""
        self.run = 0
        """What its workers share before that: the run's number, see `ReplicaSync.run`."""
        self.ahead: Exchange | None = None
        """The exchange of anchors for the next round, started before it."""
        self.latest: Exchange | None = None
        """The exchange of the last round's payload."""
        self.retain_until = 0
        """The means of rounds up to this one are retained, one at a time, for another worker."""
        self.landed_mean: Tensor | None = None
        """The mean of the round that landed last: a landing uses up the answer's own buffer."""
        self.progress = 0.0
        """2-norm of what the last round had to send, before error feedback."""
        self.left_ratio = 0.0
        """2-norm of the residual after the last round that is final, per that."""
        self._spare: list[Tensor] = []

    def staging(self) -> Tensor:
        """A flat buffer to send from; give it back with `release` when its answer has landed."""
        return self._spare.pop() if self._spare else self.flat.new()

    def release(self, flight: InFlight) -> None:
        """Reuse a landed flight's buffers for a later round: fresh pages cost more than the arithmetic."""
        for exchange in flight.exchanges():
            self._spare.extend(buffer for buffer in (exchange.buffer, exchange.own) if buffer is not None)

    def swapped(self, *, copies_own: bool) -> Exchange:
        """An exchange of anchors that are equal everywhere, without a message."""
        own = self.anchor.clone() if copies_own else None
        return Exchange(self.staging().copy_(self.anchor), None, own)

    def compensate(self, payload: Tensor) -> bool:
        """payload <- payload + residual, residual <- the same. False if the sum is not finite."""
        assert self.residual is not None
        sums, squares = [], []
        for part, rest in zip(self.flat.parts(payload), self.flat.parts(self.residual), strict=True):
            squares.append(part.dot(part))
            rest.copy_(part.add_(rest))
            sums.append(part.sum())  # not finite if an entry is not
        self.progress = float(torch.stack(squares).sum().sqrt())
        return bool(torch.stack(sums).isfinite().all())

    @contextmanager
    def resting(self, indices: Sequence[int]) -> Iterator[None]:
        """Around a landing: the parameters at `indices`, their anchor and the rule's vectors stay as they are."""
        spans = self.flat.spans(indices)
        vectors = [self.anchor, *self.vectors.values()]
        resting = [(vector[span], vector[span].clone()) for span in spans for vector in vectors]
        yield
        for part, before in resting:
            part.copy_(before)
        self.flat.is_read = self.flat.is_read and not indices
        for index, span in zip(indices, spans, strict=True):
            live = self.flat.parameters[index].detach()
            live.copy_(self.anchor[span].view(live.shape))
            if self.reference is not self.anchor:
                self.reference[span].copy_(live.reshape(-1))

    def stamp(self, step: int, *, broken: bool = False) -> Stamp:
        """What must be the same at the others, when something of it is sent."""
        return Stamp(step, self.digest, broken) if self.digest else Stamp(step, self.run, broken, (OTHER_STATE,))

    def skip(self) -> None:
        """Undo the progress since the last landing: live weights and reference on the anchor."""
        self.flat.write(self.anchor)
        if self.reference is not self.anchor:
            self.reference.copy_(self.anchor)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, live ones, and numbers; exchanges under way must have arrived (`settle`)."""
        return {
            "anchor": self.anchor,
            "vectors": dict(self.vectors),
            **({"scalars": self._scalars()} if self.scalars else {}),
            "residual": self.residual,
            "reference": None if self.reference is self.anchor else self.reference,
            **{name: getattr(self, name) for name in _NUMBERS},
            "averaging": self.averaging.state_dict(),
            "ahead": None if self.ahead is None else self.ahead.state_dict(),
        }

    def _scalars(self) -> dict[str, Tensor]:
        """As tensors (), which a mean over replicas is taken of like that of vectors."""
        return {name: torch.tensor(one, dtype=torch.float64, device="cpu") for name, one in self.scalars.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["anchor"].numel() != self.flat.numel:
            saved = state["anchor"].numel()
            raise ValueError(
                f"the state has {saved} parameters, the model {self.flat.numel}: load it into its own model"
            )
        scalars = state.get("scalars", {})
        for name in (*self.vectors, *self.scalars):
            if name not in state["vectors"] and name not in scalars:
                raise ValueError(f"the state has no {name!r}, which the outer rule keeps: load one of the same rule")
        self.anchor.copy_(state["anchor"])
        self.scalars.update((name, float(scalars[name])) for name in self.scalars)
        for name, vector in self.vectors.items():
            vector.copy_(state["vectors"][name])
        if self.residual is not None:
            self.residual.copy_(state["residual"])
        if self.reference is not self.anchor:
            self.reference.copy_(state["reference"])
        for name in _NUMBERS:
            setattr(self, name, state[name])
        self.averaging.load_state_dict(state["averaging"])
        self.latest = None
        self.ahead = None if state["ahead"] is None else self.restored(state["ahead"])

    def restored(self, state: dict[str, Any]) -> Exchange:
        """An exchange that had arrived when its `state_dict` was taken."""
        own = state["own"]  # copied: the state may lie on another device
        return Exchange(
            self.staging().copy_(state["buffer"]),
            None,
            None if own is None else self.staging().copy_(own),
            broken=tuple(state["broken"]),
            **{name: state[name] for name in _ARRIVED},
        )


def fragments_of(
    parts: Composition,
    parameters: Sequence[Tensor],
    shares: Sequence[Tensor],
    names: Sequence[str],
    maker: VectorMaker | None = None,
) -> list[Fragment]:
    """The fragments of `parts`, of this worker's shares of the parameters in each, and their names. maker: of their
    vectors.
    """
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    cut = [[index_of[id(parameter)] for parameter in own] for own in parts.fragments or [parameters]]
    return [
        Fragment(number, own, [shares[i] for i in own], parts, maker, [names[i] for i in own])
        for number, own in enumerate(cut)
    ]


def show(fragments: Sequence[Fragment], weights: Sequence[Tensor]) -> None:
    """Write each fragment's flat vector into the live weights."""
    for fragment, flat in zip(fragments, weights, strict=True):
        fragment.flat.write(flat)


@contextmanager
def on_anchors(fragments: Sequence[Fragment], written: Callable[[], None]) -> Iterator[None]:
    """Meanwhile the live weights are the anchors. written: called whenever they have been written."""
    live = [fragment.flat.read(fragment.flat.new()) for fragment in fragments]
    show(fragments, [fragment.anchor for fragment in fragments])
    written()
    try:
        yield
    finally:
        show(fragments, live)
        written()


def without_partners(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a fragment (`Fragment.state_dict`) whose anchor is now equal on all of other workers. Anchors
    sent ahead went to partners that are no more; the next group's mean of them is known without a message.
    """
    ahead, anchor = state["ahead"], state["anchor"]
    if ahead is None:
        return state
    own = None if ahead["own"] is None else anchor
    return {**state, "ahead": {**ahead, "buffer": anchor, "own": own, "failed": False}}


_LAYERS = 3  # the paper's; a model of fewer than five blocks is cut in two nevertheless


def cut(model: nn.Module, fragments: Fragments, layers_per_fragment: int | None = None) -> list[list[nn.Parameter]]:
    """The parameters of each fragment, in the model's order. ValueError for what does not fit the model."""
    named = {clean_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if fragments == "whole":
        return [list(named.values())]
    if isinstance(fragments, str):
        prefixes_of = _by_blocks(model, fragments, layers_per_fragment)
    else:
        prefixes_of = [[clean_name(prefix) for prefix in prefixes] for prefixes in fragments]
    owners = {name: _owner(name, prefixes_of) for name in named}
    lost = [name for name, owner in owners.items() if owner is None]
    if lost and not isinstance(fragments, str):
        raise ValueError(f"fragments: {lost[0]!r} is in none of them; name every parameter, or its beginning, once")
    cut = [[named[name] for name in named if owners[name] == index] for index in range(len(prefixes_of))]
    if lost:
        cut.append([named[name] for name in lost])
    if isinstance(fragments, str):
        cut = [parameters for parameters in cut if parameters]  # blocks that are frozen as a whole are no fragment
    if len(cut) > MAX_FRAGMENTS:
        raise ValueError(f"fragments: {len(cut)} are more than {MAX_FRAGMENTS}; choose a larger layers_per_fragment")
    empty = [index for index, parameters in enumerate(cut) if not parameters]
    if empty:
        raise ValueError(f"fragments: number {empty[0]} holds no trainable parameter of the model; take it out")
    return cut


def _by_blocks(model: nn.Module, pattern: str, layers: int | None) -> list[list[str]]:
    name, blocks = blocks_of(model)
    if not blocks:
        raise ValueError(
            f'fragments = "{pattern}" needs a model with its blocks in an nn.ModuleList; choose "whole", or name the '
            "fragments one by one"
        )
    if layers is None:
        layers = min(_LAYERS, -(-len(blocks) // 2))
    count = -(-len(blocks) // layers)
    numbers = range(len(blocks))
    groups = (
        [numbers[q * layers : (q + 1) * layers] for q in range(count)]
        if pattern == "sequential"
        else [numbers[q::count] for q in range(count)]
    )
    return [[clean_name(f"{name}.{number}") if name else str(number) for number in group] for group in groups]


def _owner(name: str, prefixes_of: Sequence[Sequence[str]]) -> int | None:
    """The fragment whose prefix of `name` is there; ValueError where there are two."""
    owners = [
        index
        for index, prefixes in enumerate(prefixes_of)
        if any(name == prefix or name.startswith(prefix.rstrip(".") + ".") for prefix in prefixes)
    ]
    if len(owners) > 1:
        raise ValueError(f"fragments: {name!r} is in number {owners[0]} and in number {owners[1]}; name it once")
    return owners[0] if owners else None


class FiniteCheck:
    """Takes the blocks of one payload, each while it is in cache, then says whether all of it was finite."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def take(self, part: Tensor) -> None:
        """The next block (b,)."""
        self._sums.append(part.sum())  # not finite if an entry is not

    @property
    def is_usable(self) -> bool:
        """Whether all entries were finite, and so were the sums of blocks: one that overflows counts as not finite."""
        return not self._sums or bool(torch.stack(self._sums).isfinite().all())


class NoCheck(FiniteCheck):
    """Where the payload is finite for sure, or reaches nobody else."""

    @override
    def take(self, part: Tensor) -> None:
        """Nothing is read."""


class Sweep:
    """The views of one fragment's blocks, made anew for each sweep: a user may move parameters between rounds.

    hashed: whether workers agree on the anchor, so that landing also hashes it. frozen: indices in the fragment of
    parameters that the round leaves as they are.
    """

    def __init__(self, fragment: Fragment, parts: Composition, hashed: bool, frozen: Sequence[int] = ()) -> None:
        self.fragment, self.flat, self.parts, self.hashed = fragment, fragment.flat, parts, hashed
        self.scratch = fragment.scratch
        self.blocks, self.anchors = self.flat.blocks(), self.flat.parts(fragment.anchor)
        self.left = fragment.residual if parts.rule.needs_residual else None
        own = fragment.reference is fragment.anchor
        self.references = self.anchors if own else self.flat.parts(fragment.reference)
        # A block may hold frozen entries beside others, which a rule's sums must not count.
        self.by_tensor = parts.rule.whole or bool(frozen and parts.rule.scalars)
        self.frozen = frozen if self.by_tensor else ()
        self.moved = self.flat.parts(fragment.anchor, by_tensor=self.by_tensor)
        cut = {name: self.flat.parts(one, by_tensor=self.by_tensor) for name, one in fragment.vectors.items()}
        self.vectors = [{name: cut[name][i] for name in cut} for i in range(len(self.moved))]
        self.words = self.flat.words(fragment.anchor) if hashed else ()
        self.sums: list[Tensor] = []
        self.local_share = (
            parts.landing.local_share if self.flat.is_staged else None
        )  # where the landing is done by `FlatParameters`

    def snapshot(self, out: Tensor, check: FiniteCheck) -> FiniteCheck:
        """Write what travels into `out` (numel,), and show it to `check`."""
        self.flat.down()
        for i, part in enumerate(self.flat.parts(out)):
            self._form(i, part)
            check.take(part)
        return check

    def answered(self, flight: InFlight, fresh: Tensor | None) -> int:
        """Land what came back of a flight; the anchor's hash, or 0. fresh: see `Reading.read`."""
        payload, shared, read = flight.payload, flight.anchors, self.parts.reading.read
        flat, by_tensor = self.flat, self.by_tensor
        mine = self.fragment.anchor if shared is None or shared.own is None else shared.own
        vectors = (fresh, payload.own, None if shared is None else shared.buffer, mine, self.left)
        new, own, theirs, anchors, left = (flat.parts_or_none(one, by_tensor=by_tensor) for one in vectors)
        self.fragment.landed += 1
        if self.local_share is None:
            flat.down()
        # Sums over a block, and products of matrices, have other bits with more threads, which others may have.
        with torch_threads(1) if self.hashed and self.parts.rule.mixes_entries else nullcontext():
            for i, mean in enumerate(flat.parts(payload.buffer, by_tensor=by_tensor)):
                if i not in self.frozen:
                    gradient = read(mean, new[i], own[i], payload.participants)
                    self._land(i, Answer(gradient, theirs[i], anchors[i], left[i]))
        for i in range(len(self.blocks)) if by_tensor else ():
            self._write(i)
        return self._landed()

    def check(self) -> FiniteCheck:
        """Whether what would travel is finite, without keeping it."""
        check, room = FiniteCheck(), self.flat.scratch()
        self.flat.down()
        for i, anchor in enumerate(self.anchors):
            part = room[: anchor.numel()]
            self._form(i, part)
            check.take(part)
        return check

    def alone(self) -> int:
        """Snapshot and landing of a round that has one member and loses nothing; the anchor's hash, or 0."""
        room = self.flat.scratch()
        self.fragment.landed += 1
        self.flat.down()
        for i, anchor in enumerate(self.anchors):
            part = room[: anchor.numel()]
            self._form(i, part)
            self._land(i, Answer(self.parts.reading.read(part, None, None, 1)))
        return self._landed()

    def _form(self, i: int, out: Tensor) -> None:
        block = self.blocks[i]
        reference = self.flat.rounded(block, self.references[i])
        self.parts.rule.form(out, block.read(self.scratch), reference, self.anchors[i])
        if self.fragment.weight != 1.0:
            out.mul_(self.fragment.weight)

    def _land(self, i: int, answer: Answer) -> None:
        anchor, state, rule = self.moved[i], RuleState(self.vectors[i], self.fragment.scalars), self.parts.rule
        if rule.whole:
            shape = self.flat.parameters[i].shape
            anchor, answer = anchor.view(shape), answer.shaped(shape)
            vectors = {name: vector.view(shape) for name, vector in state.vectors.items()}
            state = RuleState(vectors, state.scalars, self.fragment.names[i])
        rule.apply(anchor, answer, state, self.fragment.landed)
        if not self.by_tensor:
            self._write(i)  # while it is in cache

    def _landed(self) -> int:
        self.parts.rule.end(self.fragment.scalars, self.fragment.landed)
        self.flat.up(self.local_share or 0.0)
        return digest(self.sums)

    def _write(self, i: int) -> None:
        """Land block `i` of the anchor, which has moved."""
        block, anchor = self.blocks[i], self.anchors[i]
        shaped = block.shaped(anchor)
        if self.local_share is None:
            origin = shaped if self.references is self.anchors else block.shaped(self.references[i])
            self.parts.landing.land(block.live, shaped, origin)
        else:
            torch._foreach_copy_(block.live, shaped)
        if self.hashed:
            self.sums.append(self.words[i].sum())  # while it is in cache
