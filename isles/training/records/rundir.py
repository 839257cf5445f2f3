"""The run directory: the names of its files, its lock, a new run's first files, and what stays after a failure. Loads
no torch.

Only one run uses a directory at a time. The lock is the kernel's own (flock) on RUN/run.lock, so it ends with its
process, and a crash leaves nothing to clean up. The file holds the process id for the message. On a network file system
without locks the run goes on unlocked. If a user deletes the file, the lock is gone: the run notices this before it
writes, and takes the lock again, or ends if another run has it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from isles.base.durable import no_room, write_text
from isles.base.parsing import parse_json, parse_toml
from isles.comm.errors import CommError, RendezvousFailed
from isles.launch.nodes import NodeSpec
from isles.training.config.trust import TYPED, names_in, vouch
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.tokens import forget

NAME = "run.lock"


class RunLock:
    """The lock of the run directory `run` (which exists), held until `release`, or as a context manager. ValueError
    while another process holds it; OSError where no file can be made.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / NAME
        self._handle = _take(self._path)

    def keep(self, notify: Callable[[str], None]) -> None:
        """Take the lock again if its file was deleted. OSError if another run holds it by now."""
        if not self._is_ours():
            try:
                handle = _take(self._path)
            except ValueError as error:
                raise OSError(
                    f"{self._path} was removed while this run went on, and now {error.args[0]}; this run has ended"
                ) from error
            os.close(self._handle)
            self._handle = handle
            notify(f"{self._path} was removed while this run goes on; it is there again: leave it to the run")

    def release(self) -> None:
        """Give the lock and its file back."""
        # While it is held: who opened the file meanwhile finds that it is gone, see `_take`.
        if self._is_ours():
            self._path.unlink(missing_ok=True)
        os.close(self._handle)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_ours(self) -> bool:
        own = os.fstat(self._handle)
        if not os.path.samestat(own, os.stat(os.devnull)):
            with contextlib.suppress(FileNotFoundError):
                return os.path.samestat(own, self._path.stat())
            return False
        return True  # no locks here


def _take(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            os.close(handle)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return os.open(os.devnull, os.O_RDONLY)  # no locks on this file system
            raise ValueError(
                f"{path.parent}: in use by another run (process {holder or 'unknown'}); wait for its end or stop it"
            ) from error
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == path.stat().st_ino:
                with contextlib.suppress(OSError):  # a full disk: the lock itself needs no room
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
                return handle
        os.close(handle)  # the one before took its file away between our opening and locking it


CONFIG, METRICS, TIMELINE, SUMMARY, LOGS = "config.toml", "metrics.jsonl", "timeline.jsonl", "summary.json", "logs"


@contextlib.contextmanager
def lock_run(out: Path) -> Iterator[RunLock]:
    """Context: `out`, created if missing, locked for this run. ValueError if another run holds it, or it cannot be
    created.
    """
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(RunLock(out))
        except OSError as error:
            raise ValueError(f"--out {out}: cannot be written to ({error.strerror}); name another directory") from error
        yield lock


def save_config(text: str, out: Path) -> None:
    """Write RUN/config.toml, with a record that its user typed the names in it here."""
    write_text(out / CONFIG, text)
    vouch(out, names_in(parse_toml(text)))


def read_lines(path: Path) -> list[Any]:
    """The JSON lines of a file, without a last one that was not written whole. ValueError for another damaged one."""
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    return [parse_json(line) for line in whole.split(b"\n") if line]


def as_json(record: dict[str, Any], indent: int | None = None) -> str:
    """JSON of a flat record; a loss that is no number any more (nan, inf) becomes null: JSON has no such numbers."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, indent=indent)


@contextlib.contextmanager
def run_directory(out: Path, resume: int | None, node_spec: NodeSpec) -> Iterator[RunLock]:
    """Context: `out`, locked for this run; claimed if the run is new. After a failure its error names what is left;
    otherwise empty logs are deleted. ValueError as `lock_run` and `claim`; OSError, with a remedy, for a full disk.
    """
    try:
        with lock_run(out) as lock:
            if resume is None:
                claim(out)
            try:
                yield lock
            except BaseException as error:  # Ctrl-C too
                clean_up_failed(error, out, node_spec)
                raise
            clear_logs(out)
    except BaseException as error:
        with contextlib.suppress(OSError):  # not empty, or not ours to remove
            out.rmdir()
        if isinstance(error, OSError) and no_room(error):
            raise OSError(f"{out}: {no_room(error)} ({error.strerror}); {go_on(out, node_spec)}") from error
        raise


def claim(out: Path) -> None:
    """Start a new run in the locked `out`. ValueError if it holds another run."""
    there = [name for name in (CONFIG, SUMMARY) if (out / name).exists()]
    if there or _has_begun(out):
        raise ValueError(f"--out {out}: holds a run already ({(there or [METRICS])[0]}); name another directory")
    clear_logs(out, all_of_them=True)  # of a run that failed before it had begun
    (out / METRICS).touch()


def discard_beginning(out: Path) -> None:
    """Remove what a run leaves in `out` that was cut off before its first checkpoint. ValueError while it goes on."""
    with lock_run(out):
        for name in (METRICS, TIMELINE, CONFIG):
            (out / name).unlink(missing_ok=True)


def clean_up_failed(error: BaseException, out: Path, node_spec: NodeSpec) -> None:
    """After a failed run: delete useless files, and note on the error how to go on."""
    steps = Checkpoints(out).steps()
    clear_logs(out, all_of_them=isinstance(error, ValueError))
    if not _has_begun(out) and not steps:
        (out / METRICS).unlink(missing_ok=True)
        (out / CONFIG).unlink(missing_ok=True)
        (out / TYPED).unlink(missing_ok=True)
        forget(out)
    if isinstance(error, CommError | OSError) and not no_room(error) and not isinstance(error, RendezvousFailed):
        error.add_note(
            f"go on after step {steps[-1]} with: isles resume {out}{node_spec.flags}"
            if steps
            else "there was no checkpoint yet (run.checkpoint_every = N saves one every N steps)"
        )
        if len(steps) > 1:
            error.add_note(f"or further back with --step {steps[-2]}")


def go_on(out: Path, node_spec: NodeSpec) -> str:
    """The remedy for a full disk."""
    if Checkpoints(out).steps():
        return f"make room and go on with: isles resume {out}{node_spec.flags}"
    return "make room and start again (no checkpoint was written yet, see run.checkpoint_every)"


def clear_logs(out: Path, *, all_of_them: bool = False) -> None:
    """Remove the logs of workers that had nothing to say."""
    for log in (out / LOGS).glob("worker-*.log"):
        if all_of_them or log.stat().st_size == 0:
            log.unlink()
    with contextlib.suppress(OSError):  # not empty, or not there
        (out / LOGS).rmdir()


def _has_begun(out: Path) -> bool:
    """Whether a line of metrics was written; an empty file is of a run that was killed while it started."""
    metrics = out / METRICS
    return metrics.exists() and metrics.stat().st_size > 0
