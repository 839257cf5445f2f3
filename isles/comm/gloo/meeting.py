"""How processes that somebody else has started meet: at a store, within a deadline, and by name if one is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from isles.comm.errors import RendezvousFailed

_SOON, _LATE = 0.001, 0.05  # seconds between looks at who is there, first and at most
_LATER = "raise the deadline if it starts later: isles.init(deadlines=isles.Deadlines(join=SECONDS))"


def store_of(variables: Mapping[str, str], seconds: float) -> dist.Store:
    """That of torchrun, or one at rank 0, as `world_variables` describes it."""
    address, port, rank = variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), int(variables["RANK"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"nobody answers at {address}:{port} for {seconds:g} s, where rank 0 should"
    with failing_as(f"rank {rank}: {where}; {_LATER}"):
        return dist.TCPStore(
            address, port, None, is_host, timedelta(seconds=seconds), wait_for_workers=False, multi_tenant=True
        )


def meet(store: dist.Store, rank: int, ranks: Sequence[int], seconds: float) -> None:
    """Wait until all of `ranks` have called this with a store of the same keys. RendezvousFailed after `seconds`."""
    ends_at, pause = time.monotonic() + seconds, _SOON
    try:
        store.set(f"here/{rank}", "")
        # Asked again and again: a wait of torch's that has timed out leaves a connection that may answer wrongly.
        while missing := [str(one) for one in ranks if not store.check([f"here/{one}"])]:
            if time.monotonic() > ends_at:
                raise RendezvousFailed(
                    f"worker {', '.join(missing)} of {len(ranks)} did not come to isles.init() within {seconds:g} s: "
                    f"every process that is started must call it; {_LATER}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LATE)
    except dist.DistError as error:
        raise RendezvousFailed(f"rank {rank}: the store where the workers meet is gone ({error})") from None


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Torch's own errors within say `what` first."""
    try:
        yield
    except dist.DistError as error:
        raise RendezvousFailed(f"{what} ({str(error).splitlines()[0]})") from None
