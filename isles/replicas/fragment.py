"""The part of the model that travels together, and its exchanges under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isles.comm.transport import Transfer
from isles.replicas.flat import FlatParameters


@dataclass(slots=True)
class Exchange:
    """One buffer under way, or arrived: `buffer` is replaced by the mean over the members. `transfer` None: it has
    arrived, or has failed before a checkpoint. `own`: what was sent, as the others decode it, where that differs.
    """

    buffer: Tensor
    transfer: Transfer[None] | None
    own: Tensor | None = None
    failed: bool = False
    """A peer failed and the method goes on without it; `buffer` holds nothing of use."""

    def wait(self) -> None:
        """Block until it arrived; raises PeerLost, DeadlinePassed or Diverged."""
        if self.transfer is not None:
            self.transfer.wait()


@dataclass(slots=True)
class Flight:
    """One round of one fragment between its snapshot and its landing, after inner step `lands`."""

    fragment: Fragment
    lands: int
    payload: Exchange
    anchors: Exchange | None

    def exchanges(self) -> list[Exchange]:
        """What it waits for."""
        return [self.payload] if self.anchors is None else [self.payload, self.anchors]


class Fragment:
    """Parameters, their anchor, and the outer rule's vectors, all flat (n,): 4 bytes an entry each for float32
    models.
    """

    def __init__(self, index: int, parameters: list[nn.Parameter], vectors: tuple[str, ...]) -> None:
        self.index = index
        self.flat = FlatParameters(parameters)
        self.anchor = self.flat.read(self.flat.new())
        self.vectors = {name: torch.zeros_like(self.anchor) for name in vectors}
        self.scratch = self.flat.scratch()
        self.rounds = 0
        self.sent = 0
        """Inner step of the last round."""
        self.digest = 0
        """Hash of the anchor, where workers agree on it."""
        self.ahead: Exchange | None = None
        """The exchange of anchors for the next round, started before it."""
        self._spare: list[Tensor] = []

    def staging(self) -> Tensor:
        """A flat buffer to send from; give it back with `release` when its answer has landed."""
        return self._spare.pop() if self._spare else self.flat.new()

    def release(self, flight: Flight) -> None:
        """Reuse a landed flight's buffers for a later round: fresh pages cost more than the arithmetic."""
        for exchange in flight.exchanges():
            self._spare.extend(buffer for buffer in (exchange.buffer, exchange.own) if buffer is not None)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers; exchanges under way must have arrived (`settle`)."""
        return {
            "anchor": self.anchor.clone(),
            "vectors": {name: vector.clone() for name, vector in self.vectors.items()},
            "rounds": self.rounds,
            "sent": self.sent,
            "digest": self.digest,
            "ahead": None if self.ahead is None else self.ahead.buffer.clone(),
            "ahead_own": None if self.ahead is None or self.ahead.own is None else self.ahead.own.clone(),
            "ahead_failed": self.ahead is not None and self.ahead.failed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        if state["anchor"].numel() != self.flat.numel:
            saved = state["anchor"].numel()
            raise ValueError(
                f"the state has {saved} parameters, the model {self.flat.numel}: load it into its own model"
            )
        self.anchor.copy_(state["anchor"])
        for name, vector in self.vectors.items():
            vector.copy_(state["vectors"][name])
        self.rounds, self.sent, self.digest = state["rounds"], state["sent"], state["digest"]
        ahead, own = state["ahead"], state["ahead_own"]
        if ahead is not None:
            own = None if own is None else self.staging().copy_(own)  # copied: the state may lie on another device
            ahead = Exchange(self.staging().copy_(ahead), None, own, state["ahead_failed"])
        self.ahead = ahead
