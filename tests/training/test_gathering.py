"""What the machines of a run must agree on: two of them, here as threads that meet over the loopback interface."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from isles.comm import credentials
from isles.comm.tcp import listen
from isles.launch.nodes import NodeGroup, NodeSpec
from isles.running.agree import meet_nodes
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from tests.training.runs import tiny, write_text


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return real(tmp_path_factory)


def real(folder: pytest.TempPathFactory, *assignments: str) -> Config:
    text = write_text(folder.mktemp("text") / "text.txt")
    return tiny(text, "world.backend=distributed", "world.join_deadline=8", *assignments)


def both(here: tuple[Config, Path, int | None], there: tuple[Config, Path, int | None]) -> list[Any]:
    """What node 0 and node 1 know when all have met, or the error."""
    with listen(0, "127.0.0.1") as free:
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    folder = Path(tempfile.mkdtemp(dir=here[1].parent), "credentials")
    token = credentials.found(folder).token
    parted = threading.Barrier(2)

    def node(number: int, config: Config, out: Path, resume: int | None) -> Any:
        try:
            own = folder if number == 0 else None
            spec = NodeSpec(nodes=2, node=number, rendezvous=rendezvous, token=token, credentials=own)
            with meet_nodes(config, spec, out, resume, lambda text: None) as node_group:
                if number == 0:
                    node_group.go()
                parted.wait(20.0)
                return node_group.facts
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(node, (0, 1), *zip(here, there, strict=True)))


def saved(run: Path, *steps: int) -> Path:
    """A run directory with checkpoints of these steps."""
    for step in steps:
        Checkpoints(run).write_shard(step, 0, {"step": step})
        Checkpoints(run).commit(step, range(1), {}, keep=0)
    return run


def test_the_newest_checkpoint_that_all_have(config: Config, tmp_path: Path) -> None:
    here, there = saved(tmp_path / "a", 3, 6, 9), saved(tmp_path / "b", 3, 6)
    assert both((config, here, 9), (config, there, 6)) == [{"resume": 6}] * 2
    assert both((config, tmp_path / "c", None), (config, tmp_path / "d", None)) == [{"resume": None}] * 2


def test_no_checkpoint_in_common(config: Config, tmp_path: Path) -> None:
    """Told on both."""
    here, there = saved(tmp_path / "a", 3), saved(tmp_path / "b", 6)
    first, second = both((config, here, 3), (config, there, 6))
    assert type(first) is type(second) is ValueError and str(first) == str(second)
    assert "no checkpoint is on all nodes (steps on node 0: 3; node 1: 6)" in str(first)


def test_what_node_1_is_refused_for(config: Config, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its configuration, its command, its directory; node 0 waits for a better one until its deadline."""
    other = real(tmp_path_factory, "inner.lr=0.5", "run.seed=3")
    run = saved(tmp_path / "run", 3)
    here = config, tmp_path / "a", None
    cases = {
        "inner.lr = 0.5 there, 0.01 on node 0": (other, tmp_path / "b", None),
        "started with `isles resume`, node 0 with `isles train`": (config, run, 3),
        "writes into the same directory as node 0": here,
    }
    with ThreadPoolExecutor(len(cases)) as pool:  # they wait at the same time
        told = list(pool.map(lambda there: both(here, there), cases.values()))
    for words, (late, refused) in zip(cases, told, strict=True):
        assert isinstance(refused, ValueError) and words in str(refused) and "\n" not in str(refused)
        assert "node 1 did not come" in str(late)


def test_what_one_machine_cannot_be_split_into(config: Config, tmp_path: Path) -> None:
    """Fewer workers than machines, a virtual network: refused before anybody is waited for."""
    node_spec = NodeSpec(nodes=3, node=0, rendezvous="127.0.0.1:29400")
    virtual = tiny(tmp_path / "text.txt")
    for one, words in (
        (config, "more machines than world.workers = 2"),
        (virtual, 'world.backend = "virtual" runs on one'),
    ):
        with pytest.raises(ValueError, match=words), meet_nodes(one, node_spec, tmp_path, None, print):
            pass
    with meet_nodes(config, NodeSpec(), tmp_path, None, print) as node_group:
        assert isinstance(node_group, NodeGroup) and not node_group.links and node_group.spec.nodes == 1
