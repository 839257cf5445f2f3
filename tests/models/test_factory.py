"""build, choose_device, autocast."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from isles.models import Decoder, ModelConfig, autocast, build, choose_device
from isles.models.factory import placement, take_device

CPU = torch.device("cpu")


def tiny(**given: object) -> ModelConfig:
    return ModelConfig(**{"d_model": 16, "layers": 1, "heads": 2, "ffn": 24, "context": 8, "device": "cpu", **given})


def window() -> torch.Tensor:
    return torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_build_gives_the_asked_format(dtype: str) -> None:
    model = build(tiny(dtype=dtype), seed=0)
    assert isinstance(model, Decoder)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert {p.device for p in model.parameters()} == {CPU}


def test_every_rank_starts_from_the_same_model() -> None:
    first, second = build(tiny(), seed=7, rank=0), build(tiny(), seed=7, rank=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_workers_share_the_gpus_of_a_machine() -> None:
    with mock.patch("torch.cuda.device_count", return_value=2):
        devices = [choose_device(tiny(device="auto"), rank) for rank in range(4)]
        assert devices == [torch.device("cuda", index) for index in (0, 1, 0, 1)]
        assert choose_device(tiny(device="cpu"), 1) == CPU
        assert {choose_device(tiny(device="cuda:1"), rank) for rank in range(3)} == {torch.device("cuda", 1)}
        with pytest.raises(ValueError, match=r'model\.device = "cuda:2" but torch sees 2 GPUs'):
            choose_device(tiny(device="cuda:2"))
    with mock.patch("torch.cuda.device_count", return_value=0):
        assert choose_device(tiny(device="auto"), 1) == CPU
        with pytest.raises(ValueError, match=r'model\.device = "cuda".*use model\.device = "cpu"'):
            choose_device(tiny(device="cuda"))


def test_a_worker_makes_its_gpu_the_current_one() -> None:
    """fully_shard puts parameters on the current one, whatever device they were on."""
    with mock.patch("torch.cuda.device_count", return_value=2), mock.patch("torch.cuda.set_device") as taken:
        assert [take_device(tiny(device=device), 3) for device in ("auto", "cuda:0", "cpu")] == [
            torch.device("cuda", 1),
            torch.device("cuda", 0),
            CPU,
        ]
    assert [call.args for call in taken.call_args_list] == [(torch.device("cuda", 1),), (torch.device("cuda", 0),)]


@pytest.mark.parametrize(
    ("device", "gpus", "workers", "line"),
    [
        ("auto", 0, 4, "4 workers on cpu"),
        ("auto", 2, 2, "2 workers on cuda:0, cuda:1"),
        ("auto", 1, 4, "4 workers on cuda:0; up to 4 share a GPU, whose memory must hold as many models"),
        ("cuda", 2, 3, "3 workers on cuda:0, cuda:1; up to 2 share a GPU, whose memory must hold as many models"),
        ("auto", 4, 1, "1 worker on cuda:0; GPUs idle: 3 (model.device, or more workers, would use them)"),
        ("cpu", 2, 4, "4 workers on cpu; GPUs idle: 2 (model.device, or more workers, would use them)"),
    ],
)
def test_where_workers_train_is_one_line(device: str, gpus: int, workers: int, line: str) -> None:
    with mock.patch("torch.cuda.device_count", return_value=gpus):
        assert placement(tiny(device=device), workers) == line


def test_bf16_autocast_is_finite_and_near() -> None:
    model = build(tiny(), seed=0)
    plain = model(window()).loss
    with autocast(tiny(autocast="bf16"), CPU):
        output = model(window())
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(plain.item(), rel=0.01)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters())


def test_no_autocast_is_no_context() -> None:
    assert isinstance(autocast(tiny(), CPU), nullcontext)


def test_fp16_on_a_cpu_is_refused_where_the_device_is_known() -> None:
    config = tiny(autocast="fp16", device="auto")
    with pytest.raises(ValueError, match=r'model\.autocast = "fp16" needs a GPU'):
        autocast(config, CPU)
    with mock.patch("torch.cuda.device_count", return_value=0), pytest.raises(ValueError, match=r"model\.autocast"):
        build(config, seed=0)


@pytest.mark.long
def test_a_compiled_model_keeps_its_names_and_stays_a_decoder() -> None:
    plain, compiled = build(tiny(), seed=0), build(tiny(compile=True), seed=0)  # nothing is compiled before a call
    assert isinstance(compiled, Decoder)
    assert list(plain.state_dict()) == list(compiled.state_dict())


def test_without_a_compiler_it_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert placement(tiny(), 1) == "1 worker on cpu"
    with pytest.raises(ValueError, match=r'^model.compile = "max-autotune" needs no-such-compiler on this machine: '):
        placement(tiny(compile="max-autotune"), 1)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs a C++ compiler and there is no g++")
@pytest.mark.long
def test_a_compiled_model_gives_the_same_loss() -> None:
    code = (
        "import torch; torch.set_num_threads(1); from isles.models import ModelConfig, build\n"
        "shape = dict(d_model=16, layers=1, heads=2, ffn=24, context=8, device='cpu')\n"
        "tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))\n"
        "runs = []\n"
        "for compile in (False, True, 'reduce-overhead', 'max-autotune'):\n"
        "    model = build(ModelConfig(compile=compile, **shape), seed=0)\n"
        "    loss = model(tokens).loss\n"
        "    loss.backward()\n"
        "    runs.append((loss.detach(), [p.grad for p in model.parameters()]))\n"
        "[torch.testing.assert_close(runs[0], other) for other in runs[1:]]\n"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning:torch._inductor", "-c", code], check=True, timeout=300)
