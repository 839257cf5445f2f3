"""A user's mistake, in every verb: one line on stderr that begins with `isles:` and holds the key and the mend, nothing
changed on disk, no traceback; exit code 2 before a run starts, 1 during it. Warnings let it go on.

The command runs in this process, on the virtual backend where it comes to training, to save the start of another.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from isles import __version__, cli
from isles.training.records.rundir import RunLock
from tests.cli.command import in_process, isles
from tests.training.runs import POISONED, TINY, run, tiny, write_text

Answer = Callable[..., tuple[int, str]]
TRAIN = ["train", *(word for setting in [*TINY, "data.path=text.txt"] for word in ("--set", setting)), "--workers", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: texts good and bad, a finished run, and one with a checkpoint, whole and spoilt."""
    folder = tmp_path_factory.mktemp("user")
    text = write_text(folder / "text.txt")
    (folder / "bad.toml").write_text("[run\n")
    (folder / "empty.toml").write_text("")
    (folder / "outside.toml").write_text("steps = 5\n")
    (folder / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too short")
    (folder / "binary.dat").write_bytes(bytes(range(256)) * 20)
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "chat.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [-100, 2, 4]}\n' * 300)
    (folder / "other.jsonl").write_text('{"words": "fine"}\n')
    (folder / "no.parquet").write_text("not parquet")
    (folder / "nothing").mkdir()
    (folder / "experts").mkdir()
    (folder / "experts" / "experts.toml").touch()
    (folder / "questions.jsonl").write_text('{"what": "no layout that is known"}\n')
    (folder / "no_tokenizer.json").write_text("{}")
    _tokenizer(folder / "tokenizer.json")

    run(tiny(text, workers=2), folder / "done")
    config = tiny(text, "run.checkpoint_every=4", "run.keep_checkpoints=1", workers=2)
    run(config, folder / "stopped")
    for name in ("summary.json", "model.safetensors"):
        (folder / "stopped" / name).unlink()
    shard = Path("checkpoints", "step-4", "worker-1.safetensors")
    for name in ("truncated", "corrupt", "garbled", "other_model", "other_method", "bad_config", "no_config", "busy"):
        shutil.copytree(folder / "stopped", folder / name)
    whole = (folder / "stopped" / shard).read_bytes()
    (folder / "truncated" / shard).write_bytes(whole[:-10])
    (folder / "corrupt" / shard).write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    (folder / "garbled" / shard).write_bytes(b"?" * len(whole))
    text_of = (folder / "stopped" / "config.toml").read_text()
    (folder / "other_model" / "config.toml").write_text(text_of.replace("layers = 1", "layers = 2"))
    (folder / "other_method" / "config.toml").write_text(text_of.replace("outer_lr = 0.7", "outer_lr = 0.6"))
    (folder / "bad_config" / "config.toml").write_text("[run\n")
    (folder / "no_config" / "config.toml").unlink()
    shutil.copytree(folder / "done", folder / "bad_model")
    (folder / "bad_model" / "model.safetensors").write_bytes(b"no safetensors at all")
    shutil.copytree(folder / "done", folder / "wrong_model")
    wider = (folder / "done" / "config.toml").read_text().replace("d_model = 16", "d_model = 32")
    (folder / "wrong_model" / "config.toml").write_text(wider)
    return folder


def _tokenizer(path: Path) -> None:
    """Three hundred words: more ids than there are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(300)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


@pytest.fixture
def answer(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Answer:
    """answer(*arguments): (exit code, stderr) of the command in the user's folder."""
    command = in_process(folder, monkeypatch, capfd)

    def ask(*arguments: str) -> tuple[int, str]:
        code, _, error = command(*arguments)
        return code, error

    return ask


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and when it was written, every folder; `runs` may be left, empty."""
    found = {}
    for place, folders, files in os.walk(folder):  # twice a case, so not by pathlib
        folders[:] = [name for name in folders if name != "__pycache__"]
        found |= {f"{place}/{name}": (0, 0) for name in folders}
        for name in files:
            told = os.stat(f"{place}/{name}")
            found[f"{place}/{name}"] = told.st_size, told.st_mtime_ns
    found.pop(f"{folder}/runs", None)
    return found


def is_one_line(error: str) -> bool:
    return error.startswith("isles: ") and error.endswith("\n") and error.count("\n") == 1 and len(error) > 12


def last_line(error: str) -> str:
    """The error behind the notes and the progress of a run."""
    lines = error.splitlines(keepends=True)
    assert all(line.startswith(("note: ", "step ", "resuming ", "device: ")) for line in lines[:-1]), error
    return lines[-1]


def train(*words: str) -> list[str]:
    """`isles train` of a tiny run on text.txt, with these settings in addition."""
    return [*TRAIN, *(part for word in words for part in (("--set", word) if "=" in word else (word,)))]


NODES = ["--rendezvous", "localhost:29400", "--nodes"]

# (arguments, words of the answer)
MISTAKES: list[tuple[list[str], list[str]]] = [
    (["bogus"], ["no such command 'bogus'"]),
    (["--bogus"], ["--bogus"]),
    # isles train: the words
    (["train", "--metod", "diloco"], ["--metod"]),
    (["train", "--workers", "four"], ["--workers four", "or auto"]),
    (["train", "--workers"], ["--workers", "argument"]),
    (["train", "--workers", "0"], ["world.workers = 0", "choose 1 or more"]),
    (["train", "--workers", "-1"], ["--workers -1", "1 or more"]),
    (["train", "--steps", "0"], ["run.steps = 0", "choose 1 or more"]),
    (["train", "--steps", "-5"], ["run.steps = -5"]),
    (["train", "--steps", "1e3"], ["--steps", "integer"]),
    (["train", "one.toml", "two.toml"], ["two.toml"]),
    (train("run.start=nowhere"), ["run.start = 'nowhere'", "name a finished run"]),
    (train("run.start=nowhere", "--dry-run"), ["run.start = 'nowhere'", "name a finished run"]),
    *[
        (
            train(f"world.elastic.{key}={value}", *dry),
            [f"world.elastic.{key} = ", value, "acts where workers join a lighthouse"],
        )
        for key, value in (("lease", "9.0"), ("max_members", "8"), ("join_state", "anchors"))
        for dry in ((), ("--dry-run",))
    ],
    (train("run.start=done", "model.layers=2"), ["does not fit the model of [model], which run.start must be of"]),
    (["train", "--method", "nolocco"], ["unknown method 'nolocco'", "did you mean 'noloco'"]),
    (["train", "--method", "no_such_module:Class"], ["no_such_module"]),
    (["train", "--method", "json:loads"], ["json:loads", "ReplicaSync"]),
    (["train", "--set", "run.steps"], ["section.key=value"]),
    (["train", "--set", "run.stepz=5"], ["unknown key 'run.stepz'", "did you mean 'run.steps'"]),
    (["train", "--set", "run.device=cpu"], ["unknown key 'run.device'", "did you mean 'model.device'?"]),
    (["token", "text.txt"], ["text.txt: is there and holds no token"]),
    (["train", "--set", "ruin.steps=5"], ["unknown section 'ruin'", "did you mean 'run'"]),
    (["train", "--set", "replicas.sync_evry=5"], ["did you mean 'replicas.sync_every'"]),
    (train("--method", "custom", "replicas.landing=carry"), ["replicas.landing carry", "choose outer_delay = 1"]),
    (train("--method", "custom", "replicas.group_size=2"), ["replicas.group_size = 2 has nothing to act on"]),
    (train("--method", "eager", "replicas.codec=powersgd:2", "replicas.sync_every=2"), ["codec powersgd x reading"]),
    (train("--method", "noloco", "replicas.codec=powersgd:2"), ["mixing groups", 'mixing = "all"']),
    (train("--method", "ddp", "replicas.codec=powersgd:0"), ["choose a rank of at least 1"]),
    (
        ["train", "--method", "ddp", "--set", "replicas.gamma=1"],
        ["replicas.gamma is a setting of noloco, streaming-noloco, custom, not of ddp"],
    ),
    (["train", "--set", "run.steps=many"], ["run.steps = 'many'", "integer"]),
    (["train", "--set", "run.loggers=tensorboard"], ["run.loggers = 'tensorboard'", "in brackets"]),
    (["train", "--set", 'run.loggers=["tensorbord"]'], ["run.loggers", "did you mean 'tensorboard'"]),
    (["train", "--set", 'run.loggers=["wandb", "wandb"]'], ["run.loggers", "once"]),
    (["train", "--set", "replicas.codec=zip"], ["unknown replicas.codec 'zip'"]),
    (["train", "--set", "replicas.anchor_codec=int4"], ["replicas.anchor_codec 'int4'", "int8"]),
    (["train", "--set", "replicas.outer_momentum=1"], ["replicas.outer_momentum = 1", "choose"]),
    (["train", "--set", "replicas.group_size=1"], ["replicas.group_size = 1", "choose 2 or more"]),
    (["train", "--set", "model.size=70B"], ["model.size = '70B'", "0.12M"]),
    (["train", "--set", "model.heads=3"], ["model.heads = 3"]),
    (["train", "--set", "model.autocast=fp16"], ['model.autocast = "fp16"', "GPU"]),
    (["train", "--set", "inner.lr=nan"], ["inner.lr = nan", "6e-4"]),
    (["train", "--set", "inner.betas=[1, 1]"], ["inner.betas"]),
    (["train", "--set", "data.batch_size=0"], ["data.batch_size = 0"]),
    (["train", "--set", "data.validation_fraction=1"], ["data.validation_fraction = 1"]),
    (["train", "--set", "world.virtual.links=dsl"], ["world.virtual.links 'dsl'", "home-fibre"]),
    (["train", "--set", "world.backend=mpi"], ["world.backend = 'mpi'", "virtual"]),
    (["train", "--set", "run.seed=-1"], ["run.seed = -1"]),
    # isles train, doctor: several machines
    (["train", "--resume", "auto"], ["--resume auto", "--out"]),
    (["train", "--resume", "stopped"], ["--resume stopped", "isles resume stopped"]),
    (train(*NODES, "2", "--resume", "auto", "--out", "x"), ["--resume auto", "--nodes has a directory a machine"]),
    (train("--resume", "auto", "--out", "stopped"), ["--out stopped: holds another run", "there", "here"]),
    (["train", "--log", "xml"], ["--log xml", "text or json"]),
    (["train", "--set", "run.max_hours=-1"], ["run.max_hours = -1", "0 (no limit)"]),
    (["launch", "slurm", "nosuch.toml", "--nodes", "2"], ["nosuch.toml: cannot be read"]),
    (["launch", "slurm", "empty.toml", "--nodes", "3"], ["world.workers = 4", "--workers-per-node"]),
    (["launch", "slurm", "empty.toml"], ["--nodes"]),
    (["train", "--nodes", "0"], ["--nodes 0", "choose 1 or more"]),
    (["train", "--nodes", "2"], ["--nodes 2 needs --rendezvous HOST:PORT"]),
    (["train", "--node", "1"], ["--node 1", "--nodes 1"]),
    (["train", "--nodes", "2", "--node", "2", "--rendezvous", "localhost:29400"], ["--node 2", "0 to 1"]),
    (["train", "--rendezvous", "localhost:29400"], ["--rendezvous localhost:29400 needs --nodes"]),
    (["train", "--nodes", "2", "--rendezvous", "localhost"], ["--rendezvous localhost: write HOST:PORT"]),
    (train(*NODES, "2"), ["--nodes 2", 'world.backend = "virtual" runs on one machine']),
    (train(*NODES, "9", "world.backend=distributed"), ["--nodes 9", "world.workers = 2", "raise it"]),
    (train("world.backend=distributed", "--nodes", "2", "--rendezvous", "192.0.2.1:29400"), ["no address of this"]),
    (["train", "--set", "world.join_deadline=0"], ["world.join_deadline = 0", "choose a positive"]),
    (["doctor", "--peer", "somewhere"], ["--peer somewhere: write HOST:PORT"]),
    # isles train: files
    (["train", "nosuch.toml"], ["nosuch.toml: cannot be read", "name a TOML file"]),
    (["train", "."], [".: is no CONFIG.toml", "--data ."]),
    (["train", "bad.toml"], ["bad.toml: not valid TOML"]),
    (["train", "binary.toml"], ["binary.toml: not valid TOML"]),
    (["train", "--set", "data.path=~nobody-here/text"], ["~NAME", "write the whole path"]),
    (["train", "--set", "model.hf=~nobody-here/model"], ["~NAME", "write the whole path"]),
    (["train", "outside.toml"], ["steps stands outside a section", "[run]"]),
    (train("--out", "done"), ["--out done: holds a run already (config.toml)", "name another directory"]),
    (train("--out", "text.txt"), ["--out text.txt: cannot be written to", "name another directory"]),
    (
        train("world.backend=distributed", "--workers", "100000"),
        ["world.workers = 100000: more than 8 a core", "virtual"],
    ),
    (train("--out", "/proc/isles"), ["--out /proc/isles: cannot be written to"]),
    (train("--out", "busy"), ["busy: in use by another run", "wait for its end or stop it"]),
    # isles train: what only a worker finds out
    (train("data.path=nosuch"), ["data.path = 'nosuch' does not exist", "give a file or a folder"]),
    (train("data.path=nothing"), ["data.path = 'nothing' is a folder without a readable file"]),
    (train("data.path=empty.txt"), ["data.path", "empty.txt", "give files with text"]),
    (train("data.path=short.txt"), ["data.path", "give more text"]),
    (train("data.path=binary.dat"), ["data.path", "binary.dat", "text"]),
    (train("data.path=bad.jsonl"), ["bad.jsonl", "line 2"]),
    (train("data.path=other.jsonl"), ["other.jsonl", "data.text_key"]),
    (
        train("data.path=chat.jsonl", "data.tokenizer=ids", "data.vocab=9"),
        ["chat.jsonl line 1: labels must have, for each of 3 ids, the id if it is learned, else -100; correct the row"],
    ),
    (train("data.path=no.parquet"), ["no.parquet"]),
    (train("data.batch_size=100000"), ["data.batch_size = 100000"]),
    (train("data.batch_mode=global", "data.batch_size=3"), ["data.batch_size = 3", "does not divide by 2", "use"]),
    (train("data.tokenizer=nosuch.json"), ["data.tokenizer", "nosuch.json"]),
    (train("data.tokenizer=no_tokenizer.json"), ["data.tokenizer", "no_tokenizer.json"]),
    (train("data.tokenizer=tokenizer.json"), ["model.vocab = 256", "set model.vocab = 300"]),
    (train("replicas.sync_every=7", "--steps", "6"), ["replicas.sync_every", "choose sync_every <= 6"]),
    (train("replicas.group_size=3"), ["replicas.group_size = 3", "choose group_size <= 2"]),
    (train("data.split=by_file"), ["data.split"]),
    # isles compare
    (["compare", "--methods", "none,dilco"], ["did you mean 'diloco'"]),
    (["compare", "--methods", "ddp,ddp"], ["--methods ddp,ddp", "once"]),
    (["compare", "--methods", ","], ["--methods"]),
    (["compare", "--methods", "ddp", "diloco", "noloco"], ["diloco noloco: no", "--methods ddp,diloco,noloco"]),
    (["compare", "--seeds", "0,x"], ["--seeds", "'x' is no seed"]),
    (["compare", "--seeds", "-1"], ["--seeds", "'-1'"]),
    (["compare", "--out", "done"], ["--out done: is not empty", "name another directory"]),
    (["compare", "--workers", "0"], ["world.workers = 0"]),
    (["compare", "nosuch.toml"], ["nosuch.toml"]),
    # isles resume
    (["resume"], ["Missing argument"]),
    (["resume", "nosuch"], ["nosuch"]),
    (["resume", "text.txt"], ["text.txt"]),
    (["resume", "done"], ["done: this run is complete"]),
    (["resume", "stopped", "--steps", "4"], ["--steps 4: the checkpoint is of step 4", "choose more"]),
    (["resume", "done", "--steps", "12"], ["done: no checkpoint of this run", "run.start=done"]),
    (["resume", "experts"], ["experts: holds experts", "isles experts"]),
    (["resume", "nothing"], ["nothing: no complete checkpoint", "run.checkpoint_every"]),
    (["resume", "truncated"], ["truncated: no complete checkpoint"]),
    (["resume", "corrupt"], ["corrupt", "worker-1.safetensors", "damaged", "remove"]),
    (["resume", "garbled"], ["garbled", "worker-1.safetensors", "damaged", "remove"]),
    (["resume", "other_model"], ["another model", "[model]"]),
    (["resume", "other_method"], ["outer_lr = 0.6", "saved with 0.7", "set it back"]),
    (["resume", "bad_config"], ["config.toml: not valid TOML"]),
    (["resume", "no_config"], ["config.toml: cannot be read"]),
    (["resume", "stopped", "--device", "cuda"], ['"cuda"', "no GPU", "--device"]),
    (["resume", "stopped", "--device", "cuda:"], ["--device = 'cuda:'", "auto, cpu, cuda, cuda:N"]),
    (["resume", "busy"], ["busy: in use by another run"]),
    # isles eval, generate, export: a finished run is needed
    (["eval", "nosuch"], ["nosuch: no model.safetensors", "finished run"]),
    (["eval", "stopped"], ["stopped: no model.safetensors"]),
    (["eval", "bad_model"], ["bad_model", "model.safetensors", "damaged"]),
    (["eval", "wrong_model"], ["wrong_model", "model.safetensors", "config.toml"]),
    (["eval", "done", "--data", "nosuch"], ["data.path = 'nosuch'"]),
    (["eval", "done", "--questions", "nosuch.jsonl"], ["nosuch.jsonl"]),
    (["eval", "done", "--questions", "questions.jsonl"], ["questions.jsonl"]),
    (["eval", "done", "--questions", "binary.dat"], ["binary.dat"]),
    (["eval", "done", "--device", "cuda"], ['"cuda"', "no GPU", "--device"]),
    (["export", "done", "--device", "cuda:1"], ['"cuda:1"', "no GPU", "--device"]),
    (["generate", "done", "--prompt", "x", "--device", "cuda:0"], ['"cuda:0"', "no GPU", "--device"]),
    (["generate", "done", "--prompt", "x", "--device", "gpu"], ["--device = 'gpu'", "auto, cpu, cuda, cuda:N"]),
    (["generate", "done"], ["--prompt"]),
    (["generate", "nosuch", "--prompt", "x"], ["nosuch: no model.safetensors"]),
    (["generate", "done", "--prompt", ""], ["prompt"]),
    (["generate", "done", "--prompt", "x", "--tokens", "0"], ["--tokens", "1"]),
    (["generate", "done", "--prompt", "x", "--temperature", "-1"], ["--temperature", "0"]),
    (["generate", "done", "--prompt", "x", "--top-k", "-1"], ["--top-k"]),
    (["export", "nosuch"], ["nosuch: no model.safetensors"]),
    (["export", "done", "--format", "onnx"], ["--format 'onnx'", "hf, safetensors"]),
    (["export", "done", "--out", "text.txt"], ["--out text.txt: is a file", "name a folder"]),
    # isles report, config, methods
    (["report"], ["Missing argument"]),
    (["report", "nosuch"], ["no run directory at nosuch", "--out"]),
    (["report", "."], [". is not a run directory"]),
    (["report", "text.txt"], ["text.txt is a file"]),
    (["config", "--method", "nolocco"], ["did you mean 'noloco'"]),
    (["config", "extra"], ["extra"]),
    (["methods", "extra"], ["extra"]),
]


@pytest.fixture(scope="module")
def busy(folder: Path) -> Iterator[None]:
    """A run goes on in `busy`."""
    with RunLock(folder / "busy"):
        yield


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("arguments", "words"), MISTAKES, ids=[" ".join(a).replace(" ".join(TRAIN), "train TINY") for a, _ in MISTAKES]
)
def test_a_mistake_is_one_line_and_two(answer: Answer, folder: Path, arguments: list[str], words: list[str]) -> None:
    before = contents(folder)
    code, error = answer(*arguments)
    assert code == 2, error
    line = last_line(error)
    assert is_one_line(line), error
    assert all(word in line for word in words), line
    assert contents(folder) == before


# (settings, first words of a note)
WARNINGS = [
    (["replicas.gamma=1.9"], "gamma = 1.9"),
    (["inner.warmup_steps=50"], "inner.warmup_steps = 50 is more than the run's 4 steps"),
    (["data.validation_fraction=0"], "data.validation_fraction = 0"),
    (["replicas.outer_momentum=0.9", "replicas.gamma=0.1"], "outer_momentum = 0.9 wants 200 rounds or more"),
]


@pytest.mark.parametrize(("settings", "words"), WARNINGS, ids=[words for _, words in WARNINGS])
def test_a_doubtful_setting_is_a_note_and_the_run_goes_on(
    answer: Answer, folder: Path, settings: list[str], words: str
) -> None:
    code, error = answer(*train(*settings, "replicas.sync_every=2", "--steps", "4", "--out", "doubtful"))
    notes = [line for line in error.splitlines() if line.startswith("note: ")]
    assert code == 0 and any(words in note for note in notes), error
    shutil.rmtree(folder / "doubtful")


def test_the_first_line_says_what_trains_by_which_defaults(answer: Answer, folder: Path) -> None:
    over = "empty.toml over the defaults of isles config --method noloco"
    for words, settings in ([], "the built-in small run"), (["empty.toml"], over):
        code, error = answer(*TRAIN, *words, "--set", "replicas.sync_every=2", "--steps", "2", "--out", "placed")
        assert code == 0 and error.startswith(f"device: 2 workers on cpu; settings: {settings}\n"), error
        shutil.rmtree(folder / "placed")


def test_resume_may_change_what_trains(answer: Answer, folder: Path) -> None:
    shutil.copytree(folder / "stopped", folder / "moved")
    saved = (folder / "moved" / "config.toml").read_text()
    (folder / "moved" / "config.toml").write_text(saved.replace('device = "auto"', 'device = "cuda"'))
    assert answer("resume", "moved")[0] == 2  # no GPU is here
    code, error = answer("resume", "moved", "--device", "cpu")
    assert code == 0 and error.startswith("resuming moved after step 4\ndevice: 2 workers on cpu\n"), error
    shutil.rmtree(folder / "moved")


def test_what_a_dry_run_refuses_starts_nothing(answer: Answer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On real processes, by `train` and by `compare`, where the last of the methods is wrong."""
    from isles.running import run as running

    monkeypatch.setattr(running, "launch", lambda *given, **more: pytest.fail("it was started"))
    never = ["--set", "world.backend=distributed", "--set", "replicas.sync_every=9"]
    for verb in (TRAIN, ["compare", *TRAIN[1:], "--methods", "ddp,diloco"], ["compare", *TRAIN[1:]]):
        code, said = answer(*verb, *never, "--steps", "8", "--out", "never")
        assert code == 2 and "choose sync_every <= 8" in said and said.count("\n") <= 1, said
        assert not (folder / "never").exists()


def test_a_warning_is_a_line_without_a_path(answer: Answer, folder: Path) -> None:
    mixed = folder / "mixed"
    mixed.mkdir()
    shutil.copy(folder / "text.txt", mixed)
    shutil.copy(folder / "binary.dat", mixed)
    assert answer("eval", "done", "--data", "mixed") == (
        0,
        "note: data.path: 1 of 2 files hold no text and were left out, among them binary.dat\n",
    )


def test_a_loss_that_is_no_number_is_one_line_and_one(answer: Answer, folder: Path) -> None:
    """What was written until then stays; the line names worker, step and mend."""
    code, error = answer(*train("--method", POISONED, "run.checkpoint_every=2", "--steps", "6", "--out", "nan"))
    assert code == 1
    assert last_line(error).startswith("isles: worker 1 failed: its loss is nan at inner step 4: lower inner.lr")
    assert (folder / "nan" / "checkpoints" / "step-2" / "manifest.json").exists()
    shutil.rmtree(folder / "nan")


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 300 kB in the user's folder. Root only."""
    place = folder / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        place.rmdir()
        pytest.skip("no right to mount a small file system: what happens on a full disk is not tested")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
        place.rmdir()


def test_a_disk_that_fills_is_one_line_and_one(answer: Answer, small_disk: Path) -> None:
    """Whoever of launcher and workers meets it first; the line says how to go on."""
    several = ["run.log_every=1", "run.checkpoint_every=3", "run.keep_checkpoints=1", "--steps", "3000"]
    code, error = answer(*train(*several, "--method", "none", "--out", "disk/run"))
    assert code == 1
    line = last_line(error)
    assert is_one_line(line)
    assert "disk/run: the disk is full (No space left on device); make room and go on with: isles resume" in line
    with suppress(OSError), open("disk/rest", "wb") as rest:
        while True:
            rest.write(bytes(4096))
    code, error = answer(*train("--out", "disk/another", "--steps", "4", "--method", "none"))
    # Before the run starts, in it, or after it, as the report is written: as far as the room that is left goes.
    assert code in (1, 2) and "the disk is full (No space left on device)" in last_line(error), error
    assert "disk/another" in last_line(error)


def test_a_read_only_place_is_one_line_and_two(answer: Answer, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    code, error = answer(*train("--out", "disk/run"))
    assert code == 2 and "--out disk/run: cannot be written to (Read-only file system)" in last_line(error)
    code, error = answer("report", "done")
    assert code == 0, error


def test_an_empty_directory_is_no_run(answer: Answer, folder: Path) -> None:
    """A run that was refused before leaves nothing that keeps one from naming the same directory again."""
    assert answer(*train("data.path=nosuch", "--out", "again"))[0] == 2
    code, error = answer(*train("--steps", "2", "--method", "none", "--out", "again"))
    assert code == 0, error
    shutil.rmtree(folder / "again")


def helps(command: Any, parent: Any = None) -> Iterator[tuple[str, list[str]]]:
    """Of a command and of all below it: its words, and the options that show its help."""
    context = command.make_context(command.name or "isles", [], parent, resilient_parsing=True)
    yield context.command_path, context.help_option_names
    for below in getattr(command, "commands", {}).values():
        yield from helps(below, context)


def commands(command: Any) -> Iterator[Any]:
    """It and all below it."""
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from commands(below)


def test_every_command_takes_h(answer: Answer) -> None:
    found = dict(helps(cli._command()))
    assert {"isles", "isles train", "isles plan memory", "isles swarm peer"} <= found.keys()
    assert all(options == ["-h", "--help"] for options in found.values())
    assert answer("-h") == answer("plan", "memory", "-h") == (0, "")


def test_help_shows_its_brackets() -> None:
    """[model] in a help is a section, which rich would take for a style and leave out."""
    found = [option.help for command in commands(cli._command()) for option in command.params if option.help]
    assert len(found) > 100 and any("[model]" in Text.from_markup(text).plain for text in found)
    assert [text for text in found if Text.from_markup(text).plain != text.replace("\\[", "[")] == []


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._command()(["--version"], "isles", standalone_mode=False) == 0
    assert capsys.readouterr().out == f"isles {__version__}\n"


def test_help_answers_with_zero(answer: Answer) -> None:
    for arguments in ([], ["--help"], ["train", "--help"], ["report", "--help"], ["plan", "--help"], ["experts"]):
        assert answer(*arguments) == (0, "")


def test_as_a_process_of_its_own(tmp_path: Path) -> None:
    """The installed command itself: exit codes and streams as above."""
    code, out, error = isles("train", "--set", "run.stepz=5", folder=tmp_path)
    assert (code, out) == (2, "") and is_one_line(error)
    code, out, error = isles(folder=tmp_path)
    assert (code, error) == (0, "") and "train" in out and "report" in out


def test_there_are_many() -> None:
    assert len(MISTAKES) >= 60
    assert len({tuple(arguments) for arguments, _ in MISTAKES}) == len(MISTAKES)
