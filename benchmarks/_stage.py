"""Run one function as a world of workers, one on each machine of `_machines`, joined as torchrun's variables say.

    answers = play(machines, "benchmarks.netns:worker", {"H": 25}, seconds=300)     # by rank

Each worker is `ip netns exec MACHINE python -m benchmarks._stage ...`: it calls function(world, arguments) and writes
its JSON-able answer into a file. Whoever started them ends them: after an error of one, after the time, on Ctrl-C; and
they end by themselves when their launcher is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks._machines import CABLE, Machine

ROOT = Path(__file__).resolve().parents[1]
_PORT = 29555  # on the first machine, whose ports are its own
_GLANCE = 0.1  # seconds between looks
_GRACE = 5.0  # seconds for the others to end by themselves after one has failed


def play(machines: Sequence[Machine], function: str, arguments: dict[str, Any], seconds: float) -> list[Any]:
    """The answers of `function`, "module:name", on every machine. RuntimeError with a worker's last words if one fails
    or if they take longer than `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        players = [
            _start(machine, rank, len(machines), machines[0].address, function, arguments, Path(folder))
            for rank, machine in enumerate(machines)
        ]
        try:
            ends_at = time.monotonic() + seconds
            while None in (codes := [player.poll() for player in players]) and not any(codes):
                if time.monotonic() > ends_at:
                    raise RuntimeError(f"{function} is not done after {seconds:g} s: {_words(Path(folder), codes)}")
                time.sleep(_GLANCE)
            if any(codes):  # perhaps only of the loss of another one, which is still ending
                codes = [_end(player, _GRACE) for player in players]
                raise RuntimeError(f"{function} failed: {_words(Path(folder), codes)}")
            return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(len(machines))]
        finally:
            for player in players:
                player.kill()
                player.wait()


def _start(
    machine: Machine, rank: int, size: int, host: str, function: str, arguments: dict[str, Any], folder: Path
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE,
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "MASTER_ADDR": host, "MASTER_PORT": str(_PORT),
    }  # fmt: skip
    command = [*machine.enter, sys.executable, "-m", "benchmarks._stage", function, json.dumps(arguments)]
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [*command, str(folder / f"{rank}.json")],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,  # its end tells the worker that this process is gone
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the launcher, which ends the workers
        )


def _end(player: subprocess.Popen[bytes], patience: float) -> int | None:
    """Its exit code, or None if it goes on."""
    try:
        return player.wait(patience)
    except subprocess.TimeoutExpired:
        return None


def _words(folder: Path, codes: Sequence[int | None]) -> str:
    """The last words of the workers that failed, or of all where none has."""
    told = [rank for rank, code in enumerate(codes) if code or not any(codes)]
    return "\n".join(
        f"machine {rank}: {line}" for rank in told for line in (folder / f"{rank}.log").read_text().splitlines()[-20:]
    )


def _end_with_launcher() -> None:
    os.read(sys.stdin.fileno(), 1)  # unbuffered: sys.stdin's lock would stop the interpreter at its end
    os._exit(1)


def _main(function: str, arguments: str, answer: str) -> None:
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    module, _, name = function.partition(":")
    called = getattr(import_module(module), name)  # a mistake in it need not wait for torch
    import torch

    import isles

    torch.set_num_threads(1)
    result = called(isles.init(), **json.loads(arguments))
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
