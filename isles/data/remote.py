"""Files of object stores and of the web, by fsspec: listed, and fetched one at a time. Errors: OSError, one line."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from isles.base.errors import printable
from isles.base.scratch import scratch

_TRIES, _PAUSE = 4, 1.0  # and seconds after the first, twice as many after each further one
_SILENCE = 60.0  # seconds without an answer, or a byte
_DEEPEST, _FOLDERS, _AT_ONCE = 16, 100_000, 16  # folders; and questions to a web server, which lists no sizes
_MARKS = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "updated", "generation", "mtime")


class Origin(NamedTuple):
    """Of what is no file of this machine. size: bytes; -1: unknown. mark: changes with the content."""

    url: str
    size: int
    mark: str


def list_files(url: str) -> dict[str, Origin]:
    """Those below `url` by name, without hidden ones; of a single file {"": file}."""
    if "?" in url or re.match(r"[^/]*//[^/]*:[^/]*@", url):
        raise OSError("a run's records would keep its password or query: use ~/.netrc, or the store's own settings")
    fs, root = _filesystem(url)
    info = _answer(partial(fs.info, root))
    if not (url.endswith("/") or info["type"] == "directory" or str(info.get("url")).endswith("/")):
        return {"": _file(fs, info)}
    web, top, folders, found = url.startswith("http"), root.rstrip("/") + "/", [root], dict[str, Any]()
    for folder in folders:
        for one in _answer(partial(fs.ls, folder, detail=True)):
            path = one["name"]
            name = unquote(path.removeprefix(top)) if web else path.removeprefix(top)
            parts = name.rstrip("/").split("/")
            if not path.startswith(top) or (web and {"?", "#"} & {*path}):
                continue  # a page links to others, and to itself in another order
            unfit = any(part in ("", "..") or not part.isprintable() for part in parts)
            if unfit or len(parts) > _DEEPEST or len(folders) > _FOLDERS:
                raise OSError(f"it lists {printable(name, 200)}: no name of a file, or too many folders")
            hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            if not hidden and one["type"] == "directory":
                folders.append(path)
            elif not hidden:
                found[name] = one
    if web:
        with ThreadPool(_AT_ONCE) as pool:
            found = dict(pool.map(lambda name: (name, _answer(partial(fs.info, found[name]["name"]))), [*found]))
    return {name: _file(fs, one) for name, one in found.items()}


@contextlib.contextmanager
def fetched(file: Origin, folder: Path | None, most: int = 1 << 62) -> Iterator[Path]:
    """Context: a copy of its first bytes, in `folder` or one of its own."""
    with scratch() if folder is None else contextlib.nullcontext(folder) as there:
        copy = there / f"fetched{Path(file.url).suffix}"
        try:
            _answer(partial(_copy, file, copy, most), lambda: copy.exists() and copy.stat().st_size)
            yield copy
        finally:
            copy.unlink(missing_ok=True)


def _copy(file: Origin, copy: Path, most: int) -> None:
    fs, path = _filesystem(file.url)
    copy.unlink(missing_ok=True)  # to that one an earlier try may still write
    stream = {"block_size": 0, "size": file.size} if file.url.startswith("http") else {}
    with fs.open(path, "rb", **stream) as read, copy.open("xb") as write:
        while data := read.read(min(1 << 20, most - write.tell())):
            write.write(data)
        size = write.tell()
    if size < most and file.size not in (size, -1):
        raise OSError(f"{size} bytes came instead of {file.size}: it was cut, or changed")


def _filesystem(url: str) -> tuple[Any, str]:
    protocol, options = url.partition("://")[0], {}
    try:
        import fsspec

        if protocol in ("http", "https"):
            import aiohttp

            limits = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
            options = {"client_kwargs": {"timeout": limits, "trust_env": True}}  # proxies, and ~/.netrc
        return fsspec.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        package = ".[remote]" if protocol in ("http", "https") else f"fsspec[{protocol}]"
        raise OSError(f"{error}" + f': pip install "{package}"' * isinstance(error, ImportError)) from None


def _file(fs: Any, info: dict[str, Any]) -> Origin:
    size, mark = info.get("size"), " ".join(str(info[key]) for key in _MARKS if key in info)
    return Origin(fs.unstrip_protocol(info["name"]), -1 if size is None else size, mark)


def _answer(work: Callable[[], Any], written: Callable[[], int] = lambda: 0) -> Any:
    """What work() returns, in a thread, since not every store has deadlines. written: bytes so far."""
    for attempt in range(_TRIES):
        done, before = Future[Any](), -1
        threading.Thread(target=_set, args=(done, work), daemon=True).start()
        while not wait([done], _SILENCE).done and before != (now := written()):
            before = now
        error = done.exception(0) if done.done() else TimeoutError(f"silent for {_SILENCE:.0f} s")
        if error is None:
            return done.result(0)
        cause = error.__cause__ or error
        refused = getattr(cause, "status", 0) in {*range(400, 500)} - {408, 429}
        if refused or isinstance(cause, FileNotFoundError | PermissionError):
            break
        time.sleep(_PAUSE * 2**attempt)
    raise OSError(printable(f"{type(cause).__name__}: {cause}", 300)) from error


def _set(done: Future[Any], work: Callable[[], Any]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # for the thread that waits
        done.set_exception(error)
