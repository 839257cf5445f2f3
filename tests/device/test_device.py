"""Isles on a GPU that is not there (`fake_cuda`): tensors stay on their devices, results are the CPU's, and the host
waits and copies as often as is written here. All rows come of one process, `walk.py`.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

import isles
from isles.comm.codecs.kinds import FORMS
from tests.device import build
from tests.device.ordered import METHODS as ORDERED
from tests.device.ordered import MUTANTS
from tests.device.table import (
    BFLOAT16,
    EVERY_STEP,
    IN_ONE_PROCESS,
    QUICK,
    ROOT,
    STREAMING,
    crossed,
    crossing,
    table_row,
    walk,
)

OUTER = [name for name in IN_ONE_PROCESS if name not in ("none", "ist", *EVERY_STEP)]
PLAIN = [name for name in IN_ONE_PROCESS if name not in (*EVERY_STEP, *STREAMING)]
"""They have steps in which nothing is due."""
CHOOSING = ("dct-dp", "dilocox", "demo")
"""They choose entries by size or take signs: a last bit that is rounded otherwise may choose another entry."""


LONG = pytest.mark.long(cases=100)  # all: their rows come of one walk


def cases(kind: str, names: Iterable[str]) -> list[Any]:
    """As parameters; those whose rows come of the long walk are long."""
    return [pytest.param(name, marks=() if f"{kind} {name}" in QUICK else LONG) for name in names]


pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
Rows = dict[str, Any]
_FRAGMENTS = 3  # of the streaming methods: two of blocks, and the rest


def _walked(factory: pytest.TempPathFactory, worker: str, *options: str) -> Rows:
    """Once for all processes of the tests."""
    folder = factory.getbasetemp()
    folder = folder if worker == "master" else folder.parent
    kept = folder / f"device{''.join(options)}.json"
    with open(kept.with_suffix(".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            kept.write_text(json.dumps(walk(*options)))
    return json.loads(kept.read_text())


class _Walks(dict[str, Any]):
    """The rows of the quick walk, and of the long one once somebody asks for one of its own."""

    def __init__(self, factory: pytest.TempPathFactory, worker: str) -> None:
        super().__init__(_walked(factory, worker))
        self._more = partial(_walked, factory, worker, "--long")

    def __missing__(self, case: str) -> Any:
        self.update(self._more())
        return dict(self)[case]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Rows:
    return _Walks(tmp_path_factory, _worker(request))


def _worker(request: pytest.FixtureRequest) -> str:
    return getattr(request.config, "workerinput", {}).get("workerid", "master")


def _found(rows: Rows, case: str) -> Any:
    found = rows[case]
    assert not (isinstance(found, dict) and "error" in found), found["error"]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The fake GPU itself


def test_what_cuda_refuses_is_refused(rows: Rows) -> None:
    found = _found(rows, "refusals")
    assert all(found.values()), found
    mixed = "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and "
    assert found["sum"].startswith(mixed + "cpu!") and found["two devices"].startswith(mixed + "cuda:2!")


def test_copies_and_waits_are_counted_as_torch_does_them(rows: Rows) -> None:
    """(copies up, bytes, copies down, bytes, waits), by torch's aten/src/ATen/native/cuda/Copy.cu: blocking copies
    convert on the host, others on the device, and the host goes on at once only beside pinned memory.
    """
    assert _found(rows, "counted") == {
        "kernel": [0, 0, 0, 0, 0],
        "up": [1, 64, 0, 0, 1],
        "up, pinned": [1, 64, 0, 0, 1],
        "up, at once": [1, 64, 0, 0, 0],
        "up, at once, pageable": [1, 64, 0, 0, 1],
        "up, converted": [1, 64, 0, 0, 1],
        "up, converted there": [1, 32, 0, 0, 0],
        "down": [0, 0, 1, 64, 1],
        "down, a list": [0, 0, 2, 128, 2],
        "number": [0, 0, 0, 0, 1],
        "mask": [0, 0, 0, 0, 1],
        "places of the host": [1, 16, 0, 0, 1],
        "synchronize": [0, 0, 0, 0, 1],
    }


def test_a_device_has_a_state_of_its_own(rows: Rows) -> None:
    found = _found(rows, "own state")
    assert all(found.values()), found


# ---------------------------------------------------------------------------------------------------------------------
# Methods and codecs


@pytest.mark.parametrize("name", cases("counts", IN_ONE_PROCESS))
def test_a_method_stays_on_its_gpus(rows: Rows, name: str) -> None:
    """Nothing strays to the other worker's one, or to the current one; new memory there is NaN until it is written."""
    found = _found(rows, f"counts {name}")
    assert not found["strays"] and np.isfinite(found["there"]).all()


@pytest.mark.parametrize("name", cases("method", isles.METHODS))
def test_a_method_trains_as_on_the_cpu(rows: Rows, name: str) -> None:
    """Two workers with a GPU each, while a third one is the current device. Losses of each step, of the
    weights to be judged and of the consolidated model are the CPU's, bytes too. From a checkpoint it goes on there to
    the bit.
    """
    found = _found(rows, f"method {name}")
    assert found["untouched"] and not found["strays"]
    assert found["same_bits"]
    assert max(found["losses"][:2]) < 1e-4
    assert max(found["losses"]) < (0.1 if name in CHOOSING else 1e-3)
    assert found["judged"] < (0.1 if name in CHOOSING else 1e-3)
    if name != "dct-dp":  # whose messages are as long as what is above a threshold
        assert all(there == here for there, here in found["bytes"])


@pytest.mark.parametrize("name", cases("world", ["diloco", "ddp"]))
def test_real_workers_too(rows: Rows, name: str) -> None:
    """Two processes over gloo. They come to the bits of virtual workers, and count what those do."""
    found, virtual = _found(rows, f"world {name}"), _found(rows, f"counts {name}")
    assert not found["strays"] and found["there"] == virtual["there"]
    assert crossing(name, found) == crossing(name, virtual)


@LONG
def test_a_worker_that_is_killed_in_a_sum_of_gpus_is_missed(rows: Rows) -> None:
    """With a stand-in for NCCL, whose messages never end then. Before, sums are those of `two_shot`."""
    found, usual = _found(rows, "native"), _found(rows, "counts ddp")["there"][0]
    assert found["losses"][:3] == pytest.approx(usual[:3], abs=1e-3)
    assert (found["lost"], found["aborted"]) == (1, 1) and found["seconds"] < 30


@pytest.mark.parametrize("name", cases("bfloat16", BFLOAT16))
def test_weights_in_bfloat16(rows: Rows, name: str) -> None:
    """Both ways cross in the device's format."""
    found = _found(rows, f"bfloat16 {name}")
    assert found["untouched"] and not found["strays"] and max(found["losses"]) < 0.02
    crossed, model = crossing(name, found), rows["shape"]["bytes"]
    assert (crossed.down, crossed.up) == (model // 2, model // 2)


@pytest.mark.parametrize("name", cases("codec", FORMS))
def test_a_codec(rows: Rows, name: str) -> None:
    found = _found(rows, f"codec {name}")
    assert found["untouched"] and not found["strays"]
    most = 0.1 if "stochastic" in name else 5e-3  # a draw beside a bound may go the other way
    assert max(found["losses"]) < most and found["judged"] < most
    assert all(there == here for there, here in found["bytes"])


# ---------------------------------------------------------------------------------------------------------------------
# What crosses, and how often the host waits


@pytest.mark.parametrize("name", cases("counts", PLAIN))
def test_a_plain_step_waits_for_nothing(rows: Rows, name: str) -> None:
    """Backward pass, clipping and inner step: the host only calls kernels."""
    found = crossed(rows, name)
    assert (found.plain_waits, found.plain_bytes) == (0, 0)


@pytest.mark.parametrize("name", cases("counts", [*OUTER, "ddp", "dct-dp"]))
def test_a_round_copies_each_byte_once_each_way(rows: Rows, name: str) -> None:
    """One copy a tensor each way, one wait a fragment or bucket: for the copies down. Kernels wait for what lands."""
    found, model = crossed(rows, name), rows["shape"]["bytes"]
    assert (found.down, found.up) == (model, model)
    assert found.copies == 2 * len(rows["shape"]["sizes"])
    assert found.waits == (_FRAGMENTS if name in STREAMING else 1)


def test_of_an_own_share_its_rounded_values_come_back(rows: Rows) -> None:
    """DeMo: 4 bytes of a value and 8 of its place go down, both come up of the other worker; of the own share only
    values, as the other one decodes them: what stands where is there.
    """
    found = crossed(rows, "demo")
    assert (found.up * 12, found.copies, found.waits) == (found.down * 16, 2 + 1 + 2, 1)


@LONG
def test_what_is_divided_crosses_once(rows: Rows) -> None:
    """IST: units with their moments, and what all hold. The host waits for either, and for whether it is finite."""
    found = crossed(rows, "ist")
    assert found.up == found.down and found.copies % 2 == 0
    assert found.waits == 3


@pytest.mark.parametrize("name", cases("order", ORDERED))
def test_no_copy_meets_a_kernel(rows: Rows, name: str) -> None:
    found = _found(rows, f"order {name}")
    assert found["races"] == [] and found["kernels"] > 100
    assert found["copies"] > 20


@pytest.mark.parametrize("name", cases("mutant", MUTANTS))
def test_a_wait_that_is_left_out_is_a_race(rows: Rows, name: str) -> None:
    assert any("may be at" in race for race in _found(rows, f"mutant {name}")["races"])


def test_a_native_sum_is_ordered_by_the_callers_stream(rows: Rows) -> None:
    found = _found(rows, "order native")
    assert found["races"] == [] and found["sum"] == [1.5] * 4


def test_lanes_and_batches(rows: Rows) -> None:
    """Events are of the lane's GPU, many pinned parameters share a block, and no batch is waited for."""
    found = _found(rows, "lanes")
    assert found["events"] == [1] and found["placed"]
    assert found["pinned"] < 1.1  # 1.94 in a block each: torch takes powers of two
    assert found["batches"] == ["cuda:1", "cuda:1"] and found["waits"] == 0


@pytest.mark.parametrize("name", cases("counts", isles.METHODS))
def test_the_page_has_the_table_of_now(rows: Rows, name: str) -> None:
    assert table_row(rows, name) in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").splitlines()


def test_an_island_looks_at_its_copy_with_one_wait(rows: Rows) -> None:
    assert _found(rows, "islands")["is_sound"]["waits"] == 1


def test_an_island_spreads_with_one_wait(rows: Rows) -> None:
    """Each of two workers sends its half of each tensor; for the other half, which lands, only kernels wait."""
    found, shape = _found(rows, "islands")["spread"], rows["shape"]
    assert (found["to_host"], found["to_device"], found["waits"]) == (len(shape["sizes"]), len(shape["sizes"]), 1)
    assert found["to_host_bytes"] == found["to_device_bytes"] == shape["bytes"] // 2


@LONG
def test_what_is_pinned_is_foretold(rows: Rows) -> None:
    """Of two workers of each family; of `ddp` the buffers that travel lie in it too."""
    found, model = _found(rows, "pinned"), rows["shape"]["bytes"]
    found["ddp"][1] += 2 * model
    assert all(there == told for there, told in found.values())
    assert found["demo"][0] == 0 and all(found[name][0] >= 2 * model for name in found if name != "demo")


def test_a_message_between_stages_is_waited_for_once(rows: Rows) -> None:
    """By who sends it: (copies down, up, waits) of stream and tokens, packed and unpacked, and of gradient and loss."""
    found = _found(rows, "between stages")
    assert found["counts"] == [[2, 0, 1], [0, 2, 0]] * 2 and all(found["arrived"])


def test_what_is_said_of_a_gpu_is_said_of_the_own_one(rows: Rows) -> None:
    """Of cuda:1 and not of cuda:0: a node's memory and speed; a plan of memory is for the smallest of its workers'."""
    found = _found(rows, "machines")
    assert found["node"] == 0.9 * 40 * 2**30 and found["node's kernels"] > 0
    assert found["plan of one"] == found["plan"] == "A100-40"
    assert found["free"] < 40 * 2**30


def test_seconds_are_those_of_the_gpu(rows: Rows) -> None:
    """Between events each kernel takes a millisecond there. Of six steps, two of which are told at a time."""
    found = _found(rows, "measured")
    kernels = found["kernels"]
    assert max(found["waits"]) <= 1  # for the batch; the clock needs none
    assert found["seconds"] == pytest.approx(sum(kernels) / 1000)
    assert _is_of_kernels(1000 * found["saved"])
    assert found["stretches"] == pytest.approx([number / 1000 for number in kernels])
    for number, line in enumerate(found["lines"], 1):
        seconds = sum(kernels[2 * number - 2 : 2 * number]) / 1000
        assert line["compute_seconds"] == pytest.approx(sum(kernels[: 2 * number]) / 1000)
        assert line["tokens_per_second"] == pytest.approx(2 * 2 * 16 / seconds)
        assert line["mfu"] == pytest.approx(6 * found["parameters"] * 2 * 2 * 16 / seconds / 312e12)
        assert 0 < line["memory_bytes"] < line["memory_peak_bytes"] and line["memory_reserved_bytes"] > 0
    assert len(found["lines"]) == 3


def _is_of_kernels(milliseconds: float) -> bool:
    """Whether none are the host's, of whose seconds some fraction of a millisecond would be left."""
    return milliseconds > 0 and abs(milliseconds - round(milliseconds)) < 1e-6


@LONG
def test_seconds_of_a_swarms_waits_are_those_of_the_gpu(rows: Rows) -> None:
    assert all(map(_is_of_kernels, _found(rows, "swarm's milliseconds")))


@LONG
def test_seconds_of_an_elastic_worker_are_those_of_the_gpu(rows: Rows) -> None:
    """What it tells the lighthouse of its first step, and of two steps of either round. A round took three such ones,
    less the moments for which the host waited for the lighthouse.
    """
    found = _found(rows, "elastic milliseconds")
    assert len(found["told"]) == 3 and len(found["rounds"]) == 2
    assert all(_is_of_kernels(2 * told) for told in found["told"])
    assert found["rounds"] == pytest.approx([3 * told for told in found["told"][1:]], rel=0.05)


def test_seconds_of_a_node_of_a_cluster_are_those_of_the_gpu(rows: Rows) -> None:
    """Lines in the middle of a stretch count what has been until then."""
    found = _found(rows, "node's seconds")
    assert found["seconds"] == pytest.approx(found["kernels"] / 1000)
    first, second = (line["compute_seconds"] for line in found["lines"])
    assert 0 < first < second < found["seconds"]
    assert found["lines"][0]["memory_bytes"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# The command


RUNS = (
    "stages",
    "islands",
    "fp16",
    "fp16 demo",
    "bf16",
    "swarm",
    "checkpoint",
    "memory",
    "clusters",
    "plan",
    "experts",
)


@pytest.mark.parametrize("name", cases("train", (*RUNS, "elastic", "demo", "dct-dp", "ist", "sparseloco")))
def test_a_run_on_gpus_is_the_cpus(rows: Rows, name: str) -> None:
    found = _found(rows, f"train {name}")
    assert 0 < found["cuda"] < 8
    assert found.get("gifts cuda", 1) == found.get("gifts cpu", 1) >= 1
    assert found.get("joiner cuda", 20) == found.get("joiner cpu", 20) > 10  # of twenty steps
    if "cpu" in found:
        assert abs(found["cuda"] - found["cpu"]) < (0.02 if name == "bf16" else 1e-3)


@pytest.mark.long
def test_a_run_goes_on_and_is_judged_on_the_gpu_that_was_asked_for(rows: Rows) -> None:
    """On the same kind of device to the bit; `eval`, `generate` and `export` with --device cuda:2 use that one."""
    found = _found(rows, "run")
    assert found["resumed"]["cuda"]
    assert abs(found["losses"]["cpu"] - found["losses"][""]) < 1e-3  # and on the other kind of device
    assert found["kernels"][0] > 0 and found["kernels"][1] > 0
