"""How many files a new codec, outer rule, method or backend takes: what CONTRIBUTING.md says, tried in a copy.

Each is written as a contributor would, and then used; nothing else of the copy is touched.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import isles
from isles.base.parts import CODE
from isles.base.schema import BACKENDS
from isles.base.tables import changed
from isles.cli import _run, app
from isles.data import load_corpus
from isles.models import build
from isles.plan.run_plan import plan_run
from isles.running.run import STARTERS
from isles.running.virtual import VirtualWorkers
from isles.training.config.reading import read_config
from isles.training.config.trust import names_of
from isles.training.worker import train_worker
from tests import forked
from tests.covers import share
from tests.training.runs import CLOCKS, tiny, write_text

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
from isles.running.virtual import VirtualWorkers
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
    forked.forget_isles()
    sys.path.insert(0, root)
    sys.argv = ["-c", root, out]
    exec(USE, {"__name__": "__main__"})


def test_every_backend_can_be_started() -> None:
    assert set(STARTERS) == set(BACKENDS)


def test_what_is_public_says_what_it_is() -> None:
    """Every name of `isles` loads and has a docstring of its own; what a part of one's own derives from is there."""
    for name in isles.__all__:
        thing = getattr(isles, name)
        if callable(thing):
            assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), f"{name} has no docstring"
    interfaces = {row.interface.partition(":")[2] for row in CODE.values() if row.interface.startswith("isles.")}
    assert interfaces <= set(isles.__all__)


# ---------------------------------------------------------------------------------------------------------------------
# Parts in a folder outside the package, by name

PARTS = {
    "sign_momentum": '''"""An outer rule: the sign of the outer gradients' running mean, a fixed step an entry."""

from dataclasses import dataclass

from torch import Tensor

import isles


@dataclass(frozen=True, kw_only=True)
class SignMomentum(isles.OuterRule):
    """m <- momentum m + (1 - momentum) g;  anchor <- anchor - lr sign(m)."""

    lr: float
    vectors = ("mean",)

    def apply(self, anchor: Tensor, answer: isles.Answer, state: isles.RuleState, round: int) -> None:
        mean = state.vectors["mean"].mul_(self.momentum).add_(answer.mean, alpha=1 - self.momentum)
        anchor.sub_(mean.sign(), alpha=self.lr)
''',
    "outer_muon": '''"""An outer rule: Muon (orthogonal momentum by Newton-Schulz) for matrices, SGD for the rest."""

from dataclasses import dataclass

from torch import Tensor

import isles


@dataclass(frozen=True, kw_only=True)
class OuterMuon(isles.OuterRule):
    """V <- momentum V + g;  anchor <- anchor - lr O(V), O(V) of V's singular vectors and singular values of 1."""

    lr: float
    plain: tuple[str, ...] = ()
    vectors = ("momentum",)
    whole = True

    def apply(self, anchor: Tensor, answer: isles.Answer, state: isles.RuleState, round: int) -> None:
        if anchor.dim() != 2 or state.name in self.plain:
            anchor.sub_(answer.mean, alpha=self.lr)
            return
        v = state.vectors["momentum"].mul_(self.momentum).add_(answer.mean)
        x = v / v.norm().clamp_min(1e-30)
        for _ in range(40):
            x = 1.5 * x - 0.5 * (x @ x.T) @ x
        anchor.sub_(x, alpha=self.lr)
''',
    "float8": '''"""A codec: eight-bit floats E4M3 of entries over a power of two."""

import torch
from torch import Tensor

import isles


class Float8(isles.Codec):
    """1 byte an entry."""

    name = "float8"
    lossless = biased = shared_mask = False

    def __init__(self, shift: int = 0) -> None:
        self.scale = 2.0**shift

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements

    def encode(self, x: Tensor) -> Tensor:
        return isles.as_bytes((x * self.scale).to(torch.float8_e4m3fn))

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        return wire.view(torch.float8_e4m3fn).to(dtype) / self.scale
''',
    "doubling": '''"""A cadence: rounds that grow, after inner steps first, 2 first, 4 first, ..."""


class Doubling:
    """The whole model, landing at once."""

    fragments, rounds_late = 1, 0

    def __init__(self, first: int = 1) -> None:
        self.first = first

    def sends(self, step: int) -> tuple[int, ...]:
        times, rest = divmod(step, self.first)
        return (0,) if rest == 0 and times & (times - 1) == 0 else ()

    def lands(self, sent: int) -> int:
        return sent
''',
    "neighbours": '''"""A mixing: pairs on a ring, to the left in odd rounds and to the right in even ones."""


class Neighbours:
    """An odd worker too many is alone."""

    agrees = False

    def members(self, round: int, size: int, position: int) -> tuple[int, ...]:
        shift = round % 2 if size % 2 == 0 else 0
        other = (((position + shift) ^ 1) - shift) % size
        return (position,) if position + 1 == size and size % 2 else tuple(sorted((position, other)))
''',
    "shifted": '''"""A router: every boundary leads to the next replica, by as many as the step says."""

from collections.abc import Sequence

import isles


class Shifted(isles.Router):
    """by: replicas that a microbatch moves on, times the step."""

    def __init__(self, by: int = 1) -> None:
        self.by = by

    def routes(self, step: int, grid: isles.PipelineGrid) -> Sequence[isles.Route]:
        def visits(replica: int) -> tuple[int, ...]:
            moved = (replica + self.by * step * stage for stage in range(grid.stages))
            return tuple(grid.worker(one % grid.replicas, stage) for stage, one in enumerate(moved))

        numbers = range(grid.replicas * grid.microbatches)
        return [isles.Route(number, visits(number % grid.replicas), grid.home) for number in numbers]
''',
    "halves": '''"""A boundary: the means of neighbouring numbers of the stream."""

from torch import Tensor

import isles


class Means(isles.Boundary):
    """of: how many neighbours make a mean."""

    def __init__(self, width: int, of: int = 2) -> None:
        super().__init__(width)
        self.of = of

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        return x_BTD.unflatten(-1, (-1, self.of)).mean(-1), None

    def decode(self, payload: Tensor, side: None, tokens: Tensor) -> Tensor:
        return payload.repeat_interleave(self.of, -1)

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        return (sequences, length, self.width // self.of), 0
''',
    "plain": '''"""A reading and a landing that do what the usual ones do."""

from torch import Tensor


class Mean:
    """All of it."""

    needs_own = False

    def read(self, mean: Tensor, fresh: Tensor | None, own: Tensor | None, participants: int) -> Tensor:
        return mean


class Anchor:
    """live = anchor."""

    moves_reference, local_share = False, None

    def land(self, live: list[Tensor], anchor: list[Tensor], reference: list[Tensor]) -> None:
        for own, moved in zip(live, anchor, strict=True):
            own.copy_(moved)
''',
}
ROWS = {
    "rule": 'method = "custom"\nsync_every = 2\nrule = "sign_momentum:SignMomentum"\n'
    "options.rule = {lr = 0.0078125, momentum = 0.25}",
    "matrices": 'method = "custom"\nsync_every = 6\nrule = "outer_muon:OuterMuon"\n'
    'options.rule = {lr = 0.25, momentum = 0.5, plain = ["embed.weight"]}',
    "codec": 'method = "diloco"\nsync_every = 3\ncodec = "float8:Float8"\noptions.codec.shift = 6',
    "cadence": 'method = "custom"\ncadence = "doubling:Doubling"\noptions.cadence.first = 2',
    "mixing": 'method = "custom"\nsync_every = 2\nmixing = "neighbours:Neighbours"\nrule = "sgd"',
    "router": 'method = "none"\npipeline.stages = 2\npipeline.routing = "shifted:Shifted"\npipeline.microbatches = 2',
    "boundary": 'method = "diloco"\nsync_every = 3\npipeline.stages = 2\npipeline.microbatches = 2\n'
    'pipeline.boundary.kind = "halves:Means"\npipeline.options.boundary.of = 4',
}
"""A method table of CONFIG.toml for each part."""
MODEL_KEYS = "d_model = 16\nlayers = 2\nheads = 2\nffn = 24\nvocab = 256\ncontext = 16\ntie_embeddings = false"
STEPS, WORKERS = 6, 4


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the parts and a CONFIG.toml that names each in a row."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name, text in PARTS.items():
        (folder / f"{name}.py").write_text(text)
    sections = {
        "model": MODEL_KEYS,
        "data": f"path = '{write_text(folder / 'text.txt')}'\nbatch_size = 2\nvalidation_fraction = 0",
        "inner": "warmup_steps = 1",
        "world": f'workers = {WORKERS}\nbackend = "virtual"',
        "run": f"steps = {STEPS}",
        **{f"methods.{row}": text for row, text in ROWS.items()},
    }
    (folder / "rows.toml").write_text("".join(f"[{head}]\n{text}\n\n" for head, text in sections.items()))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def trained(elsewhere: Path) -> Callable[[str], Path]:
    """By row, the run of `isles train`."""

    @cache
    def run(row: str) -> Path:
        out = elsewhere / "train" / row
        command("train", str(elsewhere / "rows.toml"), "--method", row, "--out", str(out))
        return out

    return run


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("row", share(ROWS, 0, 3))
def test_a_part_from_outside_is_named_in_every_command(
    row: str, elsewhere: Path, trained: Callable[[str], Path]
) -> None:
    """The dry run knows what it sends, and names it; the three commands train the same bits."""
    config = read_config(str(elsewhere / "rows.toml"), {"replicas.method": row}, [])
    planned = plan_run(config).bytes_sent
    own, models, named = str(elsewhere / "rows.toml"), [], re.search(r'"(\w+:\w+)"', ROWS[row])[1]  # type: ignore[index]
    for verb, *more in (("compare", "--seeds", "0"), ("simulate",)):
        command(verb, own, "--methods", row, *more, "--out", str(elsewhere / verb / row))
    for made in ("train", "compare", "simulate"):
        trained(row)
        every = (path.parent for path in (elsewhere / made / row).glob("**/summary.json"))
        (run,) = (one for one in every if named in (one / "config.toml").read_text())
        summary = json.loads((run / "summary.json").read_text())
        assert summary["bytes_sent_per_worker"] == sum(planned) / WORKERS
        models.append((run / "model.safetensors").read_bytes())
    assert models[0] == models[1] == models[2]
    shown = command("train", own, "--method", row, "--dry-run")
    for key, value in names_of(config).items():
        assert f"{key} = {json.dumps(value)}" in shown
    assert (trained(row) / "report.html").read_text().count(re.search(r"\w+:\w+", ROWS[row])[0]) >= 1  # type: ignore[index]


@pytest.mark.parametrize("method", ["ddp", "dct-dp", "dilocox", "noloco", "sparseloco", "streaming-diloco"])
def test_every_codec_may_be_ones_own(method: str, elsewhere: Path) -> None:
    """Of gradients, of their largest entries, of factors, of one of two vectors, of fragments."""
    own = ["replicas.codec=float8:Float8", "replicas.options.codec.shift=4", "data.validation_fraction=0"]
    config = tiny(elsewhere / "text.txt", *own, method=method)
    results = VirtualWorkers(train_worker, 2, config, (config, None, None, load_corpus(config.data))).join()
    assert plan_run(config).bytes_sent == tuple(result["bytes_sent"] for result in results)
    plain = changed(config, {"replicas.codec": "int8", "replicas.options": None})
    assert plan_run(config).bytes_sent < plan_run(plain).bytes_sent


def test_a_reading_and_a_landing_of_ones_own(elsewhere: Path) -> None:
    own = ["replicas.reading=plain:Mean", "replicas.landing=plain:Anchor"]
    configs = [tiny(elsewhere / "text.txt", *more, method="custom") for more in ([], own)]
    plain, named = (
        VirtualWorkers(train_worker, 2, one, (one, None, None, load_corpus(one.data))).join() for one in configs
    )
    assert [{**one, **dict.fromkeys(CLOCKS)} for one in plain] == [{**one, **dict.fromkeys(CLOCKS)} for one in named]


def test_parts_are_at_most_60_lines() -> None:
    assert all(len(text.splitlines()) <= 60 for text in PARTS.values())


def test_the_parts_do_what_they_say(elsewhere: Path, trained: Callable[[str], Path]) -> None:
    """Numbers that follow from each part's own docstring."""

    plans = {row: plan_run(read_config(str(elsewhere / "rows.toml"), {"replicas.method": row}, [])) for row in ROWS}
    config = plans["rule"].config
    before, after = build(config.model, config.run.seed), load_file(trained("rule") / "model.safetensors")
    moved = {name: (start.detach() - after[name]) * 128 for name, start in before.named_parameters()}
    assert all((steps - steps.round()).abs().max() < 1e-4 and steps.abs().max() < 3.001 for steps in moved.values())
    assert max(float(steps.abs().max()) for steps in moved.values()) > 2.999, "three rounds of 1/128 an entry"

    after = load_file(trained("matrices") / "model.safetensors")
    for name, start in before.named_parameters():
        turned = (start.detach() - after[name]) / 0.25
        if start.dim() == 2 and name != "embed.weight":  # one round
            assert (torch.linalg.svdvals(turned) - 1).abs().max() < 1e-3, name

    outlines = {row: plan.outline for row, plan in plans.items()}
    quarter = -(-plans["codec"].parameters // 4)  # a byte an entry, in two shots, of three workers' quarters each
    headers = outlines["codec"].sent[0] - 2 * 2 * 3 * quarter
    assert 0 < headers < 2 * 2 * 3 * 64, "what leaves in two rounds beside the entries"
    assert [one.sent for one in outlines["cadence"].first] == [2, 4, 7], "and a last, shorter round at the end"
    odd, even = ((0, 3), (1, 2)), ((0, 1), (2, 3))
    assert [one.groups for one in outlines["mixing"].first] == [odd, even, odd]

    for row, width in (("router", 16), ("boundary", 4)):
        microbatch = 2 * 16 * width * 4 + 17 + 4  # 16 tokens there and back, their ids, the loss
        first = 2  # bytes: a replica's stages learn whether there is text to validate with
        assert plans[row].between_stages == (2 * 2 * STEPS * microbatch + first) / WORKERS


WRONG = {
    "a module that is not there": ("rule", "rule=nowhere.at:All", ".rule = .*No module named 'nowhere'; .*PYTHONPATH"),
    "a class that is not there": ("rule", "rule=sign_momentum:Sine", ".rule = .*has no attribute 'Sine'; correct"),
    "no class": ("rule", "rule=sign_momentum:dataclass", ".rule = .* is a function: name a class"),
    "another part": ("codec", "codec=doubling:Doubling", ".codec = .*: derive the class from isles.Codec"),
    "a missing method": ("mixing", "mixing=doubling:Doubling", ".mixing = .* lacks agrees, members: isles.Mixing"),
    "a missing option": ("cadence", "rule=sign_momentum:SignMomentum", ".options.rule.lr is missing: sign_momentum"),
    "an unknown option": ("cadence", "options.cadence.last=3", ".options.cadence.last = 3: .*; choose one of first"),
    "a refused option": ("codec", "options.codec.shift=x", ".codec = .* cannot be made; .* options.codec: TypeError"),
    "options without code": ("codec", "codec=int8", r".options.codec is for code .*, and codec = .int8. is none: "),
    "options of no part": ("codec", "options.rule.lr=1", ".options.rule belongs to no part: choose one of "),
    "two that say when": ("cadence", "sync_every=5", ".sync_every = 5 and cadence = .*: leave one of them out"),
    "other fragments": ("cadence", "fragments=sequential", ".cadence = .* is of 1 fragments; .* options.cadence"),
    "what does not go together": ("mixing", "codec=powersgd:2", ".codec powersgd x mixing own .groups.: the factors"),
    "a stream that does not fit": ("boundary", "pipeline.options.boundary.of=3", ".boundary.kind = .* width of 16: "),
    "a router's option": ("router", "pipeline.options.router.to=3", ".options.router.to = 3: .*; choose one of by"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_part_is_one_line(
    what: str, elsewhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything is started or written; no traceback."""
    row, setting, line = WRONG[what]
    setting = setting if setting.startswith("pipeline.") else f"replicas.{setting}"
    arguments = [
        "train",
        str(elsewhere / "rows.toml"),
        "--method",
        row,
        "--set",
        setting,
        "--out",
        str(tmp_path / "no"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["isles", *arguments])
        assert _run() == 2
    *notes, said = capsys.readouterr().err.strip().splitlines()
    assert re.match(f"isles: (replicas|pipeline){line}", said), said
    assert all(note.startswith("note: ") for note in notes) and not (tmp_path / "no").exists()
