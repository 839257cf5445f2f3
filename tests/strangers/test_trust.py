"""A run directory that comes from elsewhere is data: what it names is imported only for who made it, or trusts it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isles.base.durable import home
from isles.base.parts import CODE
from isles.cli import app
from isles.training.config.reading import gather, read_config
from isles.training.config.trust import TYPED, names_in
from isles.training.records.saved_run import load_saved
from isles.training.records.writer import write_config

EVIL = """
[model]
factory = "os:system"
context = 16
[model.options]
command = "touch {flag}"
[world]
backend = "virtual"
"""


@pytest.fixture
def downloaded(tmp_path: Path) -> tuple[Path, Path]:
    """A run that somebody else made, and the file that appears if its word is taken."""
    run, flag = tmp_path / "downloaded", tmp_path / "owned"
    (run / "checkpoints" / "step-2").mkdir(parents=True)
    facts = '{"step": 2, "workers": 4, "ranks": [0, 1, 2, 3], "files": {}}'
    (run / "checkpoints" / "step-2" / "manifest.json").write_text(facts)
    (run / "model.safetensors").write_bytes(b"")
    (run / "config.toml").write_text(EVIL.format(flag=flag))
    return run, flag


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "RUN"], ["generate", "RUN", "--prompt", "x"], ["export", "RUN"], ["resume", "RUN"],
        ["resume", "RUN", "--workers", "2"], ["train", "RUN/config.toml", "--dry-run"],
        ["train", "RUN/config.toml"], ["experts", "forest", "RUN", "--out", "RUN/forest.json"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_downloaded_run_is_no_program(downloaded: tuple[Path, Path], command: list[str]) -> None:
    """One line that shows what would be imported; nothing is."""
    run, flag = downloaded
    done = CliRunner().invoke(app, [word.replace("RUN", str(run)) for word in command])
    assert isinstance(done.exception, ValueError) and not flag.exists()
    said = str(done.exception)
    assert "model.factory = 'os:system', model.options = {'command':" in said and "add --trust" in said
    assert said.isprintable()


@pytest.mark.parametrize("record", ["{}", "[" * 5000, '{"names": {"model.factory": "os:system"}, "mac": "0"}', "\xff"])
def test_a_record_that_was_not_written_here_is_none(downloaded: tuple[Path, Path], record: str) -> None:
    run, _ = downloaded
    (run / TYPED).write_text(record, encoding="latin-1")
    with pytest.raises(ValueError, match="was not made here"):
        load_saved(run)


def test_experts_take_the_word_of_all_their_runs(downloaded: tuple[Path, Path]) -> None:
    run, flag = downloaded
    CliRunner().invoke(app, ["experts", "forest", str(run), "--out", str(run / "forest.json"), "--trust"])
    assert flag.exists() and gather(str(run / "config.toml"), {}, [])["model"]["factory"] == "os:system"


def test_trust_is_given_once(downloaded: tuple[Path, Path]) -> None:
    """And is noted, for these names and arguments alone."""
    run, _ = downloaded
    config = run / "config.toml"
    assert gather(str(config), {}, [], trust=True)["model"]["factory"] == "os:system"
    assert gather(str(config), {}, [])["model"]["factory"] == "os:system"
    config.write_text(config.read_text().replace("touch", "rm"))
    with pytest.raises(ValueError, match="was not made here"):
        gather(str(config), {}, [])


def test_what_was_typed_here_is_imported(tmp_path: Path) -> None:
    """A run of one's own, also after it was moved; not by who has another home, nor after somebody changed the name."""
    mine = tmp_path / "mine.toml"
    mine.write_text('[model]\nfactory = "tests.training.own_models:build"\ncontext = 16\n[replicas]\nmethod = "none"\n')
    config = read_config(str(mine), {}, [])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(b"")
    write_config(config, tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    path = tmp_path / "moved" / "config.toml"
    assert read_config(str(path), {}, []) == config
    assert (home() / "key").stat().st_mode & 0o077 == 0
    record = json.loads((tmp_path / "moved" / TYPED).read_text())
    assert record["names"] == {"model.factory": "tests.training.own_models:build"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISLES_HOME", str(tmp_path / "other"))
        with pytest.raises(ValueError, match=r"model.factory = 'tests.training.own_models:build'.*was not made here"):
            read_config(str(path), {}, [])
    path.write_text(path.read_text().replace("own_models:build", "own_models:wide"))
    with pytest.raises(ValueError, match="own_models:wide"):
        read_config(str(path), {}, [])


def test_a_config_that_a_person_names_is_that_persons_word(downloaded: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = downloaded
    shutil.copy(run / "config.toml", tmp_path / "mine.toml")
    assert gather(str(tmp_path / "mine.toml"), {}, [])["model"]["factory"] == "os:system"


SETTINGS = [
    (f"{row.section}.{row.key}", f"{row.section}.{row.options}" if row.options else "") for row in CODE.values()
]


def test_every_setting_that_may_name_code_is_in_this_list() -> None:
    replicas = [f"replicas.{axis}" for axis in ("cadence", "codec", "landing", "mixing", "reading", "rule")]
    others = ["inner.optimizer", "model.factory", "pipeline.boundary.kind", "pipeline.routing", "replicas.method"]
    assert sorted(key for key, _ in SETTINGS) == sorted(["data.source", *others, *replicas])


@pytest.mark.parametrize(("key", "options"), SETTINGS)
def test_no_setting_of_a_downloaded_run_is_imported(
    key: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not without --trust, which notes the name and what it would be called with."""
    run, flag = tmp_path / "downloaded", tmp_path / "owned"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    (tmp_path / f"evil_{key.replace('.', '_')}.py").write_text(f"open({str(flag)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = f"evil_{key.replace('.', '_')}:Part"
    lines = ['replicas.method = "custom"'] if key != "replicas.method" else []
    given = "there" if options == "data.path" else {"depth": 3}
    written = '"there"' if options == "data.path" else "{depth = 3}"
    lines += [f'{key} = "{target}"', *([f"{options} = {written}"] if options else [])]
    text = "\n".join([*lines, "model.context = 16", "pipeline.stages = 2", 'world.backend = "virtual"', ""])
    (run / "config.toml").write_text(text)
    with pytest.raises(ValueError, match="was not made here") as refused:
        read_config(str(run / "config.toml"), {}, [])
    assert f"{key} = {target!r}" in str(refused.value) and not flag.exists()
    assert not options or f"{options} = {given!r}" in str(refused.value)
    named = {key: target} | ({options: given} if options else {})
    gather(str(run / "config.toml"), {}, [], trust=True)
    assert json.loads((run / TYPED).read_text())["names"] == named


@pytest.mark.parametrize("text", ["topk:64", "int8:stochastic", "topk:most", "powersgd:4+int4", "dct_topk:8"])
def test_a_codec_by_its_own_name_is_no_code(text: str) -> None:
    """Nor is a boundary's."""
    assert names_in({"replicas": {"codec": text}, "pipeline": {"boundary": {"kind": "dct:half"}}}) == {}
    assert names_in({"replicas": {"codec": "int8.more:stochastic"}}) == {"replicas.codec": "int8.more:stochastic"}
