"""The Dockerfile without Docker: what it says, and (long) its steps in a Debian of their own with the pip of here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ("/etc/pip.conf", "/root/.config/pip/pip.conf", "/root/.pip/pip.conf")
HOST = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")  # to reach what pip asks
PLACES = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def steps() -> Iterator[tuple[str, str]]:
    """Instructions and what they say."""
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest


def test_what_it_says() -> None:
    """Pinned versions, a user who is not root, the command; what is copied is there and is let through."""
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    found = list(steps())
    copied = [name for word, rest in found if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]]
    assert set(copied) == let_through and all((ROOT / name).exists() for name in copied)
    (install,) = (rest for word, rest in found if word == "RUN" and "pip install" in rest)
    assert "-c constraints.txt" in install
    last = dict(found)
    assert last["USER"] == "isles" and json.loads(last["ENTRYPOINT"]) == ["isles"]
    assert next(rest for word, rest in found if word == "ARG") == "PYTHON=3.11"  # of constraints.txt


class Image:
    """A stage as it is built: its files, variables, place and user."""

    def __init__(self, base: Path, root: Path, names: dict[str, str]) -> None:
        self.root, self.names, self.place, self.user = root, dict(names), "/", "root"
        subprocess.run(["cp", "-a", str(base), str(root)], check=True)
        for name in (*CONFIGS, *HOST):
            if Path(name).is_file():
                (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, root / name[1:])

    def run(self, command: str, user: str = "") -> str:
        """As `docker run` or a RUN line would, in mounts that end with it."""
        mounts = [f"mount --rbind {place} {self.root}{place}" for place in ("/proc", "/dev", *asked_by_pip())]
        for place in asked_by_pip():
            (self.root / place[1:]).mkdir(parents=True, exist_ok=True)
        inner = f"cd {self.place} && {command}"
        told = {name: value for name, value in os.environ.items() if name.startswith("PIP_")} | self.names
        words = ["env", "-i", *(f"{name}={value}" for name, value in ({"PATH": PLACES} | told).items())]
        words += ["chroot", f"--userspec={user or self.user}", str(self.root), "sh", "-c", inner]
        script = " && ".join([*mounts, "exec " + shlex.join(words)])
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout


def asked_by_pip() -> list[str]:
    """Folders of this machine that its pip looks into."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    named = [Path(place) for place in re.findall(r"(?:file://|(?<=[' =]))(/[\w./-]+)", said)]
    roots = (place.parent if place.name == "simple" else place for place in named)  # an index, and its files beside it
    return sorted({str(place) for place in roots if place.is_dir()})


def built(base: Path, folder: Path, given: dict[str, str]) -> Image:
    """By the Dockerfile's instructions; given: build arguments."""
    stages: dict[str, Image] = {}
    image: Image | None = None
    for word, rest in steps():
        if word == "FROM":
            name = rest.partition(" AS ")[2] or "last"
            image = stages[name] = Image(base, folder / name, {"HOME": "/root"})
        elif image is None:
            assert word == "ARG"  # of a FROM
        elif word == "ARG":
            name, _, value = rest.partition("=")
            image.names[name] = given.get(name, value)
        elif word == "ENV":
            for one in rest.split():
                name, _, value = one.partition("=")
                image.names[name] = value.replace("$PATH", PLACES)
        elif word == "WORKDIR":
            image.place = rest
            (image.root / rest[1:]).mkdir(exist_ok=True)
        elif word == "USER":
            image.user = rest
        elif word == "RUN":
            image.run(rest)
        elif word == "COPY":
            *sources, to = rest.split()
            if (stage := sources[0].partition("--from=")[2]) in stages:
                sources = [str(stages[stage].root) + sources[1]]
            if to.endswith("/"):
                (image.root / to[1:]).mkdir(exist_ok=True)
            subprocess.run(["cp", "-a", *sources, f"{image.root}{to}"], cwd=ROOT, check=True)
            subprocess.run(["chown", "-R", "root:root", f"{image.root}{to}"], check=True)
        else:
            assert word in ("ENTRYPOINT", "CMD"), word
    assert image is not None
    return image


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder for gigabytes."""
    yield tmp_path
    for place in tmp_path.iterdir():
        shutil.rmtree(place)


@pytest.mark.long
def test_its_steps_make_a_command(room: Path) -> None:
    """It trains as the image's user, and as any other who owns the mounted folder; nothing is written beside it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("the steps of an image need root on Linux")
    for tool, package in (("debootstrap", "debootstrap"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            pytest.skip(f"the steps of an image need {tool} (Debian: apt install {package})")
    base = room / "debian"
    words = ["--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", str(base)]
    if subprocess.run(["debootstrap", *words], capture_output=True, timeout=1500).returncode:
        pytest.skip("debootstrap reaches no Debian mirror")
    # Where pip has wheels of its own, they are the CPU's.
    image = built(base, room, {"TORCH_INDEX": ""} if "PIP_FIND_LINKS" in os.environ else {})
    command = " ".join(json.loads(dict(steps())["ENTRYPOINT"]))
    assert "isles train" in image.run(f"{command} --help")
    text = "/opt/isles/lib/python3.11/site-packages/isles/network"
    train = f"{command} train --workers 2 --steps 20 --set replicas.sync_every=5 --set data.path={text} --out runs"
    assert "validation loss" in image.run(f"{train}/first")
    shutil.chown(image.root / "work", 12345, 12345)
    shutil.rmtree(image.root / "work" / "runs")
    assert "validation loss" in image.run(f"{train}/second", user="12345:12345")
    assert (image.root / "work" / "runs" / "second" / "model.safetensors").is_file()
