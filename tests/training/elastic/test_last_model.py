"""The one model at the end: whose files it is of, and what a member that lies hands in for nothing."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from isles.base.durable import write_text
from isles.base.tables import changed
from isles.data import load_corpus
from isles.models import build
from isles.training.config.reading import to_toml
from isles.training.elastic.support import final_rule
from isles.training.lighthouse import mean as averaging
from isles.training.lighthouse import server as keeping
from isles.training.lighthouse.judge import judge
from isles.training.lighthouse.mean import consolidate, same_weights, spread, write_mean
from isles.training.lighthouse.rounds import RoundsLighthouseServer
from isles.training.records.shard import save_model
from tests.training.elastic.test_support import config

NOTES = {"head": "embedding"}


def files(folder: Path, *models: dict[str, Tensor], notes: dict[str, str] | None = None) -> dict[int, Path]:
    """By member."""
    found = {}
    for member, model in enumerate(models):
        found[member] = folder / f"{member}.safetensors"
        save_file(model, found[member], notes)
    return found


def replicas(count: int, apart: float = 0.01) -> list[dict[str, Tensor]]:
    """What pairs come to: near each other."""
    torch.manual_seed(1)
    middle = torch.randn(40, 5)
    return [{"w": middle + apart * torch.randn(40, 5), "n": torch.tensor([7])} for _ in range(count)]


@pytest.mark.parametrize("liar", [0, 3])
def test_all_land_the_model_that_most_have(tmp_path: Path, liar: int) -> None:
    (honest,) = replicas(1)
    models = [honest] * 4
    models[liar] = {**honest, "w": honest["w"] + 1e-7}
    left = consolidate(files(tmp_path, *models), tmp_path / "out", alike=True, ratio=10.0)
    assert left == {liar: "it is not the one that the others have landed"}
    assert torch.equal(load_file(tmp_path / "out")["w"], honest["w"])


def test_notes_of_one_member_are_not_taken_over(tmp_path: Path) -> None:
    """They say which tensors are tied."""
    (honest,) = replicas(1)
    found = files(tmp_path, honest, honest, honest, notes=NOTES)
    save_file(honest, found[0], {"head": "another"})
    assert consolidate(found, tmp_path / "out", alike=True, ratio=10.0).keys() == {0}
    with safe_open(str(tmp_path / "out"), "np") as file:
        assert file.metadata() == NOTES


@pytest.mark.parametrize(("count", "liars"), [(3, 1), (4, 1), (5, 2), (7, 3)])
def test_the_mean_is_of_those_that_are_near_each_other(tmp_path: Path, count: int, liars: int) -> None:
    """Whoever is a hundred times as far from the median as they usually are is left out, wherever it sits."""
    models = replicas(count)
    for member in range(liars):
        models[member] = {**models[member], "w": models[member]["w"] + 1.0}
    models[liars] = {**models[liars], "n": torch.tensor([9])}  # which is no distance
    left = consolidate(files(tmp_path, *models), tmp_path / "out", alike=False, ratio=10.0)
    assert left.keys() == {*range(liars)} and all("as far from the others as usual" in why for why in left.values())
    honest = [model["w"] for model in models[liars:]]
    found = load_file(tmp_path / "out")
    assert torch.equal(found["w"], sum(honest[1:], honest[0]) / len(honest))
    assert found["n"].tolist() == [7] if count > 3 else [9]


def test_who_is_apart_from_equal_ones_is_left_out(tmp_path: Path) -> None:
    """The usual distance is 0 then: a tenth of their size is in its place, so ten of those are the most."""
    honest, near, far = ({"w": torch.full((40, 5), value)} for value in (1.0, 1.9, 2.1))
    left = consolidate(files(tmp_path, honest, far, honest, near, honest), tmp_path / "out", alike=False, ratio=10.0)
    assert left == {1: "it is 11 times as far from the others as usual (world.trust_ratio)"}
    assert torch.allclose(load_file(tmp_path / "out")["w"], torch.tensor((1 + 1 + 1.9 + 1) / 4))


def test_honest_ones_are_all_in_the_mean(tmp_path: Path) -> None:
    """Also where one has moved five times as far; of two nobody can say which is wrong; equal ones are no measure."""
    models = replicas(4)
    models[2]["w"] = models[2]["w"] + 0.03
    two = [replicas(1)[0], {"w": torch.full((40, 5), 1e9), "n": torch.tensor([7])}]
    alike = [*replicas(1) * 2, *replicas(1, apart=0.02)]
    for number, many in enumerate((models, two, alike)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert consolidate(files(folder, *many), folder / "out", alike=False, ratio=10.0) == {}


def test_a_file_of_other_tensors_ends_nobody(tmp_path: Path) -> None:
    """As where the first one's is valid and of another model: before, the mean of all could not be taken then."""
    found = files(tmp_path, {"x": torch.zeros(3)}, *replicas(2), {"w": torch.full((40, 5), float("nan"))})
    found[4] = tmp_path / "none"
    found[4].write_bytes(b"\xff" * 100)
    left = consolidate(found, tmp_path / "out", alike=False, ratio=10.0)
    assert left.keys() == {0, 3, 4} and left[0] == "its tensors are not those of the others"
    assert "w is not finite" in left[3] and "no safetensors file" in left[4]
    assert consolidate({0: found[4]}, tmp_path / "none of all", alike=True, ratio=10.0).keys() == {0}
    assert not (tmp_path / "none of all").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_means_of_every_format_are_those_of_a_fixed_world(tmp_path: Path, dtype: torch.dtype) -> None:
    """Summed in float32 at the least, in the order of the members, rounded once; torch does the same."""
    torch.manual_seed(2)
    weights = [torch.randn(33, 7).to(dtype) for _ in range(3)]
    found = files(tmp_path, *({"w": one, "s": one[0, 0].clone()} for one in weights))
    write_mean([*found.values()], tmp_path / "out")
    wide = [one.to(torch.promote_types(dtype, torch.float32)) for one in weights]
    mean = ((wide[0] + wide[1] + wide[2]) / 3).to(dtype)
    got = load_file(tmp_path / "out")
    assert got["w"].dtype == dtype and torch.equal(got["w"], mean) and torch.equal(got["s"], mean[0, 0])
    apart = torch.stack(wide).double() - mean.double()
    expected = (3 * 33 * 7 * apart.square().mean() + apart[:, 0, 0].square().sum()) / (3 * (33 * 7 + 1))
    assert spread([*found.values()], tmp_path / "out") == pytest.approx(float(expected.sqrt()), rel=1e-12)
    write_mean([found[1]], tmp_path / "one")
    assert same_weights(tmp_path / "one", found[1]) and not same_weights(tmp_path / "one", found[2])


def test_bfloat16_is_rounded_to_even_and_infinities_are_refused(tmp_path: Path) -> None:
    """1 and 1 + 2^-7 are neighbours: their mean lies between them; 1 + 2^-7 and 1 + 2^-6 likewise."""
    one, two = torch.tensor([1.0, 1.0078125]).bfloat16(), torch.tensor([1.0078125, 1.015625]).bfloat16()
    found = files(tmp_path, {"w": one}, {"w": two}, {"w": torch.tensor([1.0, float("inf")]).bfloat16()})
    write_mean([found[0], found[1]], tmp_path / "out")
    assert load_file(tmp_path / "out")["w"].tolist() == [1.0, 1.015625]
    with pytest.raises(ValueError, match="w is not finite"):
        write_mean([found[2]], tmp_path / "out")


def test_tensors_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = replicas(3)
    found = files(tmp_path, *models)
    write_mean([*found.values()], tmp_path / "whole")
    monkeypatch.setattr(averaging, "_AT_ONCE", 100)
    write_mean([*found.values()], tmp_path / "piecewise")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "piecewise").read_bytes()


@pytest.mark.parametrize(("rule", "expected"), [("none", 5.5), ("trimmed", 1.5), ("median", 1.5), ("clip", 1.5)])
def test_the_last_model_is_made_by_the_robust_rule(tmp_path: Path, rule: str, expected: float) -> None:
    """Of 0, 1, 2 and 19: their median is 1.5, the middle distance is 0.5 times the root of the size, so that clipping
    takes 1, 1, 2 and 2 (of 0 and 19 a step of 0.5 from the median).
    """
    found = files(tmp_path, *({"w": torch.full((9,), value)} for value in (0.0, 1.0, 2.0, 19.0)))
    made = config("run.steps=20", "replicas.method=noloco", f"replicas.robust={rule}")
    assert consolidate(found, tmp_path / "out", **final_rule(made) | {"ratio": 100.0}) == {}
    assert load_file(tmp_path / "out")["w"].tolist() == pytest.approx([expected] * 9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_the_keeper_names_whom_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, dtype: str
) -> None:
    """The liar sits first. Only the way of the files is left out: they are there."""
    models = [torch.nn.Linear(8, 4).to(getattr(torch, dtype)) for _ in range(4)]
    torch.manual_seed(3)
    start = torch.randn(4, 8)
    for member, model in enumerate(models):
        moved = 50.0 if not member else 0.05 * torch.randn(4, 8) if method == "noloco" else 0.0
        model.weight.data.copy_(start + moved)
        model.bias.data.zero_()
        save_model(model, tmp_path / f"given-{member}")

    def take(session: Any, asked: Any, path: Path, **_: Any) -> dict[str, Any]:
        path.write_bytes((tmp_path / f"given-{asked.source}").read_bytes())
        return {}

    monkeypatch.setattr(keeping, "fetch_state", take)
    notices: list[str] = []
    settings = ("run.steps=20", f"replicas.method={method}", f"model.dtype={dtype}")
    made = RoundsLighthouseServer(config(*settings), tmp_path, "127.0.0.1:1", print, print, notices.append)
    made.session = made.keys = type("Nobody", (), {"peer_key": None})()  # type: ignore[assignment]
    made.lighthouse = type("Nobody", (), {"corpus": ""})()  # type: ignore[assignment]
    assert made._collect(range(4)) == [1, 2, 3]
    assert len(notices) == 2 and notices[1].startswith("worker 0's model is left out: it is ")
    assert notices[0].startswith("the validation loss is a worker's word: this machine cannot judge the model (")
    weight = load_file(tmp_path / "model.safetensors")["weight"]
    honest = [model.weight.detach().float() for model in models[1:]]
    mean = (honest[0] + honest[1] + honest[2]) / 3
    assert torch.equal(weight, (mean if method == "noloco" else honest[0]).to(weight.dtype))
    assert not [*tmp_path.glob("*.partial")]


def lighthouse(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    notices: list[str],
    *more: str,
    scales: tuple[float, ...] = (1.0, 9.0),
) -> RoundsLighthouseServer:
    """At the end of a run: each member's model is there, the initial weights times so much. A ninth of them is a model
    whose validation loss is higher.
    """
    read = config("run.steps=20", *more)
    for member, scale in enumerate(scales):
        model = build(read.model, seed=read.run.seed)
        for parameter in model.parameters():
            parameter.data.mul_(scale)
        save_model(model, folder / f"given-{member}")
    write_text(folder / "config.toml", to_toml(read))

    def take(session: Any, asked: Any, path: Path, **_: Any) -> dict[str, Any]:
        path.write_bytes((folder / f"given-{asked.source}").read_bytes())
        return {}

    monkeypatch.setattr(keeping, "fetch_state", take)
    made = RoundsLighthouseServer(read, folder, "127.0.0.1:1", print, print, notices.append)
    made.session = made.keys = type("Nobody", (), {"peer_key": None})()  # type: ignore[assignment]
    made.lighthouse = type("Nobody", (), {"corpus": load_corpus(read.data).sha256})()  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_of_two_files_the_lighthouses_own_validation_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, liar: int
) -> None:
    notices, scales = list[str](), (9.0, 1.0) if liar == 0 else (1.0, 9.0)
    made = lighthouse(tmp_path, monkeypatch, notices, f"replicas.method={method}", scales=scales)
    assert made._collect([0, 1]) == [1 - liar]
    assert notices == [f"worker {liar}'s model is left out: another model has the lower validation loss"]
    assert same_weights(tmp_path / "model.safetensors", tmp_path / f"given-{1 - liar}")
    assert made.judged == {"val_loss": pytest.approx(math.log(256), abs=1.0)} and not [*tmp_path.glob("*.partial")]


def test_of_two_honest_files_the_mean_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices = list[str]()
    made = lighthouse(tmp_path, monkeypatch, notices, "replicas.method=noloco", scales=(1.0, 1.0009765625))
    assert made._collect([0, 1]) == [0, 1] and not notices
    one, two, written = (load_file(tmp_path / name) for name in ("given-0", "given-1", "model.safetensors"))
    assert all(torch.equal(written[name], (one[name] + two[name]) / 2) for name in one)


@pytest.mark.parametrize("why", ["text", "slow"])
def test_without_a_judge_both_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    notices = list[str]()
    made = lighthouse(tmp_path, monkeypatch, notices, "replicas.method=diloco")
    if why == "text":
        made.lighthouse.corpus = "f" * 64
    else:
        made.config = changed(made.config, {"world.eval_deadline": 1e-9})
    assert made._collect([0, 1]) == [0] and not made.judged
    text = "data.path = '' here is not the workers' text" if why == "text" else "it took longer than"
    assert notices[0].startswith(f"nobody has judged the model, which is of worker 0: {text}")
    assert notices[0].endswith("they are beside it (model-0.safetensors, model-1.safetensors)")
    for member in range(2):
        assert same_weights(tmp_path / f"model-{member}.safetensors", tmp_path / f"given-{member}")


def test_metadata_of_one_of_two_files_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's model says which tensors are tied; nothing else is in its header."""
    made = lighthouse(tmp_path, monkeypatch, [], "replicas.method=noloco", scales=(1.0, 1.0))
    tensors = load_file(tmp_path / "given-0")
    save_file(tensors, tmp_path / "given-0", {"format": "liar"})
    assert made._collect([0, 1]) == [1]
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "given-1").read_bytes()


def test_a_word_about_the_loss_counts_only_from_whom_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lighthouse(tmp_path, monkeypatch, [])
    made.evaluations, asked = {}, list[int]()
    made.on_event(1, "evaluated", 0.001)
    made.state_server = type("Nobody", (), {"publish": lambda *_: None})()  # type: ignore[assignment]

    class Asks:
        def notify(self, members: list[int], message: Any) -> None:
            asked.extend(members)
            made.on_event(1, "evaluated", 0.001)
            made.on_event(members[0], "evaluated", 2.5)

        def wait(self, over: Any, seconds: float) -> bool:
            return bool(over())

    made.lighthouse = Asks()  # type: ignore[assignment]
    assert made._evaluate([0, 1]) == 2.5 and asked == [0]


@pytest.mark.long
def test_a_lighthouse_without_torch_judges_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lighthouse(tmp_path, monkeypatch, [])
    files, corpus = [tmp_path / "given-0", tmp_path / "given-1", tmp_path / "config.toml"], made.lighthouse.corpus
    here = judge(tmp_path, corpus, files, 60.0, lambda: False)
    monkeypatch.delitem(sys.modules, "torch")
    assert judge(tmp_path, corpus, files, 60.0, lambda: False) == here
    assert all(losses is not None and losses["val_loss"] < math.inf for losses in here.losses[:2])
    assert here.losses[2] is None and not here.why
    assert "cannot be read" in judge(tmp_path / "none", corpus, files, 60.0, lambda: False).why


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("robust", ["clip", "trimmed", "median"])
def test_robust_means_of_files(tmp_path: Path, robust: str, count: int) -> None:
    """By plain arithmetic: sorted values without their ends; or steps from the median, none longer than the middle
    one (the shorter of two).
    """
    models = replicas(count)
    write_mean([*files(tmp_path, *models).values()], tmp_path / "out", robust)
    values = np.stack([model["w"].double().numpy() for model in models])
    center = np.median(values, axis=0)
    if robust == "clip":
        far = [float(((one - center) ** 2).sum()) ** 0.5 for one in values]
        most = sorted(far)[(count - 1) // 2]
        kept = [
            center + (one - center) * (min(1.0, most / length) if length else 1.0)
            for one, length in zip(values, far, strict=True)
        ]
    else:
        cut = {"trimmed": (0, 0, 1, 1), "median": (0, 0, 1, 1)}[robust][count - 1]
        kept = [*np.sort(values, axis=0)[cut : count - cut]]
    got = load_file(tmp_path / "out")["w"].double().numpy()
    assert np.abs(got - sum(kept) / len(kept)).max() < 1e-6
