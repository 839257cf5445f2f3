"""Files of object stores and of the web, by fsspec: listed, and fetched one at a time. Errors: OSError, one line."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from isles.base.errors import printable
from isles.base.scratch import scratch

_TRIES, _PAUSE, _SILENCE = 4, 1.0, 60.0  # seconds before the second, doubled for each; without an answer or a byte
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
    web, top, info = url.startswith("http"), root.rstrip("/") + "/", _answer(partial(fs.info, root))
    found = {"": info}
    if url.endswith("/") or info["type"] == "directory" or str(info.get("url")).endswith("/"):
        listed = _answer(partial(fs.find, top if web else root, maxdepth=16, detail=True))
        found = {}
        for path, one in listed.items():
            name = unquote(path[len(top) :]) if web else path[len(top) :]
            if path == top or (web and {"?", "#"} & {*path}):
                continue  # a page links to itself in another order
            if not path.startswith(top) or {"", ".."} & {*name.split("/")} or not name.isprintable():
                raise OSError(f"it lists {printable(name, 200)}, which is no file below it")
            if not re.search(r"(^|/)(\.|__pycache__/)", name):
                found[name] = one
        if web:  # a page says no sizes
            with ThreadPool(16) as pool:
                infos = _answer(partial(pool.map, lambda one: fs.info(one["name"]), found.values()))
            found = dict(zip(found, infos, strict=True))
    sizes = {name: -1 if one["size"] is None else one["size"] for name, one in found.items()}
    marks = {name: " ".join(str(one[key]) for key in _MARKS if key in one) for name, one in found.items()}
    return {name: Origin(fs.unstrip_protocol(found[name]["name"]), sizes[name], marks[name]) for name in found}


@contextlib.contextmanager
def fetched(file: Origin, folder: Path | None) -> Iterator[Path]:
    """Context: a copy of it, in `folder` or one of its own."""
    with scratch() if folder is None else contextlib.nullcontext(folder) as there:
        copy = there / f"fetched{Path(file.url).suffix}"

        def fetch() -> None:
            copy.unlink(missing_ok=True)  # to that one an earlier try may still write
            fs, path = _filesystem(file.url)
            fs.get_file(path, str(copy))
            if file.size not in (-1, size := copy.stat().st_size):
                raise OSError(f"{size} bytes came instead of {file.size}: it was cut, or changed")

        try:
            _answer(fetch, lambda: copy.exists() and copy.stat().st_size)
            yield copy
        finally:
            copy.unlink(missing_ok=True)


def _filesystem(url: str) -> tuple[Any, str]:
    extra, options = f"fsspec[{url.partition('://')[0]}]", {}
    try:
        if url.startswith("http"):
            import aiohttp

            extra, limits = ".[remote]", aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
            options = {"client_kwargs": {"timeout": limits, "trust_env": True}}  # proxies, and ~/.netrc
        import fsspec

        return fsspec.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        mend = f': pip install "{extra}"' if isinstance(error, ImportError) else ""
        raise OSError(f"{error}{mend}") from None


def _answer(work: Callable[[], Any], written: Callable[[], int] = lambda: 0) -> Any:
    """What work() returns, in a thread, since not every store has deadlines. written: bytes so far."""
    for attempt in range(_TRIES):
        with ThreadPool(1) as pool:
            result, before = pool.apply_async(work), -1
            result.wait(_SILENCE)
            while not result.ready() and before != (now := written()):
                before = now
                result.wait(_SILENCE)
            try:
                return result.get(0)
            except Exception as error:
                cause = error.__cause__ or error
        if getattr(cause, "status", 0) in (401, 403, 404) or isinstance(cause, FileNotFoundError | PermissionError):
            break
        time.sleep(_PAUSE * 2**attempt)
    raise OSError(printable(f"{type(cause).__name__}: {str(cause) or 'no answer'}", 300))
