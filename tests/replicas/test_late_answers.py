"""Streaming DiLoCo, delayed and Eager updates against oracles in plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.codecs import codec
from isles.comm.errors import DeadlinePassed
from isles.comm.mesh import Mesh
from isles.comm.transport import Deadlines
from isles.replicas.loop.fragment import cut
from isles.replicas.methods.eager import EagerDiLoCo
from tests.replicas.workers import HALVES, LINKS, Net, bits, sgd, train_step, weights, wrap

EVERY = 3


def run(worker: Any, workers: int, *args: Any, **keywords: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, links=LINKS, args=args, **keywords)


def anchors(optimizer: Any) -> Tensor:
    return torch.cat([fragment.anchor for fragment in optimizer.fragments]).clone()


def trained(world: Mesh, name: str, steps: int, options: dict[str, Any]) -> tuple[list[float], str, int]:
    model = Net()
    optimizer = wrap(world, name, model, sync_every=EVERY, **options)
    losses = [train_step(optimizer, world.rank, step) for step in range(1, steps + 1)]
    optimizer.finish()
    return losses, bits(weights(model)), world.world.traffic["outer"].bytes_sent


DILOCO = {"outer_lr": 0.4, "outer_momentum": 0.9}
PLAIN = {"fragments": "whole", "overlap_steps": 0, "merge_alpha": 0.0, "codec": "none", **DILOCO}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_streaming_in_its_plainest_form_is_diloco(workers: int) -> None:
    """One fragment, tau = 0, alpha = 0: the same losses, weights and bytes, to the bit."""
    streaming = run(trained, workers, "streaming-diloco", 11, PLAIN)
    assert streaming == run(trained, workers, "diloco", 11, DILOCO)


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_alpha_1_is_training_apart(overlap: int) -> None:
    """The live weights never land: to the bit those of a worker that talks to nobody, while anchors do move."""

    def worker(world: Mesh) -> None:
        alone, model = Net(), Net()
        by_itself = wrap(world, "none", alone)
        options = {"fragments": HALVES, "overlap_steps": overlap, "merge_alpha": 1.0}
        optimizer = wrap(world, "streaming-diloco", model, sync_every=EVERY, **options)
        before = anchors(optimizer)
        for step in range(1, 12):
            assert train_step(optimizer, world.rank, step) == train_step(by_itself, world.rank, step)
        assert bits(weights(model)) == bits(weights(alone)) and not torch.equal(anchors(optimizer), before)

    run(worker, 2)


@pytest.mark.parametrize("options", [{}, {"codec": "fp4"}, {"overlap_steps": (0, 1, 2)}, {"first_sync": "offset"}])
def test_every_fragment_obeys_diloco_on_its_own_clock(options: dict[str, Any]) -> None:
    """From the outer gradients that were sent, recorded: anchors follow the Nesterov recursion, equal on all workers;
    a fragment lands tau steps after its sending and takes the local share alpha of the weights of that moment.
    """
    tau, alpha = options.get("overlap_steps", 1), 0.25

    def worker(world: Mesh) -> list[Any]:
        model = Net(dtype=torch.float64)
        given = {"fragments": HALVES, "merge_alpha": alpha, "codec": "none", **options}
        optimizer: Any = wrap(world, "streaming-diloco", model, sgd, sync_every=EVERY, **given)
        own = tau if isinstance(tau, int) else tau[world.rank]
        offsets = [0, 2]  # round(3 / 2), half to even
        velocity = [torch.zeros_like(fragment.anchor) for fragment in optimizer.fragments]
        anchor = [fragment.anchor.clone() for fragment in optimizer.fragments]
        live: list[Tensor] = []  # just after the inner step
        optimizer.inner.register_step_post_hook(
            lambda *_: live.append([fragment.flat.read(fragment.flat.new()) for fragment in optimizer.fragments])
        )
        sent: list[Any] = []
        for step in range(1, 15):
            train_step(optimizer, world.rank, step)
            for q, fragment in enumerate(optimizer.fragments):
                due = [s for s in range(1, step + 1) if (s - offsets[q]) % EVERY == 0]
                due = [s for s in due if s >= EVERY or given.get("first_sync") == "offset"]
                if step in due:
                    outgoing = anchor[q] - live[-1][q]
                    world.world.mean(outgoing, codec(given["codec"]), channel="eval")
                    sent.append((step, q, outgoing))
                landing = [s for s in due if s + own == step]
                if landing:
                    g = next(mean for s, at, mean in sent if (s, at) == (landing[0], q))
                    velocity[q] = 0.9 * velocity[q] + g
                    anchor[q] = anchor[q] - 0.4 * (g + 0.9 * velocity[q])
                    torch.testing.assert_close(fragment.anchor, anchor[q], rtol=0, atol=1e-6)
                    anchor[q] = fragment.anchor.clone()
                    merged = alpha * live[-1][q] + (1 - alpha) * anchor[q]
                    now = fragment.flat.read(fragment.flat.new())
                    torch.testing.assert_close(now, merged, rtol=0, atol=1e-12)
        return [bits(fragment.anchor) for fragment in optimizer.fragments]

    results = run(worker, 3)
    if isinstance(tau, int):
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("delay", [1, 2])
def test_delayed_is_the_outer_step_on_an_old_mean(delay: int) -> None:
    """x(k+1) = Outer(x(k), A(k - d)), the first d means 0; all workers equal at every boundary."""

    def worker(world: Mesh) -> None:
        model = Net(dtype=torch.float64)
        optimizer: Any = wrap(world, "delayed", model, sgd, sync_every=EVERY, outer_delay=delay, outer_lr=0.3)
        live: list[Tensor] = []
        optimizer.inner.register_step_post_hook(lambda *_: live.append(weights(model)))
        x, v, means = weights(model), torch.zeros_like(weights(model)), []
        for step in range(1, 25):
            train_step(optimizer, world.rank, step)
            if step % EVERY == 0:
                mean = x - live[-1]
                world.world.mean(mean, codec("none"), channel="eval")
                means.append(mean)
                late = means[-1 - delay] if len(means) > delay else torch.zeros_like(x)
                v = 0.9 * v + late
                x = x - 0.3 * (late + 0.9 * v)
                torch.testing.assert_close(weights(model), x, rtol=0, atol=1e-12)

    run(worker, 3)


# Eager.


def eager_rounds(world: Mesh, cls: type[EagerDiLoCo], delay: int, momentum: float, rounds: int) -> dict[str, Any]:
    model = Net(dtype=torch.float64)
    inner = sgd(model)
    options = {"outer_lr": 0.4, "outer_momentum": momentum, "outer_delay": delay}
    optimizer: Any = cls(model, inner, world.outer, sync_every=EVERY, **options)
    live: list[Tensor] = []
    inner.register_step_post_hook(lambda *_: live.append(weights(model)))
    start, own, apart = anchors(optimizer), [], 0.0
    for step in range(1, EVERY * rounds + 1):
        before = anchors(optimizer)
        train_step(optimizer, world.rank, step)
        if step % EVERY == 0:
            own.append(before - live[-1])
            now = anchors(optimizer)
            mean = now.clone()
            world.world.mean(mean, codec("none"), channel="eval")
            apart = float((now - mean).abs().max())
    end = anchors(optimizer)
    optimizer.finish()
    return {"start": start, "own": own, "end": end, "apart": apart, "drained": anchors(optimizer)}


@pytest.mark.parametrize(
    ("delay", "rounds"), [(2, 60), *(pytest.param(delay, 200, marks=pytest.mark.long) for delay in (1, 2))]
)
def test_eager_telescopes_without_momentum(delay: int, rounds: int) -> None:
    """In float64: G_m = G_0 - lr (sum of all means but the last d + (1/M) own shares of the last d), to
    1e-12; drained, all workers are equal.
    """
    workers = 3
    results = run(eager_rounds, workers, EagerDiLoCo, delay, 0.0, rounds)
    means = [sum(result["own"][k] for result in results) / workers for k in range(rounds)]
    for result in results:
        fresh = sum(result["own"][k] for k in range(rounds - delay, rounds)) / workers
        wanted = result["start"] - 0.4 * (sum(means[: rounds - delay]) + fresh)
        torch.testing.assert_close(result["end"], wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(result["drained"], results[0]["drained"], rtol=0, atol=1e-12)


class StaleAndFresh:
    """The mutant: fresh/M + (M-1)/M A counts the own stale share twice, and replicas drift apart."""

    needs_own = True

    def read(self, mean: Tensor, fresh: Tensor | None, own: Tensor | None, participants: int) -> Tensor:
        mean.mul_((participants - 1) / participants)
        return mean if fresh is None else mean.add_(fresh, alpha=1 / participants)


class WrongEager(EagerDiLoCo):
    reading = StaleAndFresh()


def test_the_wrong_eager_rule_drifts() -> None:
    """Of two workers after 60 rounds: over 10 times further apart than with the right rule."""
    right, wrong = (run(eager_rounds, 2, cls, 1, 0.9, 60)[0]["apart"] for cls in (EagerDiLoCo, WrongEager))
    assert wrong > 10 * right > 0


def test_eager_alone_is_diloco() -> None:
    """One worker: its fresh share is the whole mean, to the bit, for (A - own) + fresh with A = own."""

    def worker(world: Mesh, name: str) -> str:
        model = Net()
        optimizer = wrap(world, name, model, sync_every=EVERY, outer_lr=0.4)
        for step in range(1, 13):
            train_step(optimizer, 0, step)
        return bits(weights(model))

    assert run(worker, 1, "eager") == run(worker, 1, "diloco")


@pytest.mark.parametrize("name", ["delayed", "eager"])
def test_a_transfer_of_a_whole_round_is_hidden(name: str) -> None:
    """A link that is busy for 0.9 of a round: no blocked second, while DiLoCo waits and tau = 1 waits less."""
    nbytes = 4 * sum(parameter.numel() for parameter in Net().parameters()) + 32
    links = isles.Links(bandwidth=8 * nbytes / (0.9 * EVERY * 0.1), latency=0.0)

    def blocked(name: str, **options: Any) -> float:
        def worker(world: Mesh) -> float:
            optimizer = wrap(world, name, Net(), sync_every=EVERY, **options)
            start = world.world.traffic["outer"].blocked_seconds
            for step in range(1, 4 * EVERY + 1):
                train_step(optimizer, world.rank, step)
            return world.world.traffic["outer"].blocked_seconds - start

        return max(isles.run_virtual(worker, 2, links=links))

    waits = blocked("diloco")
    tau_1 = blocked("streaming-diloco", fragments="whole", codec="none")
    assert blocked(name) < 1e-9 < tau_1 < waits == pytest.approx(4 * 0.9 * EVERY * 0.1, rel=1e-6)


@pytest.mark.parametrize(("name", "delay"), [("delayed", 1), ("eager", 2)])
def test_a_worker_may_be_ahead_by_what_it_computes_meanwhile(name: str, delay: int) -> None:
    """Rounds of 30 s, a worker that takes 3 s longer for each, and a deadline of 10 s: the other one comes to be ahead
    by all that is under way, and still nobody is called late, at the end neither; one who does not come at all is.
    """

    def worker(world: Mesh, pause: float) -> float:
        optimizer = wrap(world, name, Net(), sync_every=EVERY, outer_delay=delay)
        for step in range(1, EVERY * 40 + 1):
            if step == EVERY * 39 and world.rank:
                world.transport.compute(pause)
            train_step(optimizer, world.rank, step)
        optimizer.finish()
        return world.transport.now()

    slow = {"step_seconds": 10.0, "speeds": [1.0, 1.1], "deadlines": Deadlines(outer=10.0, control=1e6)}
    ended = run(worker, 2, 0.0, **slow)
    assert max(ended) == pytest.approx(EVERY * 40 * 11.0, abs=1.0)
    with pytest.raises(DeadlinePassed, match="worker 1"):
        run(worker, 2, 1000.0, **slow)


@pytest.mark.parametrize("pause", [50.0, 80.0])
def test_late_answers_have_twice_the_time_that_is_computed_meanwhile(pause: float) -> None:
    """A round of 30 s lies between sending and landing, and the deadline is 10 s: 10 + 2 x 30 = 70 s, so that who is 50
    late is waited for, and who is 80 late is not.
    """

    def worker(world: Mesh) -> None:
        optimizer = wrap(world, "delayed", Net(), sync_every=3)
        for step in range(1, 16):
            if step == 9 and world.rank:
                world.transport.compute(pause)
            train_step(optimizer, world.rank, step)

    slow = {"step_seconds": 10.0, "deadlines": Deadlines(outer=10.0, control=1e6)}
    if pause < 70:
        run(worker, 2, **slow)
    else:
        with pytest.raises(DeadlinePassed, match=r"worker 1 did not answer on channel 'outer' within 70 s"):
            run(worker, 2, **slow)


# Fragments.


class Blocks(nn.Module):
    def __init__(self, blocks: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(blocks))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def named(model: nn.Module, fragments: Any, layers: int = 3) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in own] for own in cut(model, fragments, layers)]


def test_fragments_by_blocks() -> None:
    """Sequential, strided, and one of everything else; tied weights once; every parameter exactly once."""
    model = Blocks()
    layers = lambda *numbers: [f"blocks.{n}.{part}" for n in numbers for part in ("weight", "bias")]  # noqa: E731
    rest = ["embed.weight"]
    assert named(model, "whole") == [rest + layers(*range(7))]
    assert named(model, "sequential") == [layers(0, 1, 2), layers(3, 4, 5), layers(6), rest]
    assert named(model, "strided") == [layers(0, 3, 6), layers(1, 4), layers(2, 5), rest]
    own = (("embed", "blocks.0"), tuple(f"blocks.{n}" for n in range(1, 7)))
    assert named(model, own) == [rest + layers(0), layers(*range(1, 7))]


@pytest.mark.parametrize(
    ("fragments", "reported"),
    [
        ((("embed",), ("blocks.0",)), "'blocks.1.weight' is in none of them"),
        ((("embed", "blocks"), ("blocks.3",)), "'blocks.3.weight' is in number 0 and in number 1"),
        ((("embed", "blocks"), ("tail",)), "number 1 holds no trainable parameter"),
    ],
)
def test_fragments_that_do_not_fit(fragments: Any, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        cut(Blocks(), fragments, 1)


def test_fragments_are_numbered_in_a_byte() -> None:
    with pytest.raises(ValueError, match="301 are more than 256"):
        cut(Blocks(300), "strided", 1)


def test_eager_tells_many_workers_to_go_slowly() -> None:
    """The method and the same reading in a composition of one's own: where the outer step, outer_lr / (1 -
    outer_momentum), is above 1; not two workers.
    """

    def worker(world: Mesh, name: str, rate: float, momentum: float) -> list[str]:
        options = {"reading": "eager", "outer_delay": 1} if name == "custom" else {}
        optimizer = wrap(world, name, Net(), sync_every=EVERY, outer_lr=rate, outer_momentum=momentum, **options)
        return [notice for notice in optimizer.advise(100) if "fresh by" in notice]

    for name in ("eager", "custom"):
        assert run(worker, 3, name, 1.1, 0.0)[0] and run(worker, 3, name, 0.6, 0.5)[0]
        assert not run(worker, 3, name, 1.0, 0.0)[0] and not run(worker, 3, name, 0.5, 0.5)[0]
        assert not run(worker, 2, name, 1.1, 0.0)[0]


def test_a_model_without_blocks_has_no_pattern() -> None:
    with pytest.raises(ValueError, match=r"nn\.ModuleList"):
        cut(Net(), "strided", 3)


@pytest.mark.parametrize(
    ("name", "options", "reported"),
    [
        ("streaming-diloco", {"overlap_steps": 3}, "overlap_steps = 3: choose 0 or more, below sync_every = 3"),
        ("streaming-diloco", {"overlap_steps": -1}, "overlap_steps = -1"),
        ("streaming-diloco", {"overlap_steps": (1, 1, 1), "fragments": "whole"}, "names 3 workers of 2"),
        ("streaming-diloco", {"merge_alpha": 1.5}, "merge_alpha = 1.5"),
        ("streaming-diloco", {"fragments": "spiral"}, "unknown fragments 'spiral'"),
        ("streaming-diloco", {"layers_per_fragment": 0}, "layers_per_fragment = 0"),
        ("eager", {"outer_delay": 0}, "outer_delay = 0"),
        ("diloco", {"error_feedback": "both"}, "unknown error_feedback 'both'"),
        ("diloco", {"feedback_decay": 2}, "feedback_decay = 2"),
        ("diloco", {"feedback_decay": 0.5}, "feedback_decay = 0.5 has no error feedback to act on"),
        ("diloco", {"codec": "int5"}, "unknown codec 'int5'"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict[str, Any], reported: str) -> None:
    def worker(world: Mesh) -> None:
        with pytest.raises(ValueError, match=reported):
            wrap(world, name, Net(), sync_every=3, **options)

    run(worker, 2)
