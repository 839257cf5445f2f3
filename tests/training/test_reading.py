"""What a user writes becomes the run that was meant, or is answered by one line that names the key and the mend."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from isles.replicas import METHODS
from isles.training.config import reading
from isles.training.config.reading import gather, read_config, resolve, to_toml
from isles.training.config.sections import Config

OWN_METHOD = """
from dataclasses import dataclass
from isles.replicas.methods.none import NoSync
from isles.replicas.config import MethodConfig

@dataclass(frozen=True, kw_only=True)
class QuietConfig(MethodConfig):
    loud: float = 0.5
    names: tuple[str, ...] = ("a",)
    seed: int = 3

    def __post_init__(self) -> None:
        if self.loud < 0:
            raise ValueError(f"loud = {self.loud}:\\n  choose 0 or more")

class Quiet(NoSync):
    Config = QuietConfig

class NoMethod:
    pass
"""


@pytest.fixture
def own_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_methods.py").write_text(OWN_METHOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    return "my_methods:Quiet"


def read(*assignments: str, path: Path | None = None, **flags: Any) -> Config:
    """`read_config` as the command calls it; flags: method, workers, steps."""
    place = {"method": "replicas.method", "workers": "world.workers", "steps": "run.steps"}
    return read_config(
        None if path is None else str(path), {place[name]: flags.get(name) for name in place}, assignments
    )


def refused(*assignments: str, path: Path | None = None, **flags: Any) -> str:
    """The line with which a configuration is refused."""
    with pytest.raises(ValueError) as caught:
        read(*assignments, path=path, **flags)
    line = str(caught.value)
    assert line and "\n" not in line and "Traceback" not in line
    return line


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Who wins


def test_each_source_wins_over_the_ones_below_it(tmp_path: Path) -> None:
    """embedded < CONFIG.toml < flags < --set, key by key."""
    assert read().run.steps == 800  # embedded
    path = file(tmp_path, "[run]\nsteps = 700\nseed = 5\nlog_every = 7\n")
    assert read(path=path).run.steps == 700
    assert read(path=path, steps=600).run.steps == 600
    config = read("run.steps=500", "run.log_every=3", path=path, steps=600)
    assert (config.run.steps, config.run.log_every, config.run.seed) == (500, 3, 5)
    assert read("run.steps=1", "run.steps=2").run.steps == 2  # the last of two
    assert read("world.workers=3", workers=2).world.workers == 3
    assert read("replicas.method=ddp", method="diloco").method == "ddp"


def test_without_a_file_the_embedded_run_with_its_table_for_the_method() -> None:
    config = read()
    assert (config.method, config.world.workers, config.run.steps) == ("noloco", 4, 800)
    assert (config.model.size, config.data.path, config.inner.warmup_steps) == ("0.12M", "", 60)
    assert config.model.device == "auto"
    assert config.replicas.sync_every == 20
    diloco = read(method="diloco").replicas
    assert (diloco.sync_every, diloco.outer_momentum) == (20, 0.5)
    assert read("replicas.sync_every=40", method="diloco").replicas.sync_every == 40
    for name in METHODS:
        assert read(method=name).method == name
    assert read(method="demo").inner.lr < read(method="ddp").inner.lr == config.inner.lr
    assert read("inner.lr=1e-3", method="demo").inner.lr == 1e-3


def test_with_a_file_the_papers_defaults_and_nothing_embedded(tmp_path: Path) -> None:
    """An empty CONFIG.toml is the papers' run, not the demonstration."""
    path = file(tmp_path, "")
    noloco, diloco = read(path=path), read(path=path, method="diloco")
    assert (noloco.method, noloco.replicas.sync_every, noloco.replicas.outer_lr) == ("noloco", 50, 0.7)
    assert (diloco.replicas.sync_every, diloco.replicas.outer_momentum) == (500, 0.9)
    assert (noloco.inner.lr, noloco.inner.warmup_steps, noloco.data.batch_size) == (6e-4, 1000, 16)
    assert read(path=path, method="localsgd").replicas.sync_every == 50


@pytest.mark.parametrize(
    ("said", "workers"),
    [
        ([], 3),
        (["world.workers=auto"], 3),
        (["model.device=cuda"], 3),
        (["model.device=cuda:1"], 1),
        (["model.device=cpu"], 4),
        (["world.backend=virtual"], 4),
        (["world.workers=5"], 5),
    ],
)
def test_workers_are_one_a_gpu(monkeypatch: pytest.MonkeyPatch, said: list[str], workers: int) -> None:
    """Of each machine; four where none is to be used."""
    monkeypatch.setattr(reading, "gpus_here", lambda: 3)
    assert gather(None, {}, said)["world"]["workers"] == workers
    assert gather(None, {}, said, machines=2)["world"]["workers"] == (workers if workers in (4, 5) else 2 * workers)
    monkeypatch.setattr(reading, "gpus_here", lambda: 0)
    config = read_config(None, {}, [*said, "model.device=auto", "world.threads=auto"])
    assert config.world.workers == (5 if workers == 5 else 4) and config.world.threads == 0


def test_one_seed_makes_the_whole_run_another_one(tmp_path: Path) -> None:
    """run.seed also draws NoLoCo's pairs, unless replicas.seed is given."""
    assert read("run.seed=7").replicas.seed == 7
    assert read("run.seed=7", "replicas.seed=1").replicas.seed == 1
    assert read(path=file(tmp_path, "[run]\nseed = 4")).replicas.seed == 4
    assert read("run.seed=7", method="ddp").run.seed == 7  # draws nothing


# ---------------------------------------------------------------------------------------------------------------------
# TOML there and back

AWKWARD = [
    "data.path=/tmp/with spaces/[x] \"quotes\" 'and' #hash",
    "inner.lr=6e-3",
    "inner.betas=[0.5, 0]",
    "model.d_model=32",
    "model.heads=2",
    "model.tie_embeddings=false",
    "world.outer_deadline=1e6",
    "run.seed=12345678901",
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("assignments", [[], AWKWARD], ids=["plain", "awkward"])
def test_the_written_config_reads_back_equal(tmp_path: Path, name: str, assignments: list[str]) -> None:
    """config.toml of a run directory starts the same run again, for every method."""
    config = read(*assignments, method=name)
    text = to_toml(config)
    path = file(tmp_path, text)
    assert read(path=path) == config
    assert to_toml(read(path=path)) == text
    assert list(tomllib.loads(text)) == ["model", "data", "inner", "replicas", "pipeline", "memory", "world", "run"]


def test_optional_and_listed_settings_survive(tmp_path: Path, own_method: str) -> None:
    config = read("replicas.gamma=0.9", "replicas.seed=2")
    assert read(path=file(tmp_path, to_toml(config))) == config
    own = read('replicas.names=["x", "y"]', method=own_method)
    assert own.replicas.names == ("x", "y")
    assert read(path=file(tmp_path, to_toml(own))) == own


# ---------------------------------------------------------------------------------------------------------------------
# --set


def test_values_need_no_quotes() -> None:
    assert read("data.path=/some/where").data.path == "/some/where"
    assert read("model.size=2M").model.size == "2M"
    assert read("data.path='quoted'").data.path == "quoted"
    assert read("data.path=2024-05-01").data.path == "2024-05-01"  # TOML would see a date
    assert read("data.path=a=b#c").data.path == "a=b#c"
    assert read("data.cache=").data.cache == ""
    assert read("inner.betas=[0.8, 0.9]").inner.betas == (0.8, 0.9)
    assert read("inner.lr=1").inner.lr == 1.0  # a whole number is a rate too
    assert read("inner.lr=1e-3").inner.lr == 1e-3
    assert read("run.steps=1_000").run.steps == 1000
    assert read("model.compile=true").model.compile is True
    assert read("model.compile=max-autotune").model.compile == "max-autotune"
    assert read(" run.steps = 9 ").run.steps == 9


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("run.steps", ["--set run.steps", "section.key=value"]),
        ("steps=5", ["steps", "section.key"]),
        ("=5", ["section.key"]),
        ("run.=5", ["section.key"]),
        (".steps=5", ["unknown section ''"]),
        ("rum.steps=5", ["unknown section 'rum'", "did you mean 'run'", "replicas"]),
        ("run.stepz=5", ["unknown key 'run.stepz'", "did you mean 'run.steps'"]),
        ("run.steps.more=5", ["run.steps = {'more': 5}: input should be a valid integer"]),
        ("replicas.sync_evry=5", ["unknown key 'replicas.sync_evry'", "did you mean 'replicas.sync_every'"]),
        ("data.batchsize=5", ["did you mean 'data.batch_size'"]),
    ],
)
def test_a_slip_in_a_key_names_the_key_and_a_near_one(assignment: str, words: list[str]) -> None:
    line = refused(assignment)
    assert all(word in line for word in words), line


# ---------------------------------------------------------------------------------------------------------------------
# Values that cannot be

IMPOSSIBLE = [
    ("model.size=0.14M", "model.size = '0.14M'"),
    ("model.heads=3", "model.heads = 3"),
    ("model.layers=0", "model.layers = 0"),
    ("model.autocast=int3", "model.autocast = 'int3'"),
    ("data.batch_size=0", "data.batch_size = 0"),
    ("data.split=random", "data.split = 'random'"),
    ("data.validation_fraction=1.5", "data.validation_fraction = 1.5"),
    ("inner.lr=0", "inner.lr = 0"),
    ("inner.lr=nan", "inner.lr = nan"),
    ("inner.lr=inf", "inner.lr = inf"),
    ("inner.betas=[0.9, 1.0]", "inner.betas = (0.9, 1.0)"),
    ("inner.weight_decay=-1", "inner.weight_decay = -1"),
    ("inner.weight_decay=nan", "inner.weight_decay = nan"),
    ("inner.max_norm=nan", "inner.max_norm = nan"),
    ("inner.warmup_steps=-1", "inner.warmup_steps = -1"),
    ("inner.final_lr_fraction=2", "inner.final_lr_fraction = 2"),
    ("inner.accumulation=0", "inner.accumulation = 0"),
    ("replicas.sync_every=0", "replicas.sync_every = 0"),
    ("replicas.outer_lr=-0.7", "replicas.outer_lr = -0.7"),
    ("replicas.outer_momentum=1", "replicas.outer_momentum = 1"),
    ("replicas.gamma=-1", "replicas.gamma = -1"),
    ("replicas.group_size=1", "replicas.group_size = 1"),
    ("replicas.exchange=all", "replicas.exchange = 'all'"),
    ("replicas.codec=zip", "unknown replicas.codec 'zip'"),
    ("replicas.anchor_codec=fp16", "unknown replicas.anchor_codec 'fp16'"),
    ("world.workers=0", "world.workers = 0"),
    ("world.threads=-1", "world.threads = -1"),
    ("world.backend=mpi", "world.backend = 'mpi': choose one of distributed, virtual"),
    ("world.virtual.links=dsl", "unknown world.virtual.links 'dsl'"),
    ("world.virtual.step_seconds=nan", "world.virtual.step_seconds = nan"),
    ("world.virtual.step_seconds=-1", "world.virtual.step_seconds = -1"),
    ("world.outer_deadline=0", "world.outer_deadline = 0"),
    ("world.outer_deadline=inf", "world.outer_deadline = inf"),
    ("world.slowest_link=0", "world.slowest_link = 0"),
    ("run.steps=0", "run.steps = 0"),
    ("run.log_every=0", "run.log_every = 0"),
    ("run.validate_every=-1", "run.validate_every = -1"),
    ("run.seed=-1", "run.seed = -1"),
]


@pytest.mark.parametrize(("assignment", "begins"), IMPOSSIBLE, ids=[pair[0] for pair in IMPOSSIBLE])
def test_an_impossible_value_is_named_with_its_section_once(assignment: str, begins: str) -> None:
    line = refused(assignment)
    assert line.startswith(begins), line
    section = assignment.partition(".")[0]
    assert f"{section}.{section}." not in line


WRONG_TYPES = [
    ("run.steps=many", "run.steps = 'many': input should be a valid integer"),
    ("run.checkpoint_every=often", "run.checkpoint_every = 'often': input should be a valid integer or 'auto'"),
    ("run.steps=2.5", "run.steps = 2.5"),
    ("run.steps=true", "run.steps = True"),
    ('run.steps="20"', "run.steps = '20'"),
    ("run.steps=[1]", "run.steps = [1]"),
    ("inner.lr=fast", "inner.lr = 'fast'"),
    ("inner.lr=true", "inner.lr = True"),
    ("inner.betas=0.9", "inner.betas = 0.9"),
    ("inner.betas=[0.9]", "inner.betas.1 is missing"),
    ("inner.betas=[0.9, 0.9, 0.9]", "inner.betas"),
    ("model.compile=yes", "model.compile = 'yes'"),
    ("model.d_model=wide", "model.d_model = 'wide'"),
    ("data.path=5", "data.path = 5"),
    ("data.path=true", "data.path = True"),
    ("replicas.prefetch_phi=1", "replicas.prefetch_phi = 1"),
    ("replicas.gamma=none", "replicas.gamma = 'none'"),
    ("replicas.method=5", "replicas.method = 5"),
    ("world.backend=1", "world.backend = 1"),
]


@pytest.mark.parametrize(("assignment", "begins"), WRONG_TYPES, ids=[pair[0] for pair in WRONG_TYPES])
def test_a_wrong_type_is_named_not_converted(assignment: str, begins: str) -> None:
    assert refused(assignment).startswith(begins)


def test_a_number_where_text_belongs_is_told_of_quotes() -> None:
    assert "in quotes" in refused("data.path=5")
    assert read("data.path='5'").data.path == "5"


def test_impossible_combinations() -> None:
    assert refused("replicas.exchange=theta_only", "replicas.gamma=0.5").startswith("replicas.exchange = ")
    assert refused("replicas.exchange=single_vector", "replicas.codec=int8").startswith("replicas.exchange = ")
    assert refused("model.autocast=bf16", "model.dtype=float64").startswith("model.autocast = ")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "nosuch.toml"
    assert refused(path=missing).startswith(f"{missing}: cannot be read")
    assert refused(path=tmp_path) == f"{tmp_path}: is no CONFIG.toml; to train on it: --data {tmp_path}"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not valid TOML" in refused(path=binary)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run\nsteps = 5", "not valid TOML"),
        ("[run]\nsteps = \n", "not valid TOML"),
        ("[run]\nsteps = 5\nsteps = 6\n", "not valid TOML"),
        ("[data]\npath = /no/quotes\n", "not valid TOML"),
        ("steps = 5\n", "steps stands outside a section"),
        ("[[run]]\nsteps = 5\n", "run"),
        ("[ruin]\nsteps = 5\n", "did you mean 'run'"),
        ("[run.steps]\nmany = 5\n", "run.steps = {'many': 5}"),
        ("[replicas.noloco]\nsync_every = 5\n", "unknown key 'replicas.noloco'"),
        ("[replicas]\nmethod = 3\n", "replicas.method = 3"),
    ],
)
def test_a_file_that_says_nothing_usable(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(path=file(tmp_path, text))


# ---------------------------------------------------------------------------------------------------------------------
# Methods


def test_an_unknown_method_is_answered_with_the_known_ones() -> None:
    line = refused(method="nolocco")
    assert "unknown method 'nolocco'" in line and "did you mean 'noloco'" in line and "package.module:Class" in line
    assert all(name in line for name in METHODS)


def test_a_method_of_ones_own(tmp_path: Path, own_method: str) -> None:
    """package.module:Class brings its Config, its checks in one line, and no embedded table."""
    config = read("replicas.loud=2", method=own_method)
    assert (config.method, config.replicas.loud, type(config.replicas).__name__) == (own_method, 2.0, "QuietConfig")
    assert config.run.steps == 800
    assert refused("replicas.loud=-1", method=own_method) == "replicas.loud = -1.0: choose 0 or more"
    assert "did you mean 'replicas.loud'" in refused("replicas.lout=1", method=own_method)
    assert read(path=file(tmp_path, f'[replicas]\nmethod = "{own_method}"\nloud = 1\n')).replicas.loud == 1.0


@pytest.mark.parametrize(
    "name", ["my_methods:Nothing", "no_such_module:X", "my_methods:NoMethod", ".x:Y", ":Y", "x:", "a b:C", "torch:nn"]
)
def test_a_method_of_ones_own_that_is_none(own_method: str, name: str) -> None:
    assert name in refused(method=name)


def test_a_config_for_one_method_with_another(tmp_path: Path) -> None:
    """What the other method does not know is refused with the reason; what both know carries over."""
    path = file(tmp_path, '[replicas]\nmethod = "noloco"\nsync_every = 30\nouter_lr = 0.5\n')
    assert read(path=path, method="diloco").replicas.sync_every == 30
    path = file(tmp_path, '[replicas]\nmethod = "noloco"\nsync_every = 30\ngamma = 0.8\n')
    line = refused(path=path, method="diloco")
    assert "replicas.gamma is a setting of noloco, streaming-noloco, custom, not of diloco" in line
    assert "remove it" in line
    line = refused(path=path, method="none")
    assert "replicas.sync_every is a setting of" in line and "not of none" in line


def test_a_slip_is_answered_before_torch_is_loaded() -> None:
    """Two seconds sooner."""
    code = (
        "import sys; from isles.training.config.reading import gather, resolve\n"
        "for words in ['run.steps=0', 'a.b=1', 'model.size=x', 'replicas.method=nolocco', 'replicas.codec=zip']:\n"
        "    try: resolve(gather(None, {}, [words])); raise SystemExit('accepted ' + words)\n"
        "    except ValueError: pass\n"
        "resolve(gather(None, {}, []))\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gather_and_resolve_are_read_config() -> None:
    assert resolve(gather(None, {"run.steps": 5}, ["run.seed=1"])) == read("run.seed=1", steps=5)
