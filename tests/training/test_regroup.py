"""A run goes on with another number of workers: from the means, in the same place, with nothing counted twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.cli.resume import resume
from isles.data import Loader, load_corpus
from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import prepare
from isles.training.records.shard import State
from tests.training.runs import (
    BATCH,
    COMPOSED,
    CONTEXT,
    DIVIDED,
    ON_VIRTUAL,
    TINY,
    Told,
    metrics,
    run,
    tiny,
    write_text,
)

STEPS, AT = 26, 20  # AT stands in the middle of a round of 3
LOSSES = {"delayed": 5.4, "eager": 4.8}  # nats, whose answers come a round late; chance is 5.5
CHANGES = [(2, 3), (4, 1), (3, 2)]
SHORT = ("run.steps=3", "run.checkpoint_every=2")  # for what is refused, whatever was learned
CORE = {"noloco"}  # all changes in `make test`, one of them for the rest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """trained(method, workers, settings...): the directory of a run that stopped after step AT, made once."""

    @cache
    def make(name: str, workers: int, *more: str) -> Path:
        own = [f"run.checkpoint_every={AT}", "run.log_every=1", *more]
        config = tiny(text, *own, method=name, workers=workers, steps=STEPS)
        return stop(config, tmp_path_factory.mktemp("trained") / f"{name}-{workers}")

    return make


@pytest.fixture
def stopped(trained: Any, tmp_path: Path) -> Any:
    """stopped(method, workers, settings...): a copy of such a directory."""

    def make(name: str, workers: int, *more: str) -> Path:
        path = trained(name, workers, *more)
        return Path(shutil.copytree(path, tmp_path / path.name))

    return make


def stop(config: Any, path: Path) -> Path:
    run(config, path)
    for name in ("summary.json", "model.safetensors"):
        (path / name).unlink()
    return path


def shards(path: Path, workers: int) -> list[State]:
    return [Checkpoints(path).read_shard(AT, worker) for worker in range(workers)]


def go_on(path: Path, workers: int) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """(summary, new lines of metrics, notes)"""
    ready, told = prepare(path, workers), Told()
    summary = launch(ready.config, path, told.lines.append, told.notices.append, resume=ready.step)
    return summary, told.lines, ready.notes


def mean_loss(lines: list[dict[str, Any]], first: int, last: int) -> float:
    found = [line["loss"] for line in lines if first <= line["step"] <= last]
    return sum(found) / len(found)


def all_changes() -> Iterator[Any]:
    """One change of every fourth method in turn; the others are long."""
    for number, name in enumerate(name for name in ON_VIRTUAL if name not in COMPOSED | DIVIDED):
        for change in CHANGES:
            chosen = name in CORE or (number % 4 == 0 and change == CHANGES[number % len(CHANGES)])
            yield pytest.param(name, *change, marks=() if chosen else pytest.mark.long)


@pytest.mark.parametrize(("name", "before", "after"), list(all_changes()))
def test_every_method_goes_on(stopped: Any, name: str, before: int, after: int) -> None:
    """The loss goes on from where it was, tokens and bytes are conserved, config.toml and the notes say so."""
    path = stopped(name, before)
    old = [line for line in metrics(path) if line["step"] == AT]
    earlier = mean_loss(metrics(path), AT - 4, AT)
    summary, lines, notes = go_on(path, after)

    assert {line["worker"] for line in lines} == set(range(after))
    assert min(line["step"] for line in lines) == AT + 1
    assert mean_loss(lines, AT + 1, AT + 2) < earlier + 0.1  # it falls by as much in that time; chance is 5.5
    assert summary["workers"] == after and summary["val_loss"] < LOSSES.get(name, 4.5)
    assert summary["tokens"] == (AT * before + (STEPS - AT) * after) * BATCH * CONTEXT
    first = [line for line in lines if line["step"] == AT + 1]
    for key in ("bytes_sent", "bytes_received", "compute_seconds", "tokens"):
        counted = sum(line[key] for line in old)
        new = sum(line[key] for line in first)
        assert counted <= new * (1 + 1e-12)
        assert new <= counted + {"tokens": after * BATCH * CONTEXT}.get(key, 10**6)
    assert min(line["clock_seconds"] for line in first) >= max(line["clock_seconds"] for line in old)
    assert read_config(str(path / "config.toml"), {}, []).world.workers == after
    assert f"{after} workers instead of {before} after step {AT}" in notes[0]
    means = "\n".join(note for note in notes if note.startswith("replaced"))
    assert ("weights" in means) == (name not in ("ddp", "dct-dp", "demo"))
    assert ("local momenta" in means) == (name == "demo")
    own_anchors = name in ("eager", "sparta") or (
        name == "noloco" and before > 2
    )  # two have always been each other's pair
    assert ("anchors" in means) == own_anchors


def test_it_starts_from_the_means(stopped: Any) -> None:
    """Worked out from the old shards: weights, Adam's moments, anchors, momenta; the anchors sent ahead are dropped."""
    path = stopped("noloco", 3)
    old = shards(path, 3)
    prepare(path, 2)
    for new in shards(path, 2):
        for name, tensor in new["model"].items():
            expected = torch.stack([shard["model"][name] for shard in old]).double().mean(0).float()
            assert torch.equal(tensor, expected)
        moments = [shard["optimizer"]["inner"]["state"][0]["exp_avg_sq"] for shard in old]
        own = new["optimizer"]["inner"]["state"][0]
        torch.testing.assert_close(own["exp_avg_sq"], torch.stack(moments).mean(0), rtol=1e-6, atol=0)
        assert float(own["step"]) == AT
        fragment = new["optimizer"]["outer"]["fragments"][0]
        for key in ("anchor", "momentum"):
            held = [shard["optimizer"]["outer"]["fragments"][0] for shard in old]
            each = [one["anchor"] if key == "anchor" else one["vectors"][key] for one in held]
            found = fragment["anchor"] if key == "anchor" else fragment["vectors"][key]
            torch.testing.assert_close(found, torch.stack(each).mean(0), rtol=1e-5, atol=1e-8)
        assert torch.equal(fragment["ahead"]["buffer"], fragment["anchor"])
        assert fragment["rounds"] == AT // 3


@pytest.mark.parametrize("name", ["delayed", "eager", "dilocox"])
def test_what_is_under_way_lands_with_the_new_workers(stopped: Any, name: str) -> None:
    """A round was sent at step 18 and lands at 21: its mean and the mean of the own shares are kept, so no round of
    progress is lost; where the mean is equal on all, to the bit.
    """
    path = stopped(name, 2)
    old = [shard["optimizer"]["outer"]["flights"] for shard in shards(path, 2)]
    notes = prepare(path, 3).notes
    for new in (shard["optimizer"]["outer"]["flights"] for shard in shards(path, 3)):
        assert [flight["lands"] for flight in new] == [flight["lands"] for flight in old[0]] == [21]
        payload, before = new[0]["payload"], [flights[0]["payload"] for flights in old]
        assert torch.equal(payload["buffer"], before[0]["buffer"]) and payload["participants"] == 2
        if name == "eager":
            torch.testing.assert_close(payload["own"], (before[0]["own"] + before[1]["own"]) / 2)
    assert ("exchanges in flight" in "\n".join(notes[2:])) == (name == "eager")


@pytest.mark.parametrize("name", ["ddp", "diloco"])
def test_what_is_equal_on_all_keeps_its_bits(stopped: Any, name: str) -> None:
    """A mean of three equal numbers may be rounded; the anchor's hash must go on holding."""
    path = stopped(name, 3)
    old = shards(path, 3)[0]
    prepare(path, 2)
    for new in shards(path, 2):
        if name == "ddp":
            assert all(torch.equal(new["model"][key], value) for key, value in old["model"].items())
            continue
        mine, before = (shard["optimizer"]["outer"]["fragments"][0] for shard in (new, old))
        assert torch.equal(mine["anchor"], before["anchor"]) and mine["digest"] == before["digest"]
        assert torch.equal(mine["vectors"]["momentum"], before["vectors"]["momentum"])


@pytest.mark.parametrize("mixing", ["groups", "all"])
def test_an_outer_rules_numbers_are_means_too(stopped: Any, mixing: str) -> None:
    """In random groups each worker learns its own rate; with one mean for all they are equal, and keep their bits."""
    settings = ("replicas.sync_every=3", f'replicas.mixing="{mixing}"')
    path = stopped("tests.replicas.own_rules:LearnedOuterAdam", 3, *settings)
    old = rates(path, 3)
    prepare(path, 2)
    if mixing == "groups":
        assert len(set(old)) == 3 and rates(path, 2) == [pytest.approx(sum(old) / 3, rel=1e-15)] * 2
    else:
        assert rates(path, 2) == old[:2] and len(set(old)) == 1


def rates(path: Path, workers: int) -> list[float]:
    fragments = [shard["optimizer"]["outer"]["fragments"][0] for shard in shards(path, workers)]
    return [float(fragment["scalars"]["rate"]) for fragment in fragments]


@pytest.mark.parametrize("workers", [2, 3])
def test_divided_models_are_refused(stopped: Any, workers: int) -> None:
    """Also where some workers hold more units than others, so that there is no mean at all. Nothing is changed."""
    path = stopped("ist", workers, *SHORT)
    before = [path_.read_bytes() for path_ in sorted(path.rglob("*")) if path_.is_file()]
    with pytest.raises(ValueError, match="a subnet of IST is as narrow as there are workers"):
        prepare(path, 5 - workers)
    assert [path_.read_bytes() for path_ in sorted(path.rglob("*")) if path_.is_file()] == before


@pytest.mark.parametrize("name", ["ddp", "noloco"])
def test_the_text_is_read_on(stopped: Any, text: Path, name: str) -> None:
    """The windows that 3 workers read after the change are those that follow what 2 had read: none again, none left
    out.
    """
    path = stopped(name, 2)
    before = shards(path, 2)[0]["loader"]
    prepare(path, 3)
    config = read_config(str(path / "config.toml"), {}, [])
    corpus = load_corpus(config.data)

    def windows(workers: int, state: dict[str, Any], steps: int) -> list[bytes]:
        loaders = [
            Loader(corpus, config.data, context=CONTEXT, worker=worker, workers=workers, seed=0)
            for worker in range(workers)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        batches = [batch for _ in range(steps) for batch in [next(loader) for loader in loaders]]
        return sorted(row.numpy().tobytes() for batch in batches for row in batch)

    after = shards(path, 3)
    assert before["consumed"] == AT * 2 * BATCH
    assert windows(3, after[2]["loader"], 2) == windows(2, before, 3)


def test_as_many_workers_is_the_exact_resume(stopped: Any, tmp_path: Path) -> None:
    """Naming the saved number changes no file; there and back again keeps the place."""
    path = stopped("diloco", 2)
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert prepare(path, 2).notes == [] and prepare(path, None, shared=True).notes == []
    with pytest.raises(ValueError, match=r"step \d+ has 2 workers' states: isles resume .* in one process first"):
        prepare(path, 5, shared=True)  # as each process of torchrun does
    assert files == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    prepare(path, 5)
    ready = prepare(path, 2)
    assert (ready.step, ready.config.world.workers) == (AT, 2)
    assert Checkpoints(path).manifest(AT)["regrouped_from"] == 5
    assert sum(shard["tokens"] for shard in shards(path, 2)) == AT * 2 * BATCH * CONTEXT


def test_a_change_that_was_cut_off_is_made_up_for(stopped: Any, tmp_path: Path) -> None:
    """config.toml and checkpoint disagree after a kill between them: a plain resume brings them together."""
    path = stopped("noloco", 2)
    text = (path / "config.toml").read_text()
    prepare(path, 3)
    (path / "config.toml").write_text(text)
    (path / "checkpoints" / "replacing" / "checkpoints").mkdir(parents=True)  # left behind by a kill before
    ready = prepare(path, None)
    assert ready.config.world.workers == 2 and Checkpoints(path).manifest(AT)["workers"] == 2
    assert sorted(file.name for file in (path / "checkpoints").iterdir()) == [f"step-{AT}"]


def test_a_model_of_ones_own_goes_on_too(text: Path, tmp_path: Path) -> None:
    """With a buffer that counts, a frozen and a tied parameter."""
    own = ["model.factory=tests.training.own_models:build", f"model.context={CONTEXT}"]
    settings = [one for one in TINY if not one.startswith("model.")]
    flags = {"replicas.method": "diloco", "world.workers": 2, "run.steps": STEPS}
    every = ["replicas.sync_every=3", f"run.checkpoint_every={AT}"]
    config = read_config(None, flags, [f"data.path={text}", *settings, *own, *every])
    path = stop(config, tmp_path / "own")
    summary, _, _ = go_on(path, 3)
    assert summary["tokens"] == (AT * 2 + (STEPS - AT) * 3) * BATCH * CONTEXT


@pytest.mark.long
def test_real_processes_by_the_command(stopped: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`isles resume RUN --workers 3` over gloo: says what is kept and lost, and ends as the virtual backend does."""
    path = stopped("noloco", 2)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    toml = copy / "config.toml"
    toml.write_text(toml.read_text().replace('backend = "virtual"', 'backend = "distributed"'))
    strip_clocks(copy, 2)
    resume(copy, workers=3)
    err = capsys.readouterr().err
    assert "going on with 3 workers instead of 2" in err and "replaced by the mean" in err and "lost:" in err
    go_on(path, 3)
    assert (copy / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def strip_clocks(path: Path, workers: int) -> None:
    """A real transport saves nothing."""
    states = shards(path, workers)
    for state in states:
        state["optimizer"]["transport"] = {}
    checkpoints = Checkpoints(path)
    facts = {
        key: value
        for key, value in checkpoints.manifest(AT).items()
        if key not in ("check", "step", "workers", "ranks")
    }
    checkpoints.replace(AT, states, facts)


@pytest.mark.parametrize(
    ("workers", "more", "says"),
    [
        (0, [], "workers = 0"),
        (3, ["replicas.group_size=4"], "group_size = 4 in a world of 3"),
        (3, ["data.batch_mode=global", "data.batch_size=8"], "does not divide by 3 workers"),
        (3, ["data.split=by_file"], "documents among 3 workers"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    stopped: Any, text: Path, tmp_path: Path, workers: int, more: list[str], says: str
) -> None:
    if more == ["data.split=by_file"]:
        folder = tmp_path / "files"
        folder.mkdir()
        for number in range(4):
            write_text(folder / f"{number}.txt", 5000, seed=number)
        more = [*more, f"data.path={folder}", "data.validation_fraction=0"]
        path = stopped("noloco", 4, *SHORT, *more)
        for number in range(2):
            (folder / f"{number}.txt").unlink()
    else:
        path = stopped("noloco", 4, *SHORT, *more)
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ValueError) as caught:
        prepare(path, workers)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert files == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_method_that_does_not_say_is_refused(stopped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a state of its own and no `regrouped`."""
    from isles.replicas.loop.outer import OuterSync
    from isles.replicas.sync import ReplicaSync

    path = stopped("localsgd", 2, *SHORT)
    monkeypatch.setattr(OuterSync, "regrouped", classmethod(ReplicaSync.regrouped.__func__))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="LocalSGD does not say how its state is regrouped"):
        prepare(path, 3)
    assert Checkpoints(path).manifest(2)["workers"] == 2


def test_a_name_that_is_none_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: there is nothing of that name"):
        prepare(tmp_path / "nowhere", None)
