"""Whose turn it is to step: the method's, not that of its inner optimizer, or of an older method."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from isles.wrapping import Wrapping, each_of

_LATEST = WeakIdKeyDictionary()  # by parameter: a weak reference to the method that was made last around it


class Guarded(Wrapping):
    """The part of `ReplicaSync` that minds other steps than its own."""

    guards_inner = False
    """Whether nobody else may step the inner optimizer now."""
    _replaced_by = ""  # the kind of the method that was made later around some of the same parameters

    def _take_over(self) -> None:
        """Called when it is made."""
        for parameter in self.parameters:
            before = _LATEST.get(parameter, lambda: None)()
            while isinstance(before, Guarded) and before is not self.inner:  # an island's method, then the one inside
                before.replace(type(self).__name__)
                before = before.inner
            _LATEST[parameter] = weakref.ref(self)
        for one in each_of(self.inner):
            if hasattr(one, "_optimizer_step_pre_hooks"):  # an optimizer of the user's own may lack what torch's have
                one.register_step_pre_hook(_Guard(weakref.ref(self)))
        self.guards_inner = True

    def replace(self, by: str) -> None:
        """A method was made around the same parameters, of kind `by`: this one's next step is refused."""
        self._replaced_by, self.guards_inner = by, False

    def _refuse_replaced(self) -> None:
        if self._replaced_by:
            name = type(self).__name__
            raise ValueError(
                f"{self._replaced_by} was made around the same parameters after this {name}: step that one alone; "
                f"several optimizers of a model go together, isles.{name}(model, [muon, adamw], ...)"
            )

    def _makes_state(self) -> bool:
        """True after a step that torch.distributed.checkpoint takes, with rates of 0, to have an optimizer make its
        state: the inner one has made it, and no step was done.
        """
        asking = None if self.state else sys.modules.get("torch.distributed.checkpoint.state_dict")
        code = None if asking is None else asking._init_optim_state.__code__
        frame = None if code is None else sys._getframe()
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is not None:
            with self._own_step():
                self.inner.step()
                self.catch_up()
        return frame is not None

    @contextmanager
    def _own_step(self) -> Iterator[None]:
        """Around steps of the inner optimizer that the method takes, and that may fail."""
        self.guards_inner = False
        try:
            yield
        finally:
            self.guards_inner = True


class _Guard:
    """What torch calls before a step of an inner optimizer. In a copy of that it guards nothing."""

    def __init__(self, method: weakref.ref[Guarded] | None = None) -> None:
        self._method = method

    def __call__(self, *_: object) -> None:
        method = None if self._method is None else self._method()
        if method is not None and method.guards_inner:
            name = type(method).__name__
            raise ValueError(
                f"step() of the inner optimizer, which has {name} around it: {name} would not know what was learned; "
                f"call step() of what isles.{name}(...) returned, or consolidate() it before"
            )

    def __reduce__(self) -> tuple[type[Any], tuple[()]]:
        return _Guard, ()
