"""States that the lighthouse keeps, so that a run outlives its workers: one file for each worker of a member.

    RUN/states/round-40-place-0.safetensors

Those of the newest round of which all places are there count; a save that is cut off leaves the ones before, which
stay for whoever is taking them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from isles.durable import settle

_KEPT = 2  # rounds
_NAME = re.compile(r"round-(\d+)-place-(\d+)\.safetensors")


class KeptStates:
    """In `folder`. places: workers of a member, 1 or those of an island."""

    def __init__(self, folder: Path, places: int) -> None:
        self._folder, self._places = folder, places

    def newest(self) -> list[Path]:
        """By place; [] where there are none."""
        rounds = {round: files for round, files in self._found().items() if len(files) == self._places}
        return [] if not rounds else [rounds[max(rounds)][place] for place in range(self._places)]

    def save(self, take: Callable[[int, Path], int]) -> bool:
        """Have `take` fetch the state of each place into a file, and say of which round it is; whether they are kept
        now, which those of different rounds are not.
        """
        self._folder.mkdir(exist_ok=True)
        partial = [self._folder / f"place-{place}.partial" for place in range(self._places)]
        try:
            rounds = [take(place, path) for place, path in enumerate(partial)]
        except OSError:  # what there is of them takes the room of what comes next
            for path in partial:
                path.unlink(missing_ok=True)
            raise
        if len(set(rounds)) > 1:
            return False
        for place, path in enumerate(partial):
            settle(path, self._folder / f"round-{rounds[0]}-place-{place}.safetensors")
        found = self._found()
        for round in sorted(found)[:-_KEPT]:
            for path in found[round].values():
                path.unlink()
        return True

    def _found(self) -> dict[int, dict[int, Path]]:
        found: defaultdict[int, dict[int, Path]] = defaultdict(dict)
        for path in self._folder.glob("round-*.safetensors"):
            named = _NAME.fullmatch(path.name)
            if named is not None and int(named[2]) < self._places:
                found[int(named[1])][int(named[2])] = path
        return found
