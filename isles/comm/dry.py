"""A world that is only planned: it has a size, and nothing can be sent in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from torch import Tensor

from isles.comm.mesh import Mesh, arrange
from isles.comm.tags import Channel, Tag
from isles.comm.traffic import Traffic
from isles.comm.transport import Steps, Transfer, WaitEvent, Work


@lru_cache(maxsize=8)  # nothing ever happens in it
def dry_mesh(workers: int, *, stage: int = 1, inner: int, rank: int, native: bool) -> Mesh:
    """The arranged world of `workers`, as `rank` sees it, before there are any. native: whether the backend that is
    planned for has a collective of its own.
    """
    return arrange(DryTransport(workers, native, rank), stage=stage, inner=inner)


class DryTransport:
    """ValueError for whatever wants to be sent."""

    step_seconds = 0.0
    away_seconds = 0.0

    def __init__(self, size: int, native: bool, rank: int = 0) -> None:
        self.size, self.native, self.rank, self.traffic = size, native, rank, Traffic()

    def _refuse(self) -> NoReturn:
        raise ValueError("this method exchanges something while it is made, which cannot be planned: run it instead")

    def send(self, peer: int, data: Tensor, tag: Tag) -> Work:
        self._refuse()

    def recv(self, peer: int | None, out: Tensor, tag: Tag) -> Work:
        self._refuse()

    def native_sum(self, buffer: Tensor, ranks: tuple[int, ...]) -> Work:
        self._refuse()

    def followed(self, start: Callable[[], Any], ranks: tuple[int, ...]) -> NoReturn:
        self._refuse()

    def process_group(self, ranks: tuple[int, ...], device: str) -> NoReturn:
        self._refuse()

    def run(self, protocol: Steps[Any], channel: Channel, deadline: float) -> Transfer[Any]:
        self._refuse()

    def event(self, seconds: float = 0.0) -> WaitEvent:
        self._refuse()

    def link_estimate(self) -> None:
        """No machine, no link."""

    def now(self) -> float:
        """No time passes."""
        return 0.0

    def compute(self, seconds: float) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
