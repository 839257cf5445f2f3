"""What copies of the model exchange, when, with whom, and how it is applied: one file a method.

`METHODS` is the table of names a user types; a method of one's own is named "package.module:Class".
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from isles.errors import unknown_name

if TYPE_CHECKING:
    from isles.replicas.sync import ReplicaSync

METHODS: dict[str, tuple[str, str]] = {
    "none": ("isles.replicas.none:NoSync", "every worker trains alone"),
    "ddp": ("isles.replicas.ddp:DDP", "average gradients every step"),
    "localsgd": ("isles.replicas.localsgd:LocalSGD", "average parameters every H steps"),
    "diloco": ("isles.replicas.diloco:DiLoCo", "outer Nesterov step on the mean change of H steps"),
    "noloco": ("isles.replicas.noloco:NoLoCo", "outer step with one random partner every H steps"),
}


def method(name: str) -> type[ReplicaSync]:
    """The class behind a name of `METHODS`, or behind "package.module:Class". ValueError names what is wrong."""
    place = METHODS[name][0] if name in METHODS else name
    module, _, attribute = place.partition(":")
    if not attribute:
        raise ValueError(unknown_name("method", name, METHODS) + ", or package.module:Class for your own")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: a relative or empty name
        raise ValueError(f"method {name!r} cannot be imported: {error}") from error
    from isles.replicas.sync import ReplicaSync

    if not (isinstance(found, type) and issubclass(found, ReplicaSync)):
        raise ValueError(f"method {name!r} is no isles.ReplicaSync: derive its class from ReplicaSync or OuterSync")
    return found
