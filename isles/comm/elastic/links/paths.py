"""How each pair of workers is connected, as one of them tells the lighthouse."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isles.fields import MANY, Float, Int, Str, read

MOST = 256
"""SeatPaths that one worker tells of: those with the most bytes."""
PathRow = tuple[int, str, float, int, int]
"""A peer's seat; how this worker sends to it now ("" while it does not); the shortest round trip of that connection in
seconds, 0 where unknown; bytes sent to that peer and taken from it so far, of messages.
"""
SeatPaths = Annotated[tuple[tuple[Int, Int, Str, Float, Int, Int], ...], MANY]
"""Each with the seat before it whose worker tells of it."""
_Bytes = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]
_Rows = Annotated[
    list[
        tuple[
            Annotated[int, Field(strict=True, ge=0, lt=1 << 30)],
            Annotated[Str, Field(max_length=40)],
            Annotated[float, Field(ge=0, lt=1e6)],
            _Bytes,
            _Bytes,
        ]
    ],
    Field(max_length=MOST, fail_fast=True),
]


def told_paths(told: object) -> list[PathRow]:
    """Rows as another machine tells them. ValueError where they are none."""
    return read(_Rows, told, "a list of paths that is none")
