"""`run_local`: results and failures reach the launcher, and no process outlives it."""

from __future__ import annotations

import ipaddress
import multiprocessing.forkserver
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

import isles
from isles.comm.errors import CommError, WorkerFailed
from isles.comm.sockets import connection as silences
from isles.launch import workers as local
from isles.launch.worker import dumps
from isles.launch.workers import LocalWorkers
from isles.running.backends import start_server
from tests import forked, gloo
from tests.launch import local_workers
from tests.replicas.workers import bits, loss_of, sgd, weights

ROOT = Path(__file__).resolve().parents[2]


def worker_processes() -> list[psutil.Process]:
    """Processes that this one's fork server has started and that still run, but for those that other tests share."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    if server is None:
        return []
    shared = gloo.processes()
    return [child for child in psutil.Process(server).children() if child.pid not in shared and runs(child)]


def runs(process: psutil.Process) -> bool:
    """Not ended; one that nobody has asked for its exit code (a zombie) has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Inside, this process may open 150 descriptors more than it has: those of tests before this one do not count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 150, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def comes_true(condition, seconds: float) -> bool:
    ends_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch):
    """After every test here, and the workers of a failed run get little time to notice."""
    gloo.close()  # which would be counted
    monkeypatch.setattr(local, "_GRACE", 0.3)
    yield
    assert comes_true(lambda: not worker_processes(), 1.0), worker_processes()


def test_results_come_in_rank_order() -> None:
    """With arguments, threads as asked for, and tensors as they were."""
    assert isles.run_local(local_workers.identity, 3, args=("a", {"b": 1}), threads=2) == [
        (rank, 3, 2, ("a", {"b": 1})) for rank in range(3)
    ]
    assert isles.run_local(local_workers.identity, 1) == [(0, 1, 1, ())]
    for rank, result in enumerate(isles.run_local(local_workers.tensors, 2)):
        assert torch.equal(result["rank"], torch.full((3,), rank)) and (result["large"] == rank).all()


def test_tensors_come_and_go_by_value() -> None:
    """More tensors than a process may have descriptors, into the workers and out of them; nothing is shared memory."""
    with few_descriptors():
        given = [torch.full((4,), float(number)) for number in range(300)]
        (total, first), (_, second) = isles.run_local(local_workers.many, 2, args=(given,))
        with pytest.raises(ValueError, match=r"the loss is.*tensor\(\[1., 2."):
            isles.run_local(local_workers.raises_tensor, 2)
    assert total == 4 * sum(range(300)) and not any(tensor.is_shared() for tensor in given)
    assert all(torch.equal(first[str(number)], tensor + 1) for number, tensor in enumerate(given))
    assert torch.equal(second["whole"], torch.arange(10.0) * 2) and isinstance(second["one"], torch.nn.Parameter)
    second["whole"].detach()[2] = -1.0
    assert second["part"].tolist() == [-1.0, 6.0], "two looks at one memory stay so"
    assert not any(tensor.is_shared() for tensor in (*first.values(), *second.values()))


def test_what_is_given_and_told_of_is_a_copy() -> None:
    """Of arguments each worker has its own; what a worker has told of stays as it was told, whatever it writes there
    later, and though it is gone.
    """
    given, seen = torch.zeros(2), []
    with few_descriptors():
        results = LocalWorkers(local_workers.overwrites, 2, args=(given,)).join(seen.append)
        ended = LocalWorkers(local_workers.gone, 1).join(seen.append)
    assert [own.tolist() for own in results] == [[1.0, 1.0], [2.0, 2.0]] and given.tolist() == [0.0, 0.0]
    assert [told["loss"].tolist() for told in seen[:2]] == [[0.0, 1.0, 2.0]] * 2
    assert [float(own) for own in seen[1]["all"]] == list(range(300))
    assert seen[2].tolist() == [0.0] * 3 and isinstance(ended[0], WorkerFailed)


def test_a_trained_model_is_a_result() -> None:
    """With the hooks of its method on it, and beside it the method's state: the launcher goes on with both."""
    first, second = isles.run_local(local_workers.learns, 2)
    for (model, state), (other, _) in zip(first, second, strict=True):
        assert bits(weights(model)) == bits(weights(other)) and state["steps"] == 3
        before = weights(model)
        loss_of(model, 0, 1).backward()
        sgd(model).step()
        assert not torch.equal(before, weights(model))
        held = [*model.parameters(), *(own for one in state["state"].values() for own in one.values())]
        assert len(held) == 12 and not any(tensor.is_shared() for tensor in held)


def test_one_memory_goes_once() -> None:
    """However many tensors look at it; a weight of a model that is tied, or one flat buffer behind all weights."""
    flat = torch.zeros(100_000)
    same, integers = ForkingPickler.loads(dumps([flat, flat.view(torch.int32)]))
    same[0] = 1.0
    assert integers[0] == 0x3F800000, "two looks at one memory, in two formats"
    assert len(dumps([flat, flat.view(torch.int32)])) < 1.1 * 4 * flat.numel()
    assert len(dumps([flat[start : start + 10] for start in range(0, 1000, 10)])) < 1.1 * 4 * flat.numel()


TYPED = """
import isles
def worker(world): return world.rank
isles.run_local(worker, 2)
"""
NOWHERE = "worker: new processes cannot import what is typed into"
UNGUARDED = "before it began (the reason is printed above): a script that starts workers needs `if __name__ =="


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(("how", "text"), [("stdin", NOWHERE), ("-c", NOWHERE), ("script", UNGUARDED)])
def test_a_worker_that_cannot_be_imported(how: str, text: str, tmp_path: Path) -> None:
    """The last line says so, and what to do: a function from `python -c` or stdin, a script without its guard."""
    (tmp_path / "script.py").write_text(TYPED)
    code = (tmp_path / "script.py").read_text()
    command = [sys.executable, {"stdin": "-", "-c": "-c", "script": str(tmp_path / "script.py")}[how]]
    done = subprocess.run(
        command + [code] * (how == "-c"), input=code, capture_output=True, text=True, timeout=120,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 1 and text in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize(("is_script", "text"), [(False, NOWHERE), (True, UNGUARDED)], ids=["typed", "script"])
def test_a_worker_of_the_main_module(is_script: bool, text: str, tmp_path: Path) -> None:
    """The same of a process that has torch already."""
    (tmp_path / "script.py").write_text(TYPED)
    code, _, error = forked.Process(be_main, "script.py" if is_script else "", folder=tmp_path).end()
    assert code == 1 and text in error.splitlines()[-1], error


def be_main(script: str) -> None:
    """Be `python SCRIPT`, or `python -c` without one; its fork server is of before, and has another main module."""
    start_server()
    if script:
        runpy.run_path(os.path.abspath(script), run_name="__main__")
    else:
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(TYPED, vars(main))


@pytest.mark.long
def test_a_long_folder_for_temporary_files(tmp_path: Path) -> None:
    """As clusters make one for each job: longer than the address of a socket may be."""
    folder = tmp_path / ("job-" + 100 * "x")
    folder.mkdir()
    code = "import isles\nfrom tests.launch import local_workers\nprint(isles.run_local(local_workers.reports, 2))"
    environment = dict(os.environ, PYTHONPATH=str(ROOT), TMPDIR=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "['result of 0', 'result of 1']\n", done.stderr


def test_a_run_on_one_machine_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store and gloo's own listeners: nobody else can reach them."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = len(local_workers.heard_at(os.getpid()))
    pool = LocalWorkers(local_workers.listeners, 2)
    here = local_workers.heard_at(os.getpid())
    assert len(here) == before + 1, "the store does not listen: this test sees nothing"
    workers = pool.join()
    assert all(workers), "gloo does not listen: this test sees nothing"
    for address in (*here, *(one for worker in workers for one in worker)):
        assert ipaddress.ip_address(address).is_loopback, (here, workers)


def test_two_runs_at_once_do_not_meet() -> None:
    """Two launchers' threads in one process."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(isles.run_local, local_workers.identity, 2, args=(name,)) for name in "ab"]
        assert [run.result() for run in runs] == [[(rank, 2, 1, (name,)) for rank in range(2)] for name in "ab"]


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("value", ValueError, "batch_size = 0: choose 1 or more"),
        ("odd", WorkerFailed, "steps is -1"),
        ("local", WorkerFailed, "nobody can import me"),
        ("key", WorkerFailed, "KeyError: 'missing'"),
        ("exit", WorkerFailed, "exit code 3"),
        ("sys.exit", WorkerFailed, "exit code 4"),
        ("abort", WorkerFailed, "exit code -6"),
        ("lambda", WorkerFailed, "its result cannot be sent to the launcher"),
        ("one way", WorkerFailed, "its result cannot be rebuilt in the launcher: RuntimeError('not twice')"),
    ],
)
def test_a_failed_worker_is_raised_in_the_launcher(how: str, kind: type[Exception], text: str) -> None:
    """The first cause, by rank, whatever the others made of it: the error itself where it can travel, else its
    traceback. At once, though two others wait for the failed one with deadlines of two minutes.
    """
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        isles.run_local(local_workers.misbehaves, 3, args=(how,))
    assert text in str(caught.value)
    if kind is WorkerFailed:
        assert caught.value.rank == 1 and "worker 1" in str(caught.value)  # type: ignore[attr-defined]
    assert time.monotonic() - start < 30.0


def test_failures_in_the_list() -> None:
    """`return_errors`: results and exceptions by rank, and nothing is raised."""
    first, second, third = isles.run_local(local_workers.returns, 3, args=("lambda",), return_errors=True)
    assert (first, third) == (0, 2) and isinstance(second, WorkerFailed) and second.rank == 1
    results = isles.run_local(local_workers.misbehaves, 3, args=("value",), return_errors=True)
    assert isinstance(results[1], ValueError) and all(isinstance(results[rank], CommError) for rank in (0, 2))


def test_impossible_runs_are_refused_before_they_start() -> None:
    """No worker at all, or a function that a new process cannot import."""
    for workers in (0, -1):
        with pytest.raises(ValueError, match=r"workers = .*choose 1 or more"):
            isles.run_local(local_workers.identity, workers)
    with pytest.raises(Exception, match="<lambda>"):
        isles.run_local(lambda world: None, 2)


def test_reports_come_in_each_workers_order() -> None:
    """And all of them before the run is over."""
    pool, seen = LocalWorkers(local_workers.reports, 2), []
    assert pool.join(seen.append) == ["result of 0", "result of 1"]
    assert [[event for event in seen if event[0] == rank] for rank in range(2)] == [
        [(rank, number) for number in range(3)] for rank in range(2)
    ]


def test_ctrl_c_in_the_launcher_ends_the_run_at_once(tmp_path: Path) -> None:
    """Or any error of its own, here in an event's handler: the workers, busy for a minute, are not waited for."""

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    pool = LocalWorkers(local_workers.lingers, 2, args=(str(tmp_path),))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pool.join(interrupt)
    assert time.monotonic() - start < 30.0
    assert all(process.exitcode is not None for process in pool.processes)


def launches(folder: str, how: str) -> None:
    """A launcher's program."""
    if how == "joining":  # the workers wait for one that never comes
        worker_specs = local.worker_specs
        local.worker_specs = lambda *a, **k: [replace(spec, size=spec.size + 1) for spec in worker_specs(*a, **k)]
    isles.run_local(local_workers.lingers, 4, args=(folder,))


def started(launcher: int, folder: Path, how: str) -> list[psutil.Process]:
    """The four workers, once they are where the test wants them."""
    if how == "joining":
        servers = psutil.Process(launcher).children()
        return [child for server in servers for child in server.children()]
    return [psutil.Process(int(path.read_text())) for path in folder.glob("*.pid")]


@pytest.mark.parametrize(
    ("by", "how"),
    [
        pytest.param(signal.SIGKILL, "running", marks=pytest.mark.long),
        (signal.SIGKILL, "joining"),
        pytest.param(signal.SIGINT, "running", marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_no_worker_outlives_its_launcher(tmp_path: Path, by: signal.Signals, how: str) -> None:
    """However the launcher ends: within two seconds all workers are gone, those that compute, those that wait for
    another, and those that still wait for the world to be complete.
    """
    launcher = forked.Process(launches, str(tmp_path), how, folder=ROOT)
    try:
        ready = comes_true(
            lambda: not launcher.process.is_alive() or len(started(launcher.pid, tmp_path, how)) == 4, 60.0
        )
        if not ready or not launcher.process.is_alive():
            launcher.process.kill()  # or its last words would not come to an end
            pytest.fail(launcher.end()[2] or "its workers were not there within 60 s")
        workers = started(launcher.pid, tmp_path, how)
        time.sleep(0.5 if how == "joining" else 0.0)
        os.kill(launcher.pid, by)
        assert comes_true(lambda: not any(map(runs, workers)), 2.0), [w for w in workers if runs(w)]
        launcher.process.join(5.0)
        assert launcher.process.exitcode
    finally:
        launcher.process.kill()
        launcher.end()


def test_own_waiting_counts_as_long_as_the_limit_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 s of silence: who waits for 40 s itself says so after 100, who has waited for a day after 120."""
    clock = [0.0]
    monkeypatch.setattr(silences.time, "monotonic", lambda: clock[0])
    for waited, most in ((0.0, 60.0), (40.0, 100.0), (86_400.0, 120.0)):
        silence, began = silences.Silence(60.0), clock[0]
        while not silence.over(waited):
            clock[0] += 0.5
        assert clock[0] - began == most + 0.5
