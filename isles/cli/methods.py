"""`isles methods`: what `--method` takes."""

from __future__ import annotations


def methods() -> None:
    """List the methods."""
    from isles.replicas import METHODS

    width = max(map(len, METHODS))
    for name, (place, what) in METHODS.items():
        print(f"{name:<{width}}  {what}  ({place})")
    print("or package.module:Class for a method of your own; settings: isles config --method NAME")
