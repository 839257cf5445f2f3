"""What givers and takers of files ask about each other."""

from __future__ import annotations

from typing import Protocol


class Guide(Protocol):
    """`Pairs`."""

    def introduction(self, peer: int) -> bytes | None:
        """By which a message to `peer` is sealed (16 bytes); None while that is not known. May wait."""
        ...

    def expected(self, sender: int) -> bytes:
        """By which a message of `sender` must be sealed."""
        ...


class Trusting:
    """Where all are one program's, as in a test: nobody is introduced."""

    def introduction(self, peer: int) -> bytes:
        return bytes(16)

    def expected(self, sender: int) -> bytes:
        return bytes(16)
