"""One that is frozen or cut off while much is being sent to it: told within its lease. Real sessions and processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks._machines import Machine, machines, unavailable
from isles.comm import credentials
from tests.membership.sessions import free_port

LEASE = 2.0  # seconds
SETTING = """
import sys, threading, time
from pathlib import Path
from isles.comm import credentials
from isles.membership.tls_session import open_router, open_session
folder, address = sys.argv[1:]
mine = credentials.read(Path(folder))
"""
CLIENT = """
session = open_session(mine.token, address)
session.serve("isles/dial/1", lambda query: query.reply())
session.present("isles/member/1")
time.sleep(600)
"""
ROUTER = """
session = open_router(mine, address, lease=2.0)
session.watch("isles/member/*", lambda key, there: print("there" if there else "gone", flush=True))
chunk, flying = bytes(1 << 20), threading.Semaphore(4)
while True:
    flying.acquire()
    session.ask("isles/dial/1", chunk, lambda reply, refusal: flying.release(), seconds=2.0)
    time.sleep(0.01)
"""


def freeze(client: subprocess.Popen[str], _: Machine) -> None:
    os.kill(client.pid, signal.SIGSTOP)


def cut(_: subprocess.Popen[str], island_rank: Machine) -> None:
    island_rank.detach()


@pytest.mark.long
@pytest.mark.parametrize("how", [freeze, cut])
def test_told_within_the_lease(tmp_path: Path, how: Callable[[subprocess.Popen[str], Machine], None]) -> None:
    """What is being written to it does not keep the engine from giving it up."""
    if reason := unavailable():
        pytest.skip(reason)
    with ExitStack() as stack:
        light, island_rank = stack.enter_context(machines(2))
        folder, address = tmp_path / "credentials", f"{light.address}:{free_port()}"
        credentials.found(folder)

        def start(on: Machine, code: str) -> subprocess.Popen[str]:
            own = shutil.copytree(folder, tmp_path / on.name)
            command = [*on.enter, sys.executable, "-c", SETTING + code, str(own), address]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        router = start(light, ROUTER)
        said = list[str]()
        assert router.stdout is not None
        lines = router.stdout
        listening = threading.Thread(target=lambda: said.extend(line.strip() for line in lines), daemon=True)
        listening.start()
        client = start(island_rank, CLIENT)
        until(lambda: said == ["there"], 30.0)
        time.sleep(1.0)
        how(client, island_rank)
        began = time.monotonic()
        until(lambda: said == ["there", "gone"], 40.0)
        took = time.monotonic() - began
        print(f"{how.__name__}: told after {took:.2f} s")
        assert took <= LEASE + 1.5


def until(over: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not over():
        assert time.monotonic() < ends
        time.sleep(0.01)
