"""States that the lighthouse keeps, so that a run outlives its workers: one file for each worker of a member.

    RUN/states/round-40-place-0.safetensors

Those of the newest round of which all places are there count; a save that is cut off leaves the ones before, which
stay for whoever is taking them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from isles.durable import settle

_KEPT = 2  # rounds
_NAME = re.compile(r"round-(\d+)-place-(\d+)\.safetensors")


def is_whole(path: Path) -> bool:
    """Whether it is a file of tensors, none of it cut off."""
    try:
        with safe_open(str(path), framework="np"):
            return True
    except (SafetensorError, OSError):
        return False


class KeptStates:
    """The states in `folder`. places: workers of a member, 1 or those of an island."""

    def __init__(self, folder: Path, places: int) -> None:
        self._folder, self._places = folder, places

    def newest(self) -> list[Path]:
        """By place; [] where there are none."""
        return self._newest(self._whole())

    def looked_at(self, tell: Callable[[str], None]) -> list[Path]:
        """The newest that are not damaged. tell: called with a line for each that is newer. ValueError where all are:
        whoever begins anew in their stead would lose what the run has learned.
        """
        rounds = self._whole()
        damaged = {round: [path for path in files.values() if not is_whole(path)] for round, files in rounds.items()}
        sound = {round: files for round, files in rounds.items() if not damaged[round]}
        if rounds and not sound:
            raise ValueError(f"{self._folder}: no state there is whole: restore one, or start a new run")
        for round in rounds:
            if round > max(sound):
                tell(f"{damaged[round][0]}: is damaged, so the run goes on from round {max(sound)}")
        return self._newest(sound)

    def _whole(self) -> dict[int, dict[int, Path]]:
        """By round, of which all places are there."""
        return {round: files for round, files in self._found().items() if len(files) == self._places}

    def _newest(self, rounds: Mapping[int, Mapping[int, Path]]) -> list[Path]:
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
