"""How processes that somebody else has started meet: at a store, within a deadline, and by name if one is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from isles.comm.errors import RendezvousFailed

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
    ends_at = time.monotonic() + seconds
    store.set(f"here/{rank}", "")
    for peer in ranks:
        try:
            store.wait([f"here/{peer}"], timedelta(seconds=max(ends_at - time.monotonic(), 0.01)))
        except RuntimeError as error:  # each kind of store has its own
            try:
                missing = [str(one) for one in ranks if not store.check([f"here/{one}"])]
            except RuntimeError:
                raise RendezvousFailed(f"rank {rank}: the store where the workers meet is gone ({error})") from None
            who = ", ".join(missing or [str(peer)])
            raise RendezvousFailed(
                f"worker {who} of {len(ranks)} did not come to isles.init() within {seconds:g} s: every process that "
                f"is started must call it; {_LATER}"
            ) from None


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Torch's own errors within say `what` first."""
    try:
        yield
    except dist.DistError as error:
        raise RendezvousFailed(f"{what} ({str(error).splitlines()[0]})") from None
