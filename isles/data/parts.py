"""Named parts of a text: `data.path` and `data.validation_path` as tables, and `data.mixture`. Loads no NumPy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


def named(path: str | Mapping[str, str]) -> dict[str, str]:
    """Paths by the names of their parts, sorted, so that all machines agree; a path alone has the name ""."""
    return {name: path[name] for name in sorted(path)} if isinstance(path, Mapping) else {"": path}


def check_text(config: Any) -> None:
    """ValueError, with key and mend, where a DataConfig names texts or shares of them that cannot be."""
    for key in ("path", "source", "validation_path", "tokenizer", "text_key", "cache"):
        paths = getattr(config, key)
        if not isinstance(paths, str | dict if key.endswith("path") else str):
            raise ValueError(f"data.{key} = {paths!r} is not a string; put it in quotes")
        if isinstance(paths, dict) and not 0 < len(paths) <= 32:  # each has its own loss in a line of metrics
            raise ValueError(f"data.{key} has {len(paths)} names; give 1 to 32")
        for name, path in (paths if isinstance(paths, dict) else {}).items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"data.{key} has the name {name!r}; use up to 32 letters, digits, _ and -")
            if not isinstance(path, str) or not path:
                raise ValueError(f"data.{key}.{name} = {path!r} is no path; give a file or a folder")
    if not config.tokenizer:
        raise ValueError('data.tokenizer is empty; use "bytes" or the path of a tokenizer.json')
    if config.validation_path and (fraction := config.validation_fraction) != type(config).validation_fraction:
        raise ValueError(f"data.validation_fraction = {fraction!r} beside data.validation_path; leave one out")
    if config.mixture is None:
        return
    if config.split == "by_file" or not isinstance(config.path, dict) or not isinstance(config.mixture, dict):
        raise ValueError('data.mixture is for parts and split = "iid"; write tables of path and mixture, or drop it')
    for name in {**config.mixture, **config.path}:
        if name not in config.path:
            raise ValueError(f"data.mixture.{name} is no name of data.path; use {', '.join(named(config.path))}")
        share = config.mixture.get(name)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
            mend = "give its share, a number above 0, or take it out of data.path"
            raise ValueError(f"data.mixture.{name} {'is missing' if share is None else f'= {share!r}'}; {mend}")


def apportioned(count: int, shares: Sequence[float]) -> list[int]:
    """`count` things by shares, each number at most one off; their sum is `count`."""
    total = math.fsum(shares)
    return [until - since for since, until in pairwise([0, *(round(x / total * count) for x in accumulate(shares))])]
