"""`isles experts` as a person uses it: what it prints, and one line with exit code 2 for every mistake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from isles.experts.system import RESULTS
from tests.cli.test_bad_input import Answer, answer, contents, is_one_line  # noqa: F401  answer is a fixture
from tests.experts.small import HDEE, SMALLTALK, made, write_domains

WORDS = ["hdee.variants=['m-ho-i-ho']"]


def sets(*words: str) -> list[str]:
    return [part for word in words for part in ("--set", word)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Domains, ensembles whole and spoilt."""
    folder = tmp_path_factory.mktemp("user")
    config = write_domains(folder)
    made("hdee", config, folder / "half", *WORDS, "hdee.steps=[1, 2, 3]", "hdee.seed_steps=1")
    shutil.rmtree(folder / "half" / "seed-0" / "medium-f24-t2-r1")
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too short for anything")
    for name in ("empty", "short"):
        other = config.read_text().replace("easy.txt", f"{name}.txt")
        (folder / f"{name}.toml").write_text(other)
    (folder / "no_easy.toml").write_text(config.read_text().replace('"easy"', '"medium"'))
    (folder / "bad.json").write_text("{}")
    runs = folder / "half" / "seed-0"
    _forest(folder / "missing.json", [runs / "easy-f24-t2-r1", runs / "gone"])
    shutil.copytree(runs / "easy-f24-t2-r1", folder / "words")
    _tokenizer(folder / "tokenizer.json")
    saved = (folder / "words" / "config.toml").read_text()
    (folder / "words" / "config.toml").write_text(saved.replace('"bytes"', f'"{folder / "tokenizer.json"}"'))
    _forest(folder / "tongues.json", [runs / "easy-f24-t2-r1", folder / "words"])
    _forest(folder / "one.json", [runs / "easy-f24-t2-r1"])
    return folder


def _forest(path: Path, runs: list[Path]) -> None:
    experts = [{"name": run.name, "run": str(run), "domains": []} for run in runs]
    path.write_text(json.dumps({"format": 1, "system": "hdee", "prefix": 0, "experts": experts, "routers": []}))


def _tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(256)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


NEW = ["domains.toml", "--out", "new"]
MISTAKES: list[tuple[list[str], list[str]]] = [
    (["hdee", *NEW, *sets(*HDEE, "hdee.steps=[12, 24, 60]")], ["m-ho-i-he", "budget does not balance", "add up to 3"]),
    (["hdee", "no_easy.toml", "--out", "new", *sets(*HDEE)], ['no domain of difficulty "easy"', "[domains.NAME]"]),
    (["hdee", "domains.toml", "--quick"], ["leave out domains.toml"]),
    (["hdee", *NEW, *sets(*HDEE, "data.path=x")], ["data.path", "[domains.NAME]"]),
    (["hdee", *NEW, *sets(*HDEE, "data.validation_path=x")], ["data.validation_path", "take it out"]),
    (["hdee", *NEW, *sets(*HDEE, "hdee.stepps=[1, 2, 3]")], ["unknown key 'hdee.stepps'", "did you mean 'hdee.steps'"]),
    (["hdee", *NEW, *sets(*HDEE, "run.seed=3")], ["run.seed", "hdee.seeds says which"]),
    (["hdee", *NEW, *sets(*HDEE, "hdee.prefix=17")], ["hdee.prefix = 17", "model.context = 16"]),
    (["hdee", *NEW, *sets(*HDEE, "model.ffn=48")], ["model.ffn = 48", "hdee.ffn's second, 24"]),
    (["hdee", *NEW, *sets(*HDEE, "experts.steps=3")], ["unknown section 'experts'"]),
    (["hdee", *NEW, *sets("domains.easy=3")], ["[domains.easy]"]),
    (["hdee", *NEW, *sets("domains.easy.path=3")], ["domains.easy"]),
    (["hdee", "gone.toml"], ["gone.toml", "cannot be read"]),
    (["smalltalk", *NEW, *sets(*SMALLTALK, "smalltalk.experts=0")], ["smalltalk.experts = 0"]),
    (["smalltalk", *NEW, *sets(*SMALLTALK, "smalltalk.prefix=99")], ["prefix = 99", "model.context = 16"]),
    (["smalltalk", *NEW, *sets("model.factory=a:b", "model.context=16")], ["model.factory", "take it out"]),
    (["config", "hdeee"], ["unknown system 'hdeee'"]),
    (["plan", "hdeee"], ["unknown system 'hdeee'", "did you mean 'hdee'"]),
    (["plan", "hdee", *sets("hdee.ffn=[1, 192, 193]")], ["budget does not balance"]),
    (["eval", "nothing"], ["nothing", "--data"]),
    (["eval", "."], ["experts.toml"]),
    (["eval", "half"], ["1 runs are not done", "medium-f24-t2-r1"]),
    (["eval", "half", "--data", "easy.txt"], ["are for one forest", "forests"]),
    (["eval", "half", "--route", "growing"], ["are for one forest"]),
    (["eval", "one.json"], ["--data is missing"]),
    (["eval", "bad.json", "--data", "easy.txt"], ["bad.json", "no forest"]),
    (["eval", "missing.json", "--data", "easy.txt"], ["'gone' is missing", "model.safetensors", "copy"]),
    (["eval", "tongues.json", "--data", "easy.txt"], ["different tokenizers", "'words'"]),
    (["eval", "one.json", "--data", "easy.txt", "--prior", "best"], ["unknown prior 'best'"]),
    (["eval", "one.json", "--data", "easy.txt", "--top-experts", "2"], ["--top-experts 2: choose 1 to 1"]),
    (["eval", "one.json", "--data", "empty.txt"], ["holds no text"]),
    (["eval", "one.json", "--data", "short.txt"], ["(nearly) empty", "give more text"]),
    (["generate", "one.json", "--prompt", ""], ["the prompt is empty"]),
    (["generate", "gone.json", "--prompt", "x"], ["gone.json", "no forest"]),
    (["generate", "one.json", "--prompt", "x", "--route", "growing"], ["--route", "are for forests that route"]),
    (["generate", "one.json", "--prompt", "x", "--route", "twice"], ["unknown route 'twice'"]),
    (["generate", "one.json", "--prompt", "x", "--prior", "cached"], ["--prior cached needs --data"]),
    (["eval", "one.json", "--data", "easy.txt", "--prior", "0.5,0.5"], ["shares '0.5,0.5'", "give 1 numbers"]),
    (["average", "one.json", "--out", "new"], ["either --data", "or --shares"]),
    (["average", "one.json", "--out", "half/seed-0/seed-f24", "--shares", "1"], ["holds a model already"]),
    (["forest", "half", "--out", "new.json"], ["'half' is missing", "model.safetensors"]),
    (["forest", "half/seed-0/seed-f24", "--out", "one.json"], ["one.json: is there already"]),
    (["hdee", *NEW, *sets(*HDEE, "hdee.branch=average")], ["hdee.branch", "raise hdee.iterations"]),
    (["hdee", *NEW, *sets(*HDEE, "hdee.baselines=['half']")], ["hdee.baselines"]),
    (["smalltalk", *NEW, *sets(*SMALLTALK, "smalltalk.seeds=[1,1]")], ["seeds = [1, 1]", "once"]),
    (["smalltalk", *NEW, *sets(*SMALLTALK, "run.seed=1")], ["run.seed", "smalltalk.seeds says which"]),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[" ".join(words)[-60:] for words, _ in MISTAKES])
def test_a_mistake_is_one_line(
    words: list[str],
    expected: list[str],
    folder: Path,
    answer: Answer,  # noqa: F811
) -> None:
    before = contents(folder)
    code, error = answer("experts", *words)
    assert (code, is_one_line(error)) == (2, True), error
    assert all(word in error for word in expected), error
    assert contents(folder) == before


@pytest.mark.parametrize(("config", "match"), [("empty.toml", "domain 'easy': "), ("short.toml", "domain 'easy' is ")])
def test_an_empty_domain_is_found_before_anything_is_trained(
    config: str,
    match: str,
    folder: Path,
    tmp_path: Path,
    answer: Answer,  # noqa: F811
) -> None:
    code, error = answer("experts", "hdee", config, "--out", str(tmp_path / "new"), *sets(*HDEE))
    assert (code, is_one_line(error), match in error) == (2, True, True), error
    assert not list(tmp_path.rglob("metrics.jsonl"))
    assert not (tmp_path / "new").exists()  # nor does it belong to these settings


def test_a_warning_is_a_note(folder: Path, tmp_path: Path, answer: Answer) -> None:  # noqa: F811
    """Not a line of our source."""
    shutil.copy(folder / "easy.txt", tmp_path / "easy.txt")
    (tmp_path / "left.out").write_bytes(b"\x00\x01" * 50)
    code, error = answer("experts", "eval", "one.json", "--data", str(tmp_path))
    assert code == 0 and error.startswith("note: ") and "left.out" in error and "Warning" not in error, error


def test_a_directory_is_gone_on_with_job_by_job(
    folder: Path,
    tmp_path: Path,
    answer: Answer,  # noqa: F811
) -> None:
    shutil.copytree(folder / "half", tmp_path / "half")
    out = ["--out", str(tmp_path / "half")]
    words = ["experts", "hdee", "domains.toml", *sets(*HDEE, *WORDS, "hdee.steps=[1, 2, 3]", "hdee.seed_steps=1"), *out]
    code, error = answer(*words, "--job", "seed-0/bogus")
    assert code == 2 and "--jobs lists them" in error
    code, error = answer(*words, "--job", "seed-0/medium-f24-t2-r1")
    assert code == 0 and "note: device: 1 worker on cpu\n" in error, error
    assert (tmp_path / "half" / RESULTS).is_file()  # it was the last one
    code, error = answer("experts", "eval", str(tmp_path / "half"))
    assert code == 0, error
    assert (tmp_path / "half" / "report.html").is_file()
    runs = [str(path) for path in sorted((tmp_path / "half" / "seed-0").glob("*-r1"))]
    forest, average = str(tmp_path / "forest.json"), str(tmp_path / "average")
    code, error = answer("experts", "forest", *runs, "--out", forest)
    assert code == 0, error
    code, error = answer("experts", "average", forest, "--data", "medium.txt", "--out", average)
    assert code == 0, error
    code, error = answer("generate", average, "--prompt", "x", "--tokens", "2")
    assert code == 0, error
