"""The [model] section: overrides, and one clear line for every impossible value."""

from __future__ import annotations

from typing import Any

import pytest

from isles.models import SIZES, ModelConfig


def test_the_default_is_the_embedded_size() -> None:
    assert ModelConfig().shape() == SIZES["0.12M"]


def test_overrides_lie_over_the_size() -> None:
    config = ModelConfig(size="35M", layers=3, vocab=256, tie_embeddings=False)
    shape = config.shape()
    assert (shape.layers, shape.vocab, shape.tie_embeddings) == (3, 256, False)
    assert (shape.d_model, shape.heads, shape.ffn) == (512, 8, 1344)


@pytest.mark.parametrize(
    ("given", "key", "hint"),
    [
        ({"size": "13M"}, "model.size", "choose one of"),
        ({"size": 13}, "model.size", "choose one of"),
        ({"d_model": 0}, "model.d_model", "at least 1"),
        ({"d_model": 63}, "model.d_model", "use 64"),
        ({"layers": -1}, "model.layers", "at least 1"),
        ({"heads": True}, "model.heads", "at least 1"),
        ({"heads": 5}, "model.heads", "use heads = 4"),
        ({"heads": 64}, "model.heads", "use heads = 32"),  # heads of width 1 have no pair to turn
        ({"ffn": 2.5}, "model.ffn", "whole number"),
        ({"vocab": 0}, "model.vocab", "at least 1"),
        ({"context": "128"}, "model.context", "whole number"),
        ({"tie_embeddings": "yes"}, "model.tie_embeddings", "true or false"),
        ({"compile": 1}, "model.compile", 'use true, false, "reduce-overhead", "max-autotune"'),
        ({"autocast": "fp8"}, "model.autocast", "none, bf16, fp16"),
        ({"device": "tpu"}, "model.device", "auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, "model.device", "auto, cpu, cuda, cuda:N"),
        ({"device": 0}, "model.device", "auto, cpu, cuda, cuda:N"),
        ({"dtype": "float16"}, "model.dtype", "float32, bfloat16, float64"),
        ({"autocast": "fp16", "device": "cpu"}, "model.autocast", "bf16"),
        ({"autocast": "bf16", "dtype": "float64"}, "model.autocast", 'model.dtype = "float32"'),
    ],
)
def test_an_impossible_value_names_its_key_and_the_hint(given: dict[str, Any], key: str, hint: str) -> None:
    given = {"d_model": 64, **given}
    with pytest.raises(ValueError) as error:
        ModelConfig(**given)
    text = str(error.value)
    assert text.startswith(key)
    assert hint in text
    assert "\n" not in text


def test_positional_values_are_refused() -> None:
    with pytest.raises(TypeError):
        ModelConfig("35M")  # type: ignore[misc]
