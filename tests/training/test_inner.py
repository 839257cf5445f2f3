"""The inner optimizer: the schedule by hand values, and who is decayed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isles.models.decoder import Decoder
from isles.models.sizes import Shape
from isles.training.config.inner import InnerConfig, inner_notices, lr_factor
from isles.training.optimizer import inner_optimizer
from tests.training.runs import Told, run, tiny, write_text


def factors(steps: int, **settings: Any) -> list[float]:
    config = InnerConfig(**settings)
    return [lr_factor(step, steps, config) for step in range(1, steps + 1)]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rising = factors(10, warmup_steps=4, final_lr_fraction=0.1)[:4]
    assert rising == [0.25, 0.5, 0.75, 1.0]


def test_cosine_by_hand() -> None:
    """8 steps after a warm-up of 2: a quarter, half and the whole of the way down to 0.2."""
    rates = factors(10, warmup_steps=2, final_lr_fraction=0.2)
    assert rates[1] == 1.0
    assert rates[3] == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, abs=1e-15)
    assert rates[5] == pytest.approx(0.6, abs=1e-15)
    assert rates[9] == pytest.approx(0.2, abs=1e-15)
    assert rates[1:] == sorted(rates[1:], reverse=True)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear", [0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),  # eight steps from 1 to 0.2
        ("wsd", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),  # the last four of ten fall
        ("constant", [0.5, *9 * [1.0]]),
        ("inverse_sqrt", [0.5, 1.0, *(math.sqrt(2 / step) for step in range(3, 11))]),
    ],
)
def test_other_schedules_by_hand(schedule: str, rates: list[float]) -> None:
    """Ten steps, two of warm-up, down to 0.2, but for the two that do not aim there."""
    settings = {"schedule": schedule, "warmup_steps": 2, "final_lr_fraction": 0.2, "decay_fraction": 0.4}
    assert factors(10, **settings) == pytest.approx(rates, abs=1e-15)
    assert lr_factor(11, 10, InnerConfig(**settings)) == pytest.approx(
        math.sqrt(2 / 11) if schedule == "inverse_sqrt" else rates[-1], abs=1e-15
    )


def test_edges_of_schedules() -> None:
    assert factors(4, schedule="inverse_sqrt", warmup_steps=0, final_lr_fraction=0.6) == pytest.approx(
        [1, math.sqrt(1 / 2), 0.6, 0.6]
    )
    within = factors(4, schedule="wsd", warmup_steps=2, final_lr_fraction=0.0, decay_fraction=1.0)
    assert within == pytest.approx([0.5, 1.0, 0.5, 0.0])  # it decays after the warm-up, not in it
    assert factors(5, schedule="wsd", warmup_steps=0, final_lr_fraction=0.0, decay_fraction=0.01) == [1, 1, 1, 1, 0]


def test_a_key_that_the_schedule_does_not_use_is_reported() -> None:
    assert inner_notices(InnerConfig(schedule="constant", final_lr_fraction=0.3, warmup_steps=1), "adamw", 9) == [
        'inner.final_lr_fraction = 0.3: not used by inner.schedule = "constant"'
    ]
    assert inner_notices(InnerConfig(decay_fraction=0.3, warmup_steps=1), "adamw", 9) == [
        'inner.decay_fraction = 0.3: not used by inner.schedule = "cosine"'
    ]
    assert not inner_notices(InnerConfig(schedule="wsd", decay_fraction=0.3, warmup_steps=1), "adamw", 9)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
def test_the_last_step_has_the_final_fraction(fraction: float) -> None:
    assert factors(50, warmup_steps=10, final_lr_fraction=fraction)[-1] == pytest.approx(fraction, abs=1e-15)


def test_without_warm_up_the_cosine_begins_at_once() -> None:
    rates = factors(4, warmup_steps=0, final_lr_fraction=0.0)
    assert rates == pytest.approx([(1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)], abs=1e-15)


@pytest.mark.parametrize("warmup", [5, 6, 1000])
def test_a_run_within_its_warm_up_only_rises(warmup: int) -> None:
    rates = factors(5, warmup_steps=warmup)
    assert rates == [step / warmup for step in range(1, 6)]


def test_one_step() -> None:
    assert factors(1, warmup_steps=0, final_lr_fraction=0.1) == pytest.approx([0.1])
    assert factors(1, warmup_steps=1) == [1.0]


def test_after_the_end_the_rate_stays() -> None:
    """The scheduler looks one step ahead."""
    config = InnerConfig(warmup_steps=2, final_lr_fraction=0.3)
    assert lr_factor(11, 10, config) == lr_factor(99, 10, config) == pytest.approx(0.3)


def test_vectors_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    frozen = model[0].weight.new_zeros(2, 2).requires_grad_(False)
    model.register_parameter("frozen", nn.Parameter(frozen, requires_grad=False))
    optimizer = inner_optimizer(model, InnerConfig(lr=0.01, weight_decay=0.3, betas=(0.8, 0.95)), "adamw")
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert [p.ndim for p in decayed["params"]] == [2]
    assert [p.ndim for p in plain["params"]] == [1, 1, 1]
    assert all(group["lr"] == 0.01 and group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)


def test_no_empty_group() -> None:
    matrices = nn.Linear(3, 4, bias=False)
    assert len(inner_optimizer(matrices, InnerConfig(), "adamw").param_groups) == 1


def test_a_step_is_adamws_own() -> None:
    """Decay shrinks a matrix without gradient by lr * weight_decay, and leaves a vector alone."""
    model = nn.Linear(2, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inner_optimizer(model, InnerConfig(lr=0.1, weight_decay=0.5), "adamw").step()
    assert torch.allclose(model.weight, before["weight"] * (1 - 0.05))
    assert torch.equal(model.bias, before["bias"])


SMALL = Shape(d_model=8, layers=1, heads=2, ffn=16, vocab=11, context=4, tie_embeddings=False)


def named(model: nn.Module, tensors: list[Tensor]) -> list[str]:
    return [name for own in tensors for name, parameter in model.named_parameters() if parameter is own]


def test_muon_steps_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = Decoder(SMALL)
    optimizer = inner_optimizer(model, InnerConfig(optimizer="muon", lr=0.01, options={"momentum": 0.9}), "adamw")
    muon, matrices, vectors = optimizer.param_groups
    inside = ["attention.qkv", "attention.out", "mlp.gate", "mlp.up", "mlp.down"]
    assert named(model, muon["params"]) == [f"blocks.0.{name}.weight" for name in inside]
    assert named(model, matrices["params"]) == ["embed.weight", "head.weight"]
    assert named(model, vectors["params"]) == [
        "blocks.0.attention_norm.weight",
        "blocks.0.mlp_norm.weight",
        "norm.weight",
    ]
    assert (muon["momentum"], muon["nesterov"], muon["weight_decay"], vectors["weight_decay"]) == (0.9, True, 0.1, 0.0)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}


def test_a_step_of_muon_by_hand() -> None:
    """A gradient of equal singular values keeps its directions: five times the polynomial of Newton and Schulz on one
    number, and 0.2 sqrt(longest side) as the size. Decay is lr * weight_decay, as AdamW's.
    """
    model = Decoder(SMALL)
    weight = model.blocks[0].mlp.up.weight  # (16, 8)
    gradient = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    before, (turn, _) = weight.detach().clone(), torch.linalg.qr(gradient)
    weight.grad = 3.0 * turn
    inner_optimizer(model, InnerConfig(optimizer="muon", lr=0.01, weight_decay=0.5), "adamw").step()
    size = 1 / math.sqrt(8)  # of each of eight equal singular values, where the squares sum to 1
    for _ in range(5):
        size = 3.4445 * size - 4.7750 * size**3 + 2.0315 * size**5
    step = 0.01 * 0.2 * math.sqrt(16) * size * turn
    # Products in bfloat16 (8 bits) differ by up to 2.4 % of the largest entry, over 200 draws.
    assert torch.allclose(before * (1 - 0.01 * 0.5) - weight, step, rtol=0, atol=0.03 * float(step.abs().max()))
    assert 0.5 < size < 1.5


def test_an_optimizer_of_ones_own_is_called_with_groups_rate_and_options(tmp_path: Any) -> None:
    """AdamW by its name ends with the same bits as the built-in one."""
    text = write_text(tmp_path / "text.txt")
    own = ("inner.optimizer=torch.optim:AdamW", "inner.options={betas=[0.9, 0.95], fused=true}")
    run(tiny(text), tmp_path / "plain")
    run(tiny(text, *own), tmp_path / "own")
    plain, same = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "own"))
    assert plain == same


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["inner.optimizer=mun"], r"unknown inner.optimizer 'mun': did you mean 'muon'"),
        (["inner.options={eps=1}"], r'inner.options.eps is for your own optimizer or "muon", not for "auto"'),
        (["inner.optimizer=muon", "inner.options={betas=1}"], r"inner.options.betas: .* choose one of momentum, "),
        (
            ["inner.optimizer=muon", "inner.options={ns_steps=100}"],
            r"inner.options.ns_steps = 100 is no value of torch",
        ),
        (["inner.optimizer=torch.optim:NAdam", "inner.options={lr=1}"], r"options.lr: set inner.lr instead"),
        (["inner.optimizer=torch.optim:NAdam", "inner.options={mu=1}"], r"^inner.options.mu = 1: .* no such option"),
        (
            ["inner.optimizer=torch.optim:Rprop", "inner.weight_decay=0.2"],
            r"^inner.weight_decay = 0.2: .* leave it out",
        ),
        (["inner.optimizer=torch.optim:SparseAdam"], r"^inner.optimizer = .* fails in a step: RuntimeError"),
        (["inner.optimizer=torch.optim:LBFGS"], r"^inner.optimizer = .* cannot be made; .*parameter groups"),
        (["inner.optimizer=pathlib:Path"], r"^inner.optimizer = .* derive the class from torch.optim.Optimizer"),
        (["inner.optimizer=muon", "world.inner=2", "world.inside=fsdp"], r'"muon" does not go with fsdp: .*"ddp"'),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(more: list[str], says: str, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=says):
        tiny(write_text(tmp_path / "text.txt"), *more, method="diloco", workers=4)


def test_a_plan_of_memory_does_not_know_muon(tmp_path: Any) -> None:
    config = tiny(write_text(tmp_path / "text.txt"), "inner.optimizer=muon", "memory.method=auto")
    with pytest.raises(ValueError, match=r'inner.optimizer = "muon" does not go with a plan of memory: .* "adamw"'):
        run(config, tmp_path / "run")


def test_without_muon_in_torch_its_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r'inner.optimizer = "muon" needs torch 2.9 or later, this is 2'):
        inner_optimizer(Decoder(SMALL), InnerConfig(optimizer="muon"), "adamw")
    with pytest.raises(ValueError, match=r"no nn\.ModuleList of blocks"):
        inner_optimizer(nn.Linear(3, 4), InnerConfig(optimizer="muon"), "adamw")


@pytest.mark.parametrize(
    ("routing", "method"), [("swarm", "none"), pytest.param("ravnest", "localsgd", marks=pytest.mark.long)]
)
def test_peers_step_with_muon(routing: str, method: str, tmp_path: Any) -> None:
    """The stages that are there hold some of the blocks, and both optimizers."""
    settings = ["model.layers=2", "model.tie_embeddings=false", "pipeline.stages=2", "pipeline.microbatches=2"]
    settings += [f"pipeline.routing={routing}", "pipeline.clip=stage", "inner.optimizer=muon"]
    settings += ["pipeline.ravnest.average_optimizer=true"] if routing == "ravnest" else []
    told = Told()
    summary = run(tiny(write_text(tmp_path / "text.txt"), *settings, method=method, workers=4), tmp_path / "run", told)
    assert summary["val_loss"] < 5.5


def test_a_run_does_not_go_on_with_another_inner_optimizer(tmp_path: Any) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    run(tiny(text, "run.checkpoint_every=3", steps=4), out)
    for name in ("summary.json", "model.safetensors"):
        (out / name).unlink()
    for kind in ("sgd", "muon"):
        with pytest.raises(ValueError, match=r"of another inner optimizer: set inner\.optimizer in config\.toml back"):
            run(tiny(text, f"inner.optimizer={kind}", steps=4), out, resume=3)
