import subprocess
import sys
from pathlib import Path

import pytest

from isles.data import DataConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"split": "random"}, "data.split"),
        ({"batch_mode": "local"}, "data.batch_mode"),
        ({"batch_size": 0}, "data.batch_size"),
        ({"batch_size": 2.5}, "data.batch_size"),
        ({"batch_size": True}, "data.batch_size"),
        ({"validation_fraction": 1.0}, "data.validation_fraction"),
        ({"validation_fraction": -0.1}, "data.validation_fraction"),
        ({"validation_fraction": float("nan")}, "data.validation_fraction"),
        ({"validation_fraction": "0.1"}, "data.validation_fraction"),
        ({"validation_sequences": 0}, "data.validation_sequences"),
        ({"tokenizer": ""}, "data.tokenizer"),
        ({"text_key": 1}, "data.text_key"),
        ({"tokenizer": "ids"}, "data.vocab"),
        ({"tokenizer": "ids", "vocab": True}, "data.vocab"),
        ({"tokenizer": "ids", "vocab": -1}, "data.vocab"),
        ({"tokenizer": "ids", "vocab": 9, "ids_dtype": "int32"}, "data.ids_dtype"),
        ({"vocab": 256}, "data.vocab"),
        ({"ids_dtype": "uint32"}, "data.vocab and data.ids_dtype"),
        ({"path": None}, "data.path"),
        ({"validation_path": 5}, "data.validation_path"),
        ({"validation_path": "held.txt", "validation_fraction": 0.1}, "data.validation_fraction"),
        ({"validation_path": "held.txt", "validation_fraction": 0}, "data.validation_fraction"),
        ({"cache": 3}, "data.cache"),
    ],
)
def test_impossible_values_name_the_key_and_the_hint_in_one_line(values: dict, key: str) -> None:
    with pytest.raises(ValueError) as caught:
        DataConfig(**values)
    line = str(caught.value)
    assert line.startswith(key)
    assert "\n" not in line
    assert ";" in line  # what follows is the mend


def test_global_batch_must_divide() -> None:
    config = DataConfig(batch_mode="global", batch_size=10)
    assert config.batch_size_per_worker(5) == 2
    with pytest.raises(ValueError, match=r"^data\.batch_size = 10 .* does not divide by 4 workers; use 8$"):
        config.batch_size_per_worker(4)
    with pytest.raises(ValueError, match=r"use 64$"):
        config.batch_size_per_worker(64)
    assert DataConfig(batch_size=10).batch_size_per_worker(64) == 10


def test_the_config_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from isles.data import DataConfig; DataConfig(); "
        "assert not {'torch', 'numpy', 'pyarrow', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True)


def test_every_public_name_loads() -> None:
    import isles.data

    for name in isles.data.__all__:
        assert getattr(isles.data, name) is not None
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = isles.data.nothing_here
