"""What `data.source` = "package.module:Class" names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class DataSource(Protocol):
    """Documents from a class of your own, made as Class(data.path), and as Class(data.validation_path) if that is set.

    `iter()` begins at the first document each time, and always gives the same documents in the same order: text, or
    ids (a list, or an array of one dimension) with data.tokenizer = "ids".

    It may have `fingerprint`, a str that is another one when the documents are others, and `size`, an int: about how
    many characters (or ids) there are, for the estimate of the time left.
    """

    def __iter__(self) -> Iterator[str | list[int] | Any]: ...
