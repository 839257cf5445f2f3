"""A mistake with `isles lighthouse` or `isles join`: one line that says what to do, exit code 2, nothing left."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isles import cli
from isles.cli.elastic import join, lighthouse
from isles.comm import tcp
from isles.comm.tcp import parse_address
from isles.membership.messages import Refusal
from isles.training.config.reading import to_toml
from isles.training.elastic import connect
from isles.training.lighthouse.server import read_address
from tests.membership.sessions import free_port
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import small
from tests.training.runs import TINY, write_text

Answer = Callable[..., tuple[int, str]]
NOLOCO = ("replicas.method=noloco", "replicas.sync_every=5")
METHOD = [word for one in NOLOCO for word in ("--set", one)]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answer:
    """isles(*words) in a folder with a text: (exit code, what it said)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISLES_TOKEN", raising=False)
    for command in (join, lighthouse):
        monkeypatch.setattr(command, "end_in_order", lambda: None)  # pytest keeps its own handlers
    write_text(tmp_path / "text.txt")

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["isles", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


def settings(*more: str) -> list[str]:
    plain = [one for one in TINY if not one.startswith("world.backend")]
    return [word for one in (*plain, "data.path=text.txt", *more) for word in ("--set", one)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Run]:
    """A lighthouse that waits for its first worker."""
    made = Run(small(tmp_path, 60, 2), tmp_path / "run")
    yield made
    made.stop()


def one_line(found: tuple[int, str], *words: str) -> None:
    code, error = found
    assert code == 2 and error.startswith("isles: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error


def joins(world: Run) -> tuple[str, ...]:
    return ("join", world.address, "--token", world.token, "--data", world.config.data.path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["join", "127.0.0.1:29400"], ["--token is missing", "@FILE"]),
        (["join", "127.0.0.1:29400", "--token", "abc"], ["64 hex digits"]),
        (["join", "127.0.0.1:29400", "--token", "@nothing"], ["nothing cannot be read"]),
        (["join", "127.0.0.1", "--token", "0" * 64], ["HOST:PORT"]),
        (["join", "127.0.0.1:1", "--token", "0" * 64, "--workers", "0"], ["--workers 0: choose 1"]),
        (["join", "127.0.0.1:1", "--token", "0" * 64, "--listen", "no"], ["--listen no: choose a port"]),
        (["join", "127.0.0.1:1", "--token", "0" * 64, "--relay"], ["--relay: others must reach", "--listen PORT"]),
        (["join", "127.0.0.1:1", "--token", "0" * 64, "--workers", "9999"], ["--workers 9999: more than 8 a core"]),
        (["join", "127.0.0.1:1", "--token", "0" * 64, "--device", "gpu"], ["--device = 'gpu' is not known"]),
        (["swarm", "peer", "--join", "a:1", "--token", "0" * 64, "--device", "gpu"], ["--device = 'gpu' is not known"]),
        (["join", "nobody.invalid:29400", "--token", "0" * 64], ["nobody.invalid is no name", "its spelling"]),
        (["lighthouse", "--port", "65536"], ["--port 65536: choose 0 to 65535"]),
        (["lighthouse", "--workers", "-1"], ["--workers -1: choose 0"]),
        (["lighthouse", "--workers", "9999"], ["--workers 9999: more than 8 a core"]),
        (["lighthouse", "--host", "nobody.invalid"], ["--host nobody.invalid is no name that this machine knows"]),
        (["lighthouse", "--max-members", "0", *settings()], ["world.elastic.max_members = 0", "choose 1 or more"]),
        (["lighthouse", *settings("replicas.method=ddp")], ['replicas.method = "ddp"', "isles train --nodes"]),
        (["doctor", "--join", "127.0.0.1:29400"], ["--token is missing"]),
        (["doctor", "--join", "127.0.0.1", "--token", "0" * 64], ["--join 127.0.0.1: write HOST:PORT"]),
        (["doctor", "--join", "a:1", "--peer", "a:1"], ["--join: goes with --token and --listen"]),
        (["doctor", "--join", "a:1", "--disk", "."], ["--join: goes with --token and --listen"]),
        (["doctor", "--token", "0" * 64], ["--token: goes with --join"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_what_can_be_seen_at_once(answer: Answer, tmp_path: Path, words: list[str], told: list[str]) -> None:
    one_line(answer(*words), *told)
    assert not (tmp_path / "runs").exists()


def test_the_token_of_another_run(answer: Answer, world: Run) -> None:
    told = answer("join", world.address, "--token", "0" * 64)
    one_line(told, "is not the machine of this token", "look at address and token")


def test_the_port_is_taken(answer: Answer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = answer("lighthouse", "--host", "127.0.0.1", "--port", port, "--out", "run", *settings(), *METHOD)
    one_line(told, f"127.0.0.1:{port}: the port is taken", "choose another one")
    assert not Path("run").exists()


@pytest.mark.parametrize("words", [(), ("--host", "127.0.0.1"), ("no route",), ("any port",)])
def test_where_a_lighthouse_listens(answer: Answer, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    """At this machine's way to others, and it says so; where that is told, or there is none, for this machine alone. At
    whatever port, it says which.
    """
    if words == ("no route",):
        monkeypatch.setattr(tcp, "outward_address", lambda: parse_address("", "no default route"))
    where, said = "127.0.0.1", "only this machine reaches it; for others name its address with --host"
    if words in ((), ("any port",)):
        where, said = tcp.outward_address(), "use --host 127.0.0.1 to keep it to this machine"
        assert not where.startswith("127.")

    def press() -> None:
        while not Path("run/lighthouse.json").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    pressing, port = threading.Thread(target=press, daemon=True), free_port()
    pressing.start()
    given = words if words and words[0] == "--host" else ()
    wanted = 0 if words == ("any port",) else port
    code, told = answer("lighthouse", "--port", str(wanted), "--out", "run", *given, *settings("run.steps=20"), *METHOD)
    port = wanted or read_address(Path("run")).port
    assert code == 130 and f"listens at {where}:{port}; {said}" in told, told
    assert f"isles join {where}:{port} --token " in told and read_address(Path("run")).host == where


@pytest.mark.parametrize("journal", ["folder", '{"event":"lost","member":4}\n'])
def test_a_journal_that_makes_no_sense(answer: Answer, tmp_path: Path, journal: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(small(tmp_path, 20, 2)))
    if journal == "folder":
        (run / "members.jsonl").mkdir()
    else:
        (run / "members.jsonl").write_text(journal)
    told = answer("lighthouse", "run", "--port", str(free_port()))
    one_line(told, "run/members.jsonl: ", "restore the file, or start a new run")


def test_more_founders_than_members(answer: Answer) -> None:
    words = ("--founders", "3", "--max-members", "2", *settings("run.steps=20"), *METHOD)
    one_line(answer("lighthouse", *words), "world.elastic.max_members = 2", "waits for 3", "--founders")


def test_the_address_is_not_this_machines(answer: Answer) -> None:
    told = answer("lighthouse", "--host", "192.0.2.1", "--port", str(free_port()), *settings(), *METHOD, "--out", "run")
    one_line(told, "192.0.2.1", "--host")


def test_the_port_to_listen_at_is_taken(answer: Answer, world: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = answer(*joins(world), "--listen", f"127.0.0.1:{port}")
    one_line(told, f"127.0.0.1:{port}: the port is taken")


def test_a_lighthouse_of_another_version(answer: Answer, world: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "MESSAGES", (7, 0))
    one_line(answer(*joins(world)), "messages 7.0", "install that version")


def test_another_text(answer: Answer, world: Run, tmp_path: Path) -> None:
    world.keeper.lighthouse.corpus = "0" * 64  # of the first one that joined
    told = answer(*joins(world))
    one_line(told, "data.path", "differs", "put the same files there")


def test_a_joiner_says_itself_where_its_text_is(answer: Answer, world: Run) -> None:
    """Paths and code that the lighthouse names are nothing to it; what the lighthouse decides is not its to say."""
    told = answer("join", world.address, "--token", world.token)
    one_line(told, "the run has data.path = ", "takes no path and no code", "--set data.path=...")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_a_joiner_cannot_say_is_refused_before_it_asks_anybody(answer: Answer, workers: str) -> None:
    """Nobody answers at that address: it would try for a minute, and start further workers without that word."""
    nobody = ("join", f"127.0.0.1:{free_port()}", "--token", "a" * 64, "--workers", workers)
    one_line(answer(*nobody, "--set", "run.steps=3"), "--set run.steps: only the lighthouse sets this", "model.factory")
    one_line(answer(*nobody, "--set", "model.device=gpu"), "model.device = 'gpu' is not known", "cuda:N")
    one_line(answer(*nobody, "--device", "cuda:999"), 'model.device = "cuda:999" but torch sees', "--device")


def test_the_address_of_a_router_in_front() -> None:
    """Others are told it; here it is listened at an address of this machine."""
    (host, port), told = join.place("192.0.2.7:29441", "203.0.113.7:29400")
    assert host != "192.0.2.7" and (port, told) == (29441, "192.0.2.7")
    assert join.place("127.0.0.1:29441", "203.0.113.7:29400") == (("127.0.0.1", 29441), "127.0.0.1")


def test_a_port_alone_is_on_the_way_to_the_lighthouse() -> None:
    """Which others are told as the lighthouse sees it: another line than the one to all machines, or this machine."""
    assert join.place("29441", "127.0.0.1:29400") == (("127.0.0.1", 29441), "")
    assert join.place("29441", "localhost:29400") == (("127.0.0.1", 29441), "")
    assert join.place("0", "nobody.invalid:29400") == join.place("0", "192.0.2.7:29400")


def test_a_text_that_is_not_there(answer: Answer, world: Run) -> None:
    one_line(answer("join", world.address, "--token", world.token, "--data", "nowhere.txt"), "nowhere.txt")


def test_no_room_is_left(answer: Answer, tmp_path: Path) -> None:
    made = Run(small(tmp_path, 60, 2, "world.elastic.max_members=2"), tmp_path / "run")
    for _ in range(2):
        made.keeper.lighthouse._call(lambda m, now: m.join(now, ""))  # somebody is there
    told = answer(*joins(made))
    made.stop()
    one_line(told, "the run has its most workers, 2", "--max-members")
    assert isinstance(made.keeper.lighthouse._call(lambda m, now: m.join(now, ""))[0].message, Refusal)  # type: ignore[union-attr]


def test_a_port_that_nobody_reaches_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on over the lighthouse."""
    from isles.membership import lighthouse

    async def fails(*_: object) -> str:
        return "no answer within 5 s"

    monkeypatch.setattr(lighthouse, "echo_failure", fails)
    made = Run(small(tmp_path, 20, 2), tmp_path / "run")
    for _ in range(2):
        made.join(listens=True)
    assert made.end()["links"]["direct"] == 0
    warned = [line for line in made.notices if line.startswith("warning: relayed: the lighthouse does not reach port")]
    assert len(warned) == 2 and all("no answer within 5 s" in line and "forward it" in line for line in warned)


def test_the_status_of_no_run_and_no_address(answer: Answer) -> None:
    one_line(answer("status", "nowhere"), "nowhere: no such run directory, and no address: write HOST:PORT")
