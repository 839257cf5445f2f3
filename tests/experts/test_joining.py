"""Ways in which a forest answers: averages to branch from, weights that grow with the text, priors that move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isles.experts import mixture
from isles.experts.ensemble import EVERY, Joined, Joining, Speaker, evaluated_on
from isles.experts.forest import Forest, ForestMember, Served, score
from isles.experts.jobs import ExpertJob, JobProgress, train, weights_sha256
from isles.experts.routing import (
    ByClusters,
    Routers,
    cached,
    clustered,
    following,
    growing,
    parse_prior,
    running,
    texts_of,
)
from isles.experts.system import System
from isles.training.records.saved_run import load_saved
from tests.experts.small import made, write_domains

BTM = ["hdee.variants=['m-ho-i-he']", "hdee.iterations=2", "hdee.branch=average", "hdee.baselines=[]"]
Built = tuple[System[Any], Path]


def two_lessons(folder: Path) -> Path:
    """Domains of which each difficulty has a second one: the letters of the next."""
    config = write_domains(folder)
    later = {"easy": "medium", "medium": "difficult", "difficult": "easy"}
    lines = [
        f'[domains.{name}-2]\npath = "{folder / other}.txt"\ndifficulty = "{name}"\n' for name, other in later.items()
    ]
    config.write_text("\n".join([config.read_text(), *lines]))
    return config


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Experts whose second iteration begins with averages."""
    folder = tmp_path_factory.mktemp("branched")
    system = made("hdee", two_lessons(folder), folder / "out", *BTM)
    system.evaluate(JobProgress())
    return system, folder


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Routers and experts."""
    folder = tmp_path_factory.mktemp("routed")
    words = ["smalltalk.dense=[]", "smalltalk.router_lr=0.01", "smalltalk.rounds=6", "smalltalk.steps=20"]
    system = made("smalltalk", write_domains(folder), folder / "out", *words)
    system.evaluate(JobProgress())
    return system, folder


@pytest.mark.long
def test_a_branch_begins_with_the_average_that_the_new_domain_asks_for(branched: Built) -> None:
    system, _ = branched
    runs = system.out / "seed-0"
    for job in [job for job, _ in system.jobs().values() if job.parents]:
        start = Path(job.config.run.start)
        told = json.loads((start / "average.json").read_text())
        assert told["of"] == list(job.parents) == [member.name for member in forest(system, 1).experts]
        text = system.texts[job.domains[-1]]
        by_hand = cached(Served.load(forest(system, 1).experts).scores(text.sequences("prior", 100)), statistic="mean")
        assert told["shares"] == pytest.approx(by_hand.exp().tolist())
        states = [load_file(str(runs / name / "model.safetensors")) for name in job.parents]
        for name, tensor in load_file(str(start / "model.safetensors")).items():
            weighed = sum(
                (s * state[name].double() for s, state in zip(told["shares"], states, strict=True)), torch.zeros(())
            )
            assert torch.equal(tensor, weighed.to(tensor.dtype))
        card = json.loads((runs / job.name / "expert.json").read_text())
        assert card["seed_sha256"] == weights_sha256(start) and len(card["domains"]) == 2
    # The second lesson of "easy" is the first of "medium", whose expert is therefore nearly all of the average.
    start = next(runs.glob("*easy*-r2-start"))
    assert json.loads((start / "average.json").read_text())["shares"][1] > 0.5
    assert system.train(JobProgress())  # everything is there


def forest(system: System[Any], iteration: int) -> Forest:
    return Forest.load(system.out / f"seed-0/forests/m-ho-i-he-r{iteration}.json")


def test_branching_from_averages_needs_equal_shapes_and_a_second_iteration(tmp_path: Path) -> None:
    config = two_lessons(tmp_path)
    for words, match in (
        ([*BTM, "hdee.variants=['m-ho-i-ho', 'm-he-i-ho']"], "leave m-he-i-ho out of hdee.variants"),
        ([*BTM, "hdee.iterations=1"], "raise hdee.iterations"),
    ):
        with pytest.raises(ValueError, match=match):
            made("hdee", config, tmp_path / "new", *words)


def _gates(system: System[Any]) -> tuple[Routers, ByClusters]:
    text = system.texts["easy"]
    models = Served.load(Forest.load(system.out / "seed-0/forests/smalltalk.json").routers)
    lines = [line for text in system.texts.values() for line in texts_of(text.training_rows(), text.corpus.tokenizer)]
    return Routers(models), ByClusters(clustered(lines[::7], 2, seed=0), text.corpus.tokenizer)


def test_weights_that_grow_know_only_the_text_before(routed: Built) -> None:
    system, _ = routed
    tokens = torch.cat([text.sequences("test", 4) for text in system.texts.values()])
    for gate in _gates(system):
        each = growing(gate, tokens, 2, 1)
        torch.testing.assert_close(each.exp().sum(0), torch.ones(each.shape[1:], dtype=torch.float64))
        assert torch.equal(each[..., 0].exp(), torch.full((2, len(tokens)), 0.5, dtype=torch.float64))
        for t in (1, 7, 15):  # the token at t + 1 is weighed by what the gate says of the first t + 1
            direct = gate.log_chances(gate.scores(tokens[:, : t + 1], t + 1))
            torch.testing.assert_close(each[..., t], direct)
        changed = tokens.clone()
        changed[:, 9:] = 97
        there = growing(gate, changed, 2, 1)
        assert torch.equal(each[..., :9], there[..., :9]) and not torch.equal(each[..., 9:], there[..., 9:])
        blocks = growing(gate, tokens, 2, 4)
        assert all(torch.equal(blocks[..., t], each[..., t - t % 4]) for t in range(16))
        kept = mixture.top_k(each, 1).exp()
        assert torch.equal(kept.sum(0), torch.ones_like(kept[0])) and set(kept.unique().tolist()) == {0.0, 1.0}
        best = torch.gather(each, 0, kept.argmax(0, keepdim=True))[0]
        assert torch.equal(best, each.max(0).values)


def test_what_is_generated_is_what_is_judged(routed: Built) -> None:
    """The next token's distribution while speaking is the one that the judged mixture has there."""
    system, folder = routed
    path = system.out / "seed-0/forests/smalltalk.json"
    for top in (1, None):
        speaker = Speaker(path, Joining(route="growing", top=top))
        joined = speaker.joined
        tokens = system.texts["medium"].sequences("test", 1)
        assert joined.gate is not None
        weights = growing(joined.gate, tokens, 2, 1)
        scored = mixture.mix(joined.experts.scores(tokens), mixture.top_k(weights, joined.top))
        logits = speaker.voice("some words").logits
        for t in (1, 5, 15):
            log_V = logits(tokens[:, : t + 1])[0, 0]
            torch.testing.assert_close(float(log_V.exp().sum()), 1.0, rtol=0, atol=1e-6)
            assert float(log_V[tokens[0, t + 1]]) == pytest.approx(float(scored[0, t]), abs=1e-5)
    found = evaluated_on(path, str(folder / "easy.txt"), Joining(route="growing", top=1))
    assert found["experts that run"] == "1 of 2 a token" and EVERY == 16  # a context of 16: no weights but the first


def test_a_shorter_prefix_routes_by_fewer_tokens(routed: Built) -> None:
    system, folder = routed
    path = system.out / "seed-0/forests/smalltalk.json"
    prompt = (folder / "medium.txt").read_text()[:40]
    voice = Speaker(path, Joining(prefix=4)).voice(prompt)
    assert "first 4 tokens" in voice.note
    gate = _gates(system)[0]
    assert f"by expert-{int(gate.scores(voice.tokens[None, :4], 4).argmax(0)[0])}" in voice.note
    tokens = torch.cat([text.sequences("test", 8) for text in system.texts.values()])
    few, all_of_it = (Joined(Forest.load(path), Joining(prefix=prefix)) for prefix in (4, None))
    scores = few.experts.scores(tokens)
    weights = few.weights(tokens, scores, None)
    changed = tokens.clone()
    changed[:, 4:8] = 97
    assert torch.equal(weights, few.weights(changed, scores, None))
    assert not torch.equal(all_of_it.weights(tokens, scores, None), all_of_it.weights(changed, scores, None))
    assert set(weights.exp().unique().tolist()) == {0.0, 1.0}
    for joining, match in (
        (Joining(prefix=9), "--prefix 9: choose 2 to 8"),
        (Joining(prior="cached"), "--prior is for forests that mix"),
        (Joining(top=1), "--top-experts needs --route growing"),
        (Joining(route="growing", prefix=4), "--prefix is of --route once"),
    ):
        with pytest.raises(ValueError, match=match):
            Speaker(path, joining)


def test_priors_while_speaking(branched: Built) -> None:
    system, folder = branched
    path = system.out / "seed-0/forests/m-ho-i-he-r1.json"
    difficult = str(folder / "difficult.txt")
    speaker = Speaker(path, Joining(prior="cached", top=1), difficult)
    assert speaker.voice("x").note.startswith("mixed from 1 of 3 experts") and "difficult" in speaker.voice("x").note
    expert = load_saved(forest(system, 1).experts[2].run)
    tokens = system.texts["difficult"].sequences("test", 1)
    alone = expert.logits(tokens[:, :16])[:, -1].log_softmax(-1).double()
    torch.testing.assert_close(speaker.voice("x").logits(tokens[:, :16])[:, 0], alone, rtol=0, atol=1e-6)

    moving = Speaker(path, Joining(prior="updating"))
    assert moving.believed is not None
    before = moving.believed.clone()
    assert torch.equal(before, mixture.uniform(3))
    moving.listen(tokens[0])
    moving.listen(tokens[0])
    scores = moving.joined.experts.scores(tokens)
    assert torch.equal(moving.believed, running(scores.expand(3, 2, -1))[:, 2])
    assert int(moving.believed.argmax()) == 2
    still = Speaker(path, Joining(prior="0.2,0.3,0.5"))
    still.listen(tokens[0])
    assert still.believed is not None and still.believed.exp().tolist() == pytest.approx([0.2, 0.3, 0.5])
    for joining, data, match in (
        (Joining(prior="cached"), None, "--prior cached needs --data"),
        (Joining(), difficult, "--data is the text of a cached prior"),
        (Joining(prior="0.5,0.5"), None, "give 3 numbers"),
        (Joining(route="growing"), None, "--prefix and --route are for forests that route"),
    ):
        with pytest.raises(ValueError, match=match):
            Speaker(path, joining, data)


def test_given_shares_are_numbers_that_sum_to_one() -> None:
    assert parse_prior("0.25,0.75", 2).exp().tolist() == [0.25, 0.75]
    for shares in ("0.5", "0.5,0.6", "1.5,-0.5", "a,b"):
        with pytest.raises(ValueError, match="give 2 numbers of at least 0 that sum to 1"):
            parse_prior(shares, 2)
    scores_ET = torch.tensor([[-1.0, -2.0], [-2.0, -4.0]], dtype=torch.float64)
    believed = parse_prior("0.25,0.75", 2)
    posterior = (believed + scores_ET.sum(1)).softmax(0)
    found = following(believed, scores_ET, first=False, decay=0.3).exp()
    torch.testing.assert_close(found, 0.7 * believed.exp() + 0.3 * posterior)


def test_a_forest_of_one_is_its_expert_to_the_bit_and_the_shortest_context_counts(
    branched: Built, tmp_path: Path
) -> None:
    system, _ = branched
    member = forest(system, 1).experts[1]
    run, tokens = load_saved(member.run), system.texts["medium"].sequences("test", 5)
    joined = Joined(Forest(system="hdee", experts=(member,)), Joining())
    scores = joined.experts.scores(tokens)
    assert torch.equal(mixture.mix(scores, joined.weights(tokens, scores, None)), score(run, tokens))
    model, start = replace(run.config.model, context=12), replace(run.config.run, start="")
    short = ExpertJob(name="short", config=replace(run.config, model=model, run=start), role="expert")
    train(short, tmp_path, JobProgress())
    mixed = Served.load([member, ForestMember(name="short", run=tmp_path / "short")])
    assert mixed.context == 12
    assert mixed.scores(tokens[:, :13]).shape == (2, 5, 12)
    with pytest.raises(ValueError, match="longer than the experts' shortest context of 12"):
        mixed.scores(tokens)
