"""The weights that forward passes under way began with, kept until their backward pass is over.

Copy on write: a version costs memory only where an update comes while somebody still needs what it writes over. The
newest one is what the parameters hold; the optimizer sees no other, and its state has no versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class WeightVersions:
    """Versions of `parameters`, numbered from 0 by update."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._users: Counter[int] = Counter()
        self._kept: dict[int, list[Tensor]] = {}
        self.newest = 0
        """Number of updates so far."""

    @property
    def live(self) -> int:
        """How many versions take memory now, the newest among them."""
        return 1 + len(self._kept)

    def hold(self) -> int:
        """Keep the newest for whoever asks, until it is released. Returns its number."""
        self._users[self.newest] += 1
        return self.newest

    def release(self, version: int) -> None:
        """One user less; the last one's memory is given back."""
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version]
            self._kept.pop(version, None)

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """The parameters hold the weights of a version that somebody keeps. Nobody may write to them meanwhile."""
        if version == self.newest:
            yield
            return
        newest = [parameter.data for parameter in self._parameters]
        self._put(self._kept[version])
        try:
            yield
        finally:
            self._put(newest)

    def saving(self) -> saved_tensors_hooks:
        """A forward pass in it may be gone back through after updates, as long as its version is held: its graph keeps
        the tensors as they are now, not the parameters, which hold other ones then.
        """
        return saved_tensors_hooks(Tensor.detach, lambda kept: kept)

    def update(self) -> None:
        """Call before the parameters are written to: what is still needed of them stays as it is."""
        if self.newest in self._users:
            self._kept[self.newest] = [parameter.data for parameter in self._parameters]
            self._put([data.clone() for data in self._kept[self.newest]])
        self.newest += 1

    def _put(self, weights: Iterable[Tensor]) -> None:
        for parameter, data in zip(self._parameters, weights, strict=True):
            parameter.data = data
