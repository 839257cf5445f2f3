"""Clusters on the virtual clock whose nodes come, leave and die: who comes holds the others' bits, new clusters count
in the mean, no text is read twice, and nobody hangs.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.network.clusters import ClusterNode, encode_node, form_clusters
from isles.training.clusters.node import growth_of
from tests.cli.command import isles
from tests.training.clusters.changing import FOUR, Watched, alike, config

LONG = pytest.mark.long
EVENTS: list[dict[str, Any]] = [
    {"at": 0.1, "join": 2},  # 4 and 5: a new cluster after step 4
    {"at": 0.45, "kill": 1},
    {"at": 0.5, "join": 1},  # 6: in its place after step 8
    {"at": 0.75, "leave": 2},
    {"at": 0.8, "join": 1},  # 7: in its place after step 12
]


def means(run: Watched, step: int) -> None:
    """What all hold after an average is the mean of what the clusters that took part held before."""
    before, after = run.before[step], run.after[step]
    names = {name for rank in after for name in before[rank]}
    assert names
    for name in names:
        held = [before[rank][name][0].double() for rank in after if name in before[rank]]
        mean = torch.stack(held).mean(0)
        for rank in after:
            if name in after[rank]:
                assert (after[rank][name][0].double() - mean).abs().max() <= 1e-7 * max(
                    1.0, 4 * float(mean.abs().max())
                )


def test_who_comes_makes_clusters_takes_places_and_holds_the_others_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(config(), tmp_path, EVENTS)
    run.watch(monkeypatch)
    summary = run.run()
    run.check()
    assignment = run.finished[0].agreement.assignment
    assert assignment.clusters == ((0, 6), (7, 3), (4, 5)) and assignment.whole == [0, 1, 2]
    assert {key: summary[key] for key in ("joins", "deaths", "leaves", "replicas", "workers")} == {
        "joins": 4, "deaths": 1, "leaves": 1, "replicas": 3, "workers": 6,
    }  # fmt: skip
    assert summary["val_loss"] == summary["val_loss_replicas"]
    alike(run.loaded[4], ((0, 1), (4, 5)), moments=True)
    alike(run.loaded[8], ((2, 3), (0, 6)), moments=True)
    given = run.after[12][2]
    assert all(torch.equal(a, b) for name in given for a, b in zip(given[name], run.loaded[12][7][name], strict=True))
    for step, clusters in ((4, 2), (8, 2), (12, 3), (16, 3)):
        means(run, step)
        assert len(run.after[step]) == 2 * clusters
    assert len(set(run.read)) == len(run.read) > summary["tokens"] // 16 + 12 * 4  # these 12 steps were worker 2's
    assert all(worker.server and worker.server.schedule.last_epoch == 16 for worker in run.finished)


@LONG
def test_what_nodes_tell_of_themselves_says_where_a_new_cluster_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config("run.steps=8", "pipeline.ravnest.clusters=[[2],[2]]")
    run, memory = Watched(made, tmp_path, [{"at": 0.1, "join": 2}]), 0.95 * growth_of(made).load.least
    run.watch(monkeypatch)
    nodes = [ClusterNode(name="", memory=memory, speed=speed, bandwidth=1e9) for speed in (1e9, 3e10)]
    run.machines = {4: encode_node(nodes[0]), 5: encode_node(nodes[1])}
    run.run()
    run.check()
    (cluster,) = form_clusters(nodes, growth_of(made).load)
    assignment = run.finished[0].agreement.assignment
    assert assignment.clusters[2] == tuple(4 + number for number in cluster.nodes)
    assert assignment.cuts == ((2,), (2,), cluster.split.cuts) and cluster.split.cuts != (2,)
    means(run, 8)


JOIN = [{"at": 0.1, "join": 2}]  # taken in after step 4, at 0.34 s
HAND = [{"at": 0.1, "join": 1}, {"at": 0.2, "leave": 2}]  # worker 4 takes the place after step 4
CASES = [
    *((JOIN, victim, 0.0) for victim in (4, 5)),
    *((JOIN, victim, 0.3) for victim in range(4)),
    (HAND, 4, 0.0),
    *((HAND, victim, 0.3) for victim in (0, 2, 3)),
]


def lost_after(folder: Path, case: tuple[list[dict[str, Any]], int, float], after: int) -> Watched | None:
    """A run in which the victim ends after so many messages from that time on; None where it has not sent as many."""
    events, victim, since = case
    run = Watched(config("run.steps=8", "run.validate_every=0"), folder, events)
    run.dies = (victim, since, 0.55, after)  # the next average is at 0.66
    with pytest.MonkeyPatch.context() as patched:
        run.watch(patched)
        run.run()
    return run if run.ended else None


@pytest.mark.parametrize(("case", "after"), [(CASES[7], 9)], ids=["who leaves"])
def test_who_is_lost_while_somebody_comes(tmp_path: Path, case: Any, after: int) -> None:
    """The others are in the same clusters, and all whole clusters hold the same."""
    run = lost_after(tmp_path, case, after)
    assert run is not None
    run.check()


@LONG
@pytest.mark.parametrize("case", CASES, ids=[f"{len(events)} events, {victim}" for events, victim, _ in CASES])
def test_who_is_lost_at_a_third_of_all_messages_while_somebody_comes(tmp_path: Path, case: Any) -> None:
    for after in range(CASES.index(case) % 3, 400, 3):
        run = lost_after(tmp_path / str(after), case, after)
        if run is None:
            assert after > 20
            return
        run.check()
    raise AssertionError("it never came to its end")


@LONG
@pytest.mark.parametrize("seed", range(20))
def test_two_lost_while_somebody_comes_and_leaves(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    events = [*JOIN, {"at": 0.15, "join": 1}, {"at": 0.2, "leave": 2}]
    events += [{"at": round(draw.uniform(0.05, 0.6), 4), "kill": rank} for rank in draw.sample([0, 1, 4, 5, 6], 2)]
    events = [event | {"at": max(event["at"], 0.16)} if "kill" in event else event for event in events]
    run = Watched(config("run.steps=12", "run.validate_every=0"), tmp_path, events)
    with pytest.MonkeyPatch.context() as patched:
        run.watch(patched)
        run.run()
    run.check()


@LONG
@pytest.mark.parametrize(
    ("events", "clusters"),
    [
        ([{"at": 0.1, "leave": 1}], ((2, 3),)),  # nobody takes its place: its cluster goes
        ([{"at": 0.1, "leave": 1}, {"at": 0.1, "leave": 3}], ((2, 3),)),  # one holds what nobody else does, and stays
        ([{"at": 0.1, "leave": 0}, {"at": 0.1, "leave": 1}, {"at": 0.15, "join": 1}], ((2, 3),)),  # one for two
        ([{"at": 0.1, "join": 1}, {"at": 0.12, "leave": 4}], ((0, 1), (2, 3))),  # it has only just come
        ([{"at": 0.1, "join": 2}, {"at": 0.5, "leave": 4}], ((0, 1), (2, 3))),  # of the new cluster
    ],
)
def test_who_leaves(tmp_path: Path, events: Any, clusters: Any) -> None:
    run = Watched(config(), tmp_path, events)
    with pytest.MonkeyPatch.context() as patched:
        run.watch(patched)
        run.run()
    run.check()
    assignment = run.finished[0].agreement.assignment
    assert tuple(assignment.clusters[number] for number in assignment.whole) == clusters


@LONG
def test_one_cluster_that_others_join(tmp_path: Path) -> None:
    """Of one stage more each time: the first is alone, and loses a node to a newcomer without a pause."""
    events = [{"at": 0.1, "join": 2}, {"at": 0.6, "leave": 0}, {"at": 0.65, "join": 1}]
    run = Watched(config("pipeline.ravnest.clusters=[[2]]", "world.workers=2"), tmp_path, events)
    with pytest.MonkeyPatch.context() as patched:
        run.watch(patched)
        summary = run.run()
    run.check()
    assert run.finished[0].agreement.assignment.clusters == ((4, 1), (2, 3)) and summary["replicas"] == 2


@LONG
def test_a_soak_of_nodes_that_come_and_go(tmp_path: Path) -> None:
    """200 steps; a node is killed, leaves or joins every 3."""
    draw, here, events, latest = random.Random(4), list(range(4)), [], 4
    for number in range(1, 60):
        if len(here) < 6 or (len(here) < 9 and draw.random() < 0.4):
            events.append({"at": 0.28 * number, "join": 1})
            here.append(latest)
            latest += 1
        else:
            gone = here.pop(draw.randrange(len(here)))
            events.append({"at": 0.28 * number, draw.choice(["kill", "leave"]): gone})
    more = ("run.steps=200", "run.validate_every=50", "run.log_every=50")
    run = Watched(config(*more, "pipeline.ravnest.spares=1"), tmp_path, events)
    with pytest.MonkeyPatch.context() as patched:
        run.watch(patched)
        summary = run.run()
    run.check()
    print(summary["joins"], summary["deaths"], summary["leaves"], summary["replicas"], summary["val_loss"])
    assert summary["deaths"] > 8 and summary["leaves"] > 8 and len(set(run.read)) == len(run.read)


@LONG
def test_the_same_again_and_by_the_command(tmp_path: Path) -> None:
    """Bit for bit, with jitter."""
    from safetensors.torch import load_file

    made = []
    for name in "ab":
        Watched(config("world.virtual.step_jitter=0.3"), tmp_path / name, EVENTS).run()
        made.append(load_file(str(tmp_path / name / "run" / "model.safetensors")))
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    sets = [word for each in FOUR if "backend" not in each for word in ("--set", each)]
    (tmp_path / "plain.toml").write_text("")
    trace = str(tmp_path / "a" / "trace.jsonl")
    code, out, error = isles("simulate", "plain.toml", "--churn", trace, "--json", *sets, folder=tmp_path)
    assert code == 0, error
    assert "worker 4 has joined, and is on standby from step 4 on" in error and '"joins": 4' in out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("data.batch_mode=global",), 'data.batch_mode = "global" does not go with clusters that come and go'),
        (("data.split=by_file",), 'data.split = "by_file" does not go with clusters that come and go'),
        (("world.elastic.max_members=9",), "world.elastic.max_members = 9 does not go with --churn: the trace"),
        (
            ("world.elastic.join_state=anchors",),
            'world.elastic.join_state = "anchors" does not go with --churn and peers: who comes',
        ),
    ],
)
def test_what_does_not_go_with_newcomers_is_refused(tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Watched(config(*more), tmp_path, JOIN)
