"""How many files a new codec, outer rule, method or backend takes: what CONTRIBUTING.md says, tried in a copy.

Each is written as a contributor would, and then used; nothing else of the copy is touched.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from isles.base.schema import BACKENDS
from isles.running.run import STARTERS
from tests import forked

ROOT = Path(__file__).resolve().parent.parent

CODEC = '''"""Eight-bit floats, rounded to the nearest."""

import torch
from torch import Tensor

from isles.comm.codecs.base import Codec, as_bytes


class Float8(Codec):
    """E4M3: 1 byte an entry."""

    name = "fp8"

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x.to(torch.float8_e4m3fn))

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return wire.view(torch.float8_e4m3fn).to(dtype)
'''
RULE = '''"""An outer rule: half of the mean change."""

from dataclasses import dataclass

from isles.replicas.parts.interfaces import OuterRule


@dataclass(frozen=True, kw_only=True)
class Half(OuterRule):
    """anchor <- anchor - g / 2."""

    def apply(self, anchor, answer, state, round):
        anchor.sub_(answer.mean, alpha=0.5)
'''
METHOD = '''"""Half steps, of no paper."""

from dataclasses import replace

from isles.replicas.methods.fedavg import FedAvg
from isles.replicas.parts.half import Half


class HalfAvg(FedAvg):
    """FedAvg with half steps."""

    def compose(self):
        return replace(super().compose(), rule=Half())
'''
OWN_METHOD = '''"""A share of the mean change, of no paper."""

from dataclasses import replace

from isles.replicas.methods.config import ShareAvgConfig
from isles.replicas.methods.fedavg import Descent, FedAvg


class ShareAvg(FedAvg):
    """FedAvg with shorter steps."""

    Config = ShareAvgConfig

    def compose(self):
        return replace(super().compose(), rule=Descent(lr=self.config.share))
'''
SETTINGS = '''

@dataclass(frozen=True, kw_only=True)
class ShareAvgConfig(FedAvgConfig):
    """Settings of `shareavg`."""

    share: float = 0.5
    """Share of the mean change that is taken."""
'''
BACKEND = '''"""The backend `classroom`: virtual workers in one room."""

from isles.base.tables import changed
from isles.running import virtual


def _near(config):
    return changed(config, {"world.virtual.links": "lan"})


def train(config, out, resume, node_group):
    return virtual.train(_near(config), out, resume, node_group)


def call(worker, workers, config, args, out):
    return virtual.call(worker, workers, _near(config), args, out)
'''

LAST = '    """Settings of `eager`; defaults of the paper."""\n\n    outer_lr: float = 0.4\n'
# What is added: new files, and (file, what stands there, what stands there then).
ADDED: dict[str, tuple[dict[str, str], list[tuple[str, str, str]]]] = {
    "codec": (
        {"comm/codecs/float8.py": CODEC},
        [
            (
                "comm/codecs/kinds.py",
                "KINDS: dict[str, CodecKind] = {\n",
                "KINDS: dict[str, CodecKind] = {\n"
                '    "fp8": CodecKind(f"{_HERE}.float8:Float8", lossless=False, biased=False, shared_mask=False),\n',
            )
        ],
    ),
    "outer rule": ({"replicas/parts/half.py": RULE}, []),
    "method": (
        {"replicas/methods/halfavg.py": METHOD},
        [
            (
                "replicas/__init__.py",
                "METHODS: dict[str, MethodRow] = {\n",
                "METHODS: dict[str, MethodRow] = {\n"
                '    "halfavg": _row("halfavg:HalfAvg", "methods.config:FedAvgConfig", "half of the mean change"),\n',
            )
        ],
    ),
    "method with its own settings": (
        {"replicas/methods/shareavg.py": OWN_METHOD},
        [
            (
                "replicas/__init__.py",
                "METHODS: dict[str, MethodRow] = {\n",
                "METHODS: dict[str, MethodRow] = {\n"
                '    "shareavg": _row("shareavg:ShareAvg", "methods.config:ShareAvgConfig", "a part of the mean"),\n',
            ),
            ("replicas/methods/config.py", LAST, LAST + SETTINGS),
        ],
    ),
    "backend": (
        {"running/classroom.py": BACKEND},
        [
            (
                "base/schema.py",
                '        Backend(name="virtual"',
                '        Backend(name="classroom", is_simulated=True, has_processes=False),\n'
                '        Backend(name="virtual"',
            ),
            (
                "running/run.py",
                "STARTERS: dict[str, str] = {\n",
                'STARTERS: dict[str, str] = {\n    "classroom": "isles.running.classroom",\n',
            ),
        ],
    ),
}

USE = """
import sys
from pathlib import Path

import isles
from isles.replicas.methods.custom.config import CustomConfig
from isles.replicas.parts.legal import AXES, warnings
from isles.report.rundir import read_run
from isles.training.config.reading import read_config
from isles.training.config.reading import template
from isles.plan.question import candidates
from isles.plan.methods import plan_methods
from isles.plan.question import PlanQuestion, decoder_of
from isles.running.run import launch

assert isles.__file__.startswith(sys.argv[1]), isles.__file__

# The codec's trap: what is said of every lossy codec is said of this one.
assert "fp8" in AXES["codec"]
for refused in ({"rule": "average"}, {"mixing": "nobody"}):
    for codec in ("int8", "fp8"):
        try:
            CustomConfig(codec=codec, **refused)
        except ValueError as error:
            assert "codec " + codec in str(error), error
        else:
            raise AssertionError(f"{codec} is accepted with {refused}")
assert not any("never comes back" in line for line in warnings(CustomConfig(codec="fp8").choice))

assert isles.HalfAvg.__module__ == isles.METHODS["halfavg"].target.partition(":")[0]
assert 'method = "halfavg"' in template("halfavg")
assert "# Share of the mean change that is taken.\\nshare = 0.5\\n" in template("shareavg")
assert "isles.replicas.methods.shareavg" not in sys.modules, "its settings are read without its code"
assert isles.ShareAvg.Config().share == 0.5

flags = {"replicas.method": "halfavg", "replicas.codec": "fp8", "replicas.sync_every": 1, "world.backend": "classroom"}
flags |= {"world.workers": 2, "run.steps": 2, "data.path": sys.argv[1] + "/isles/network", "data.batch_size": 1}
flags |= {"data.validation_sequences": 1, "inner.warmup_steps": 1}
question = PlanQuestion(model=decoder_of(1e6, 2), step_seconds=1.0, workers=2, network="lan")
(planned,) = plan_methods(question, every=10, among=candidates("halfavg")).plans
assert planned.utilisation > 0.9 and planned.bytes_a_step > 0
config, out = read_config(None, flags, []), Path(sys.argv[2])
summary = launch(config, out, lambda line: None, lambda text: None)
parameters = summary["parameters"]
sent = summary["bytes_sent_per_worker"] / parameters
assert 3.9 < sent < 4.2, f"{sent}: half of 4 at the start, and 1 in each of two rounds"
assert 0.2 < summary["virtual_seconds"] < 0.22, "two steps of 0.1 s, and messages over a lan"
assert read_run(out).is_simulated
print("used")
"""


def files_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, set[str]]]:
    """A copy of the package with everything of ADDED in it, and the files that each took."""
    root = tmp_path_factory.mktemp("house")
    package = root / "isles"
    shutil.copytree(ROOT / "isles", package, ignore=shutil.ignore_patterns("__pycache__"))
    changed = {}
    for what, (new, edits) in ADDED.items():
        before = files_of(package)
        for name, text in new.items():
            assert name not in before
            (package / name).write_text(text)
        for name, old, instead in edits:
            text = (package / name).read_text()
            assert text.count(old) == 1, (name, old)
            (package / name).write_text(text.replace(old, instead))
        after = files_of(package)
        changed[what] = {name for name in after if after[name] != before.get(name)}
    return root, changed


def test_as_many_files_as_contributing_says(house: tuple[Path, dict[str, set[str]]]) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    said = {what: int(count) for what, count in re.findall(r"^\| an? ([a-z ]+?) \| (\d) \|", text, re.MULTILINE)}
    assert said == {"codec": 2, "outer rule": 1, "method": 2, "method with its own settings": 3, "backend": 3}
    assert {what: len(files) for what, files in house[1].items()} == said


def test_what_was_added_is_of_use(house: tuple[Path, dict[str, set[str]]], tmp_path: Path) -> None:
    """The codec is refused where every lossy one is; the method is in `isles`, in the template and planned; a run
    of all of them together sends what the codec says and takes the time that the backend says.
    """
    root, _ = house
    code, out, error = forked.Process(use, str(root), str(tmp_path / "run"), folder=tmp_path).end()
    assert code == 0, error[-3000:]
    assert out.split() == ["used"]


def use(root: str, out: str) -> None:
    """USE in this process, as if it had loaded torch and nothing of isles."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "isles"]:
        del sys.modules[name]
    sys.path.insert(0, root)
    sys.argv = ["-c", root, out]
    exec(USE, {"__name__": "__main__"})


def test_every_backend_can_be_started() -> None:
    assert set(STARTERS) == set(BACKENDS)
