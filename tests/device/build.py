"""The library of the fake GPU, compiled once for these sources, this torch and this Python: some ten seconds of g++.

It lies outside the tree in a folder of this user's, which later runs of the tests and other checkouts share.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).parent
_SOURCES = ("memory.cpp", "dispatch.cpp")


def missing() -> str | None:
    """Why the fake GPU cannot be built here; None: it can. torch is not imported."""
    if shutil.which("g++") is None:
        return "the fake GPU is C++, and there is no g++ here"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "the fake GPU is built with torch's headers, which want Python.h, and it is not here"
    if any(_torch().glob("lib/libtorch_cuda*")):
        return "this torch is a CUDA build: the fake GPU is for one of the CPU alone"
    return None


def library() -> Path:
    """Its path, built if it is not there. CalledProcessError where the compiler refuses it."""
    torch, compiled = _torch(), _folder() / f"{_digest()}.o"
    made = compiled.with_suffix(f".{hashlib.sha256(bytes(torch)).hexdigest()[:8]}.so")
    if made.is_file():
        return made
    with open(compiled.with_suffix(".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may have had it before
        if not compiled.is_file():
            _compile(torch, compiled)
        if not made.is_file():  # for each environment, which has torch's libraries in another place
            libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
            _run(made, "-shared", str(compiled), *libraries)
    return made


def _compile(torch: Path, made: Path) -> None:
    # -O0: it is compiled more often than its speed would matter. -w: torch's headers warn.
    flags = ["-c", "-O0", "-std=c++20", "-fPIC", "-w", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    flags += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    with tempfile.TemporaryDirectory(dir=made.parent) as room:
        whole = Path(room, "all.cpp")  # one, for most of the time goes into torch's headers
        whole.write_text("".join(f'#include "{_HERE / name}"\n' for name in _SOURCES))
        _run(made, *flags, str(whole))


def _run(made: Path, *words: str) -> None:
    """The compiler; `made` is there when it is whole."""
    with tempfile.TemporaryDirectory(dir=made.parent) as room:
        subprocess.run(["g++", *words, "-o", f"{room}/made"], check=True)
        os.replace(f"{room}/made", made)


def _digest() -> str:
    what = hashlib.sha256()
    for name in (*_SOURCES, "fake_cuda.h", Path(__file__).name):
        what.update((_HERE / name).read_bytes())
    what.update(f"{version('torch')} {sys.version}".encode())
    return what.hexdigest()[:24]


def _folder() -> Path:
    """Not in anybody's home. What is loaded from it runs, so nobody else may write there."""
    folder = Path(tempfile.gettempdir(), f"isles-tests-device-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone: remove it")
    return folder


def _torch() -> Path:
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
