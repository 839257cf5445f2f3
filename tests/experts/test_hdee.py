"""HDEE from end to end on four small languages, and what must not change between its variants."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isles.experts import ensemble as joining
from isles.experts import hdee, mixture
from isles.experts.domains import read_domains
from isles.experts.ensemble import Joining
from isles.experts.forest import Forest, Served, score
from isles.experts.hdee import HdeeConfig, run_group
from isles.experts.jobs import JobProgress, weights_sha256
from isles.experts.planning import SYSTEMS, opened, settings
from isles.experts.reading import keep, read, template
from isles.experts.system import System
from isles.models.factory import generate
from isles.report import write_report
from isles.training.records.saved_run import load_saved
from tests.experts.small import HDEE, asked, made, write_domains


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_domains(tmp_path_factory.mktemp("domains"))


@pytest.fixture(scope="module")
def built(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[System[Any], dict[str, Any]]:
    system = made("hdee", config, tmp_path_factory.mktemp("hdee"))
    return system, system.evaluate(JobProgress())


@pytest.mark.long
def test_each_expert_is_best_on_its_own_domain(built: tuple[System[Any], dict[str, Any]]) -> None:
    mean = built[1]["mean"]
    for variant in hdee.VARIANTS:
        trained = [mean[variant]["r1"][domain] for domain in ("easy", "medium", "difficult")]
        joined = sum(math.log(told["perplexity"]["posterior"]) for told in trained)
        assert all(joined < sum(math.log(told["alone"][expert]) for told in trained) for expert in range(3))
        for place, domain in enumerate(("easy", "medium", "difficult")):
            told = mean[variant]["r1"][domain]
            assert min(range(3), key=told["alone"].__getitem__) == place
            assert told["alone"][place] < mean["seed"][domain]
            assert told["perplexity"]["posterior"] < told["perplexity"]["arithmetic"] < told["perplexity"]["geometric"]
            assert told["perplexity"]["posterior"] <= told["perplexity"]["oracle"] * 3 ** (1 / 16) * (1 + 1e-9)


@pytest.mark.long
def test_shared_experts_are_one_run_and_variants_change_the_others_alone(
    built: tuple[System[Any], dict[str, Any]],
) -> None:
    system, _ = built
    forests = {v: Forest.load(system.out / f"seed-0/forests/{v}-r1.json") for v in hdee.VARIANTS}
    medium = {forest.experts[1].run.resolve() for forest in forests.values()}
    assert len(medium) == 1
    assert len({tuple(m.name for m in forest.experts) for forest in forests.values()}) == 4
    for forest in forests.values():
        for member in forest.experts:
            card = json.loads((member.run / "expert.json").read_text())
            summary = json.loads((member.run / "summary.json").read_text())
            assert card["bytes_to_other_experts"] == 0 and summary["bytes_sent_per_worker"] == 0
            seed = member.run.parent / f"seed-f{load_saved(member.run).config.model.ffn}"
            assert card["seed_sha256"] == weights_sha256(seed)
            assert card["domains"] == list(member.domains) and len(member.domains) == 1
    # In another directory, alone: the same bytes.
    again = made("hdee", system_config(system), system.out.parent / "again", "hdee.variants=['m-ho-i-ho']")
    there = again.out / "seed-0" / forests["m-ho-i-he"].experts[1].name
    assert weights_sha256(there) == weights_sha256(medium.pop())


@pytest.mark.long
def test_random_splits_are_thirds_of_the_mixture_and_worth_little_more_than_one(
    built: tuple[System[Any], dict[str, Any]],
) -> None:
    system, results = built
    folder = system.out / "seed-0"
    mixture_NT, *thirds = (
        np.load(folder / name / "train-tokens.npy").reshape(-1, 17)
        for name in ("mixture", "splits/0", "splits/1", "splits/2")
    )
    assert all(np.array_equal(third, mixture_NT[place::3]) for place, third in enumerate(thirds))
    mean = results["mean"]

    def summed(told: dict[str, Any], way: str) -> float:
        return sum(math.log(told[domain]["perplexity"][way]) for domain in ("easy", "medium", "difficult"))

    def best_alone(told: dict[str, Any]) -> float:
        trained = [told[domain]["alone"] for domain in ("easy", "medium", "difficult")]
        return min(sum(math.log(alone[expert]) for alone in trained) for expert in range(3))

    random, by_domain = mean["random"], mean["m-ho-i-ho"]["r1"]
    assert best_alone(random) - summed(random, "posterior") < 3 * math.log(1.05)
    assert best_alone(by_domain) - summed(by_domain, "posterior") > 3 * math.log(1.3)
    # The dense model has seen as much text as all experts of a variant, on all domains.
    dense = json.loads((folder / "dense-f24-t72" / "summary.json").read_text())
    one = json.loads((folder / "easy-f24-t24-r1" / "summary.json").read_text())
    assert dense["tokens"] == 3 * one["tokens"]
    assert all(mean["dense"][domain] < mean["seed"][domain] for domain in ("easy", "medium", "difficult"))


def test_another_machine_needs_the_seed_and_the_domain_alone(
    built: tuple[System[Any], dict[str, Any]], tmp_path: Path
) -> None:
    system, _ = built
    shutil.copytree(system.out / "seed-0/seed-f24", tmp_path / "out/seed-0/seed-f24")
    config = write_domains(tmp_path)
    shutil.copy(system_config(system).parent / "difficult.txt", tmp_path)
    for other in ("easy.txt", "medium.txt", "apart.txt"):
        (tmp_path / other).unlink()
    there = opened(asked("hdee", config), tmp_path / "out")
    name = "seed-0/difficult-f24-t36-r1"
    assert not there.train(JobProgress(), [name])
    assert weights_sha256(there.out / name) == weights_sha256(system.out / name)
    assert {path.name for path in (there.out / "seed-0").iterdir()} == {"seed-f24", "difficult-f24-t36-r1"}
    with pytest.raises(ValueError, match=r"difficult-f32-t24-r1 starts from .*seed-f32, which is not there"):
        there.train(JobProgress(), ["seed-0/difficult-f32-t24-r1"])


def test_experts_of_several_diloco_workers_are_experts(config: Path, tmp_path: Path) -> None:
    words = ["hdee.variants=['m-ho-i-ho']", "hdee.baselines=[]", "world.workers=2", "replicas.method=diloco"]
    system = made("hdee", config, tmp_path, *words, "replicas.sync_every=6", "replicas.outer_lr=1.0")
    mean = system.evaluate(JobProgress())["mean"]
    for place, domain in enumerate(("easy", "medium", "difficult")):
        told = mean["m-ho-i-ho"]["r1"][domain]
        assert min(range(3), key=told["alone"].__getitem__) == place
        assert told["alone"][place] < mean["seed"][domain]
    for job, _ in system.jobs().values():
        summary = json.loads((tmp_path / "seed-0" / job.name / "summary.json").read_text())
        rounds = math.ceil(job.config.run.steps / 6)
        assert summary["method"] == "diloco" and summary["workers"] == 2
        assert summary["bytes_sent_per_worker"] >= rounds * 4 * summary["parameters"]
        if job.config.run.start:
            card = json.loads((tmp_path / "seed-0" / job.name / "expert.json").read_text())
            assert card["seed_sha256"] == weights_sha256(Path(job.config.run.start))
            assert card["bytes_to_other_experts"] == 0


def system_config(system: System[Any]) -> Path:
    return Path(system.domains[0].path).parent / "domains.toml"


def test_a_second_call_trains_nothing_and_other_settings_are_refused(
    built: tuple[System[Any], dict[str, Any]],
) -> None:
    system, _ = built
    marks = {path: path.stat().st_mtime_ns for path in system.out.rglob("model.safetensors")}
    assert system.train(JobProgress())
    assert marks == {path: path.stat().st_mtime_ns for path in system.out.rglob("model.safetensors")}
    own = system.asked.tables["hdee"]
    turned = {**system.asked.tables, "hdee": dict(reversed(own.items()))}
    keep(replace(system.asked, tables=turned), system.out)  # the same settings in another order
    with pytest.raises(ValueError, match="experts of other settings"):
        made("hdee", system_config(system), system.out, "hdee.seed_steps=7")


def test_the_forest_served_is_a_distribution_and_speaks_the_same_however_it_is_batched(
    built: tuple[System[Any], dict[str, Any]],
) -> None:
    system, _ = built
    forest = Forest.load(system.out / "seed-0/forests/m-he-i-ho-r1.json")
    served, uniform = Served.load(forest.experts), mixture.uniform(3)
    tokens = system.texts["medium"].sequences("test", 6)
    logs_NV = served.next_token(tokens[:, :-1], uniform)
    torch.testing.assert_close(logs_NV.exp().sum(-1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-6)
    scores_ENT = served.scores(tokens)
    mixed = mixture.mix(scores_ENT, mixture.posterior(scores_ENT, uniform))
    last = logs_NV.gather(1, tokens[:, -1:])[:, 0]
    torch.testing.assert_close(mixed[:, -1], last, rtol=1e-6, atol=1e-6)

    def spoken(these: Served) -> list[int]:
        return list(generate(these.logits(uniform), tokens[0, :8], new_tokens=20, context=16, seed=3))

    assert spoken(served) == spoken(served.only([2, 0, 1])) == spoken(Served.load(forest.experts))
    # An expert that the prior leaves out does not run: with a broken one at log 0 nothing changes.
    two = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    broken = served.only([0, 1, 2])
    broken.runs[2] = replace(broken.runs[2], model=None)
    torch.testing.assert_close(
        broken.next_token(tokens[:, 1:], two), served.only([0, 1]).next_token(tokens[:, 1:], two[:2])
    )


def test_parameters_average_between_equal_shapes_only(built: tuple[System[Any], dict[str, Any]]) -> None:
    system, _ = built
    folder = system.out / "seed-0" / "forests"
    equal = Served.load(Forest.load(folder / "m-ho-i-ho-r1.json").experts)
    one = equal.average([0.0, 1.0, 0.0])
    assert all(torch.equal(one[name], tensor) for name, tensor in equal.runs[1].model.state_dict().items())
    with pytest.raises(ValueError, match="different shapes"):
        Served.load(Forest.load(folder / "m-he-i-ho-r1.json").experts).average([0.2, 0.3, 0.5])
    with pytest.raises(ValueError, match="3 shares"):
        equal.average([1.0])


def test_the_seed_starts_where_the_run_that_it_names_ended(built: tuple[System[Any], dict[str, Any]]) -> None:
    """One step at a rate of (nearly) nothing leaves the seed's weights."""
    system, _ = built
    job = next(job for _, job in system.placed_jobs() if job.role == "expert")
    still = replace(job, name="still", config=replace(job.config, inner=replace(job.config.inner, lr=1e-30)))
    from isles.experts.jobs import train

    train(still, system.out / "other", JobProgress())
    tokens = system.texts["easy"].sequences("test", 4)
    assert torch.equal(
        score(load_saved(system.out / "other" / "still"), tokens), score(load_saved(Path(job.config.run.start)), tokens)
    )


def test_the_page_shows_domains_experts_and_the_posterior(built: tuple[System[Any], dict[str, Any]]) -> None:
    page = write_report(built[0].out).read_text()
    for words in ("Perplexity by domain and variant", "Posterior over a text of difficult", "m-he-i-he", "held out"):
        assert words in page
    assert "tokens until 99 %" in page
    told = built[1]["mean"]["m-he-i-he"]["r1"]["difficult"]
    groups = [
        *(f"{share:.3f}" for share in told["mean_posterior"]),
        f"{told['entropy']:.3f}",
        f"{told['sure_after']:.1f}",
    ]
    row = re.findall(r"<tr>(?:(?!</tr>).)*m-he-i-he(?:(?!</tr>).)*difficult.*?</tr>", page, re.DOTALL)
    assert any(re.findall(r">([\d.]+)<", found) == groups for found in row)
    assert sum(told["mean_posterior"]) == pytest.approx(1)


def test_a_text_that_an_expert_was_trained_on_is_judged_where_it_was_not(
    built: tuple[System[Any], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sequences as in the system's own table, so the same numbers."""
    system, results = built
    monkeypatch.setattr(joining, "SEQUENCES", 12)
    for domain in ("easy", "difficult"):
        path = system.out / "seed-0/forests/m-ho-i-ho-r1.json"
        found = joining.evaluated_on(path, system.texts[domain].domain.path, Joining())
        told = results["mean"]["m-ho-i-ho"]["r1"][domain]
        assert found["perplexity"] == f"{told['perplexity']['posterior']:.4f}"
        alone = [value.split()[0] for name, value in found.items() if name.endswith("alone")]
        assert alone == [f"{value:.4f}" for value in told["alone"]]
        assert results["sequences"][domain] == int(found["sequences"].split()[0]) <= 12


@pytest.mark.parametrize("variant", hdee.VARIANTS)
def test_every_cell_keeps_the_budget(variant: str, config: Path) -> None:
    paper = read("hdee", HdeeConfig, str(config), ["model.ffn=3072", "model.d_model=768", "model.heads=12"])
    found = run_group(paper.own, paper.base, variant)
    assert found.ratio == pytest.approx(1, abs=0.01)
    assert found.ffn[1] == 3072 and found.steps[1] == 400
    if variant.endswith("i-ho"):
        assert found.steps == (400, 400, 400)
    if variant == "m-ho-i-he":
        assert found.steps == (300, 400, 500)


def test_iterations_chain_each_expert_through_the_domains_of_its_difficulty(config: Path, tmp_path: Path) -> None:
    more = "".join(f'[domains.{d}-2]\npath = "{d}"\ndifficulty = "{d}"\n' for d in ("easy", "medium", "difficult"))
    two = tmp_path / "two.toml"
    two.write_text(config.read_text() + more)
    request = asked("hdee", two, "hdee.iterations=2")
    assert opened(request, tmp_path / "two").remarks() == []
    remark = opened(asked("hdee", two), tmp_path / "one").remarks()[0]
    assert "hdee.iterations = 1: no expert trains on easy-2, medium-2, difficult-2; raise it" in remark
    domains = read_domains(request.domains, tmp_path, 1)
    made_of = hdee.plan(request.own, request.base, domains, 0, tmp_path)  # type: ignore[arg-type]
    by_name = {job.name: job for job in made_of.jobs}
    first, second = made_of.forests["m-ho-i-he"]
    for before, after, difficulty in zip(first, second, ("easy", "medium", "difficult"), strict=True):
        assert by_name[before].domains == (difficulty,)
        assert by_name[after].domains == (difficulty, f"{difficulty}-2")
        assert by_name[after].config.run.start == str(tmp_path / before)
        assert by_name[after].config.run.steps == by_name[before].config.run.steps
    order = list(by_name)
    assert all(
        order.index(Path(job.config.run.start).name) < order.index(job.name)
        for job in made_of.jobs
        if job.config.run.start
    )
    assert made_of.forests["m-ho-i-ho"][1][1] == made_of.forests["m-he-i-he"][1][1]  # the medium one is shared


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_printed_configuration_reads_back_to_the_defaults(system: str, tmp_path: Path) -> None:
    path = tmp_path / "printed.toml"
    path.write_text(template(system, settings(system)))
    assert read(system, settings(system), str(path), []).own == settings(system)()
    for line in path.read_text().splitlines():
        assert not line or line.startswith(("#", "[")) or " = " in line


def test_what_does_not_balance_or_is_missing_is_refused(config: Path, tmp_path: Path) -> None:
    for words, match in (
        (["hdee.steps=[12, 24, 60]"], r"^m-ho-i-he: the budget does not balance"),
        (["hdee.iterations=2"], r"needs as many domains of difficulty \"easy\", there are 1"),
        (["run.steps=5"], r"^run.steps: the steps of the runs stand in \[hdee\]"),
        (["hdee.variants=['m-hu']"], "unknown hdee.variant 'm-hu'"),
    ):
        with pytest.raises(ValueError, match=match):
            made("hdee", config, tmp_path / "new", *words)
        assert not (tmp_path / "new").exists()
    assert asked("hdee", config).own.seeds == (0,)  # type: ignore[attr-defined]
    assert "hdee.seeds=[0]" in HDEE
