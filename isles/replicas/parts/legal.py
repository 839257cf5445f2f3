"""Which parts go together: a table, and what it says of a choice.

A choice names one member an axis (`AXES`). What a row says of lossy or biased codecs it says by what each codec says of
itself, so a new one needs no word here. A part of one's own is the member `OWN`, of which rows say nothing; once it is
made, `member` asks it what it is: when a cadence lands, whether a mixing agrees, what a codec does to the entries.
Rows are read in order; the first that refuses is told, and every one that warns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from isles.comm.codecs.kinds import KINDS, CodecKind

AXES: dict[str, tuple[str, ...]] = {
    "cadence": ("every_h", "fragments", "overlap", "one_round", "more_rounds"),
    "mixing": ("all", "groups", "nobody"),
    "codec": tuple(KINDS),
    "error_feedback": ("none", "local", "global"),
    "reading": ("received", "eager"),
    "rule": ("average", "sgd", "nesterov", "heavy_ball", "noloco"),
    "landing": ("replace", "blend", "carry"),
}
"""Members by axis. cadence: when an answer lands: at once, fragment by fragment or not; some inner steps after it was
sent; when its fragment is sent next; later.
"""

PLAIN = {axis: members[0] for axis, members in AXES.items()}
"""The first member of each: parameters averaged by all at once."""
OWN, OWN_ALL, OWN_GROUPS = "own", "own (agrees)", "own (groups)"
OWN_CODECS = {
    f"own ({what})": CodecKind("", what == "lossless", "biased" in what, "shared mask" in what)
    for what in ("lossless", "lossy", "biased", "shared mask", "biased, shared mask")
}
"""What a codec of one's own says of itself."""
_CODECS = KINDS | OWN_CODECS
_EXACT = tuple(kind for kind, form in _CODECS.items() if form.lossless)
_LOSSY = tuple(kind for kind, form in _CODECS.items() if not form.lossless)
_BIASED = tuple(kind for kind, form in _CODECS.items() if form.biased)
_SHARED_MASK = tuple(kind for kind, form in _CODECS.items() if form.shared_mask)
_HARMLESS = (*_EXACT, *_SHARED_MASK)
_GROUPS = ("groups", OWN_GROUPS)
AT_ONCE = ("every_h", "fragments")
LATE = ("overlap", "one_round", "more_rounds")


class Row(NamedTuple):
    """What is said of every choice whose members are among `when`'s, axis by axis."""

    severity: Literal["refused", "warned"]
    when: Mapping[str, tuple[str, ...]]
    because: str
    instead: str

    def meets(self, choice: Mapping[str, str]) -> bool:
        return all(choice[axis] in members for axis, members in self.when.items())

    @property
    def title(self) -> str:
        """The members that meet, such as "codec powersgd x mixing groups"."""
        return " x ".join(f"{axis} {'/'.join(members)}" for axis, members in self.when.items())


TABLE: tuple[Row, ...] = (
    Row(
        "refused",
        {"mixing": ("nobody",), "codec": _LOSSY},
        "nothing travels, so a codec would only do harm",
        'codec = "none"',
    ),
    Row(
        "refused",
        {"mixing": ("nobody",), "cadence": LATE},
        "nothing travels, so no answer has to be late",
        "overlap_steps = 0 and outer_delay = 0",
    ),
    Row(
        "refused",
        {"mixing": ("nobody",), "rule": ("noloco",)},
        "there are no anchors to be pulled to",
        'rule = "heavy_ball"',
    ),
    Row(
        "refused",
        {"codec": ("powersgd",), "mixing": _GROUPS},
        "the factors start from a basis that all workers have in common, and random groups have none",
        'mixing = "all", or a codec without memory such as int4',
    ),
    Row(
        "refused",
        {"codec": ("powersgd",), "reading": ("eager",)},
        "what the others make of a low-rank share is known only with their mean, a round too late",
        "another codec, such as int4",
    ),
    Row(
        "refused",
        {"reading": ("eager",), "cadence": (*AT_ONCE, "overlap")},
        "an eager reading replaces the own share of a mean that is a round old",
        "outer_delay = 1",
    ),
    Row(
        "refused",
        {"landing": ("carry",), "cadence": (*AT_ONCE, "overlap", "more_rounds")},
        "carry keeps the progress of exactly one round that is under way",
        "outer_delay = 1",
    ),
    Row(
        "refused",
        {"landing": ("carry",), "reading": ("eager",)},
        "both add the own progress that is not averaged yet, so it would count twice",
        'landing = "replace"',
    ),
    Row(
        "refused",
        {"error_feedback": ("global",), "cadence": ("more_rounds",)},
        "it is measured against a mean that has not come back when the next share leaves",
        'error_feedback = "local"',
    ),
    Row(
        "refused",
        {"rule": ("average",), "codec": tuple(kind for kind in _LOSSY if kind not in _HARMLESS)},
        "parameters travel, and without an anchor what a codec takes from them stays wrong for good",
        f'rule = "sgd" with outer_lr = 1, or codec {" or ".join(one for one in _HARMLESS if one in KINDS)}',
    ),
    Row(
        "refused",
        {"rule": ("average",), "error_feedback": ("local", "global")},
        "parameters travel, not changes: nothing of one round belongs into the next",
        'rule = "sgd" with outer_lr = 1',
    ),
    Row(
        "refused",
        {"rule": ("average",), "cadence": LATE},
        "parameters that land late overwrite what was learned since they were sent",
        'rule = "sgd" with outer_lr = 1',
    ),
    Row(
        "warned",
        {"mixing": _GROUPS, "rule": ("sgd", "nesterov", "heavy_ball")},
        "nothing pulls the anchors of different groups together, so replicas drift apart",
        'rule = "noloco"',
    ),
    Row(
        "warned",
        {"codec": _BIASED, "error_feedback": ("none",), "rule": (*AXES["rule"][1:], OWN)},
        "the codec takes a part of every outer gradient that never comes back",
        'error_feedback = "local"',
    ),
    Row(
        "warned",
        {"codec": _EXACT, "error_feedback": ("local", "global")},
        "nothing is lost on the wire, so 4 bytes a parameter are held for nothing",
        'error_feedback = "none"',
    ),
    Row(
        "warned",
        {"error_feedback": ("local",), "cadence": ("more_rounds",)},
        "a round waits for what the last one left over, so no more than one round of a transfer is hidden",
        "outer_delay = 1",
    ),
    Row(
        "warned",
        {"codec": ("powersgd",), "cadence": ("more_rounds",)},
        "a round waits for the last one's basis, so no more than one round of a transfer is hidden",
        "outer_delay = 1",
    ),
    Row(
        "warned",
        {"mixing": ("all", OWN_ALL), "rule": ("noloco",)},
        "all anchors are equal, so they are sent for nothing",
        'rule = "heavy_ball"',
    ),
    Row(
        "warned",
        {"rule": ("noloco",), "cadence": ("one_round", "more_rounds")},
        "the pull acts on anchors that are a round old",
        "overlap_steps, or outer_delay = 0",
    ),
)

BY_NUMBERS: tuple[tuple[Literal["refused", "warned"], str, str], ...] = (
    ("refused", "sync_every > run.steps", "no exchange would fall into the run"),
    ("refused", "anchor_codec below int8", "anchors rounded so coarsely drift by a tenth of the weights' size"),
    ("refused", "overlap_steps >= sync_every", "a fragment would be sent again before its answer landed"),
    ("refused", "demo with any outer rule", "its workers take the same step: an outer rule would find nothing to do"),
    (
        "refused",
        "ist with fragments, a codec or an outer rule",
        "a unit has one holder, so there is no mean to be formed",
    ),
    ("refused", "ist with fewer units in a layer than workers", "some worker would hold none"),
    ("warned", "gamma >= 2 (1 - outer_momentum^2), in pairs", "replicas drift apart in large worlds"),
    ("warned", "fewer rounds than 20 / (1 - outer_momentum)", "the momentum does not reach its full size"),
    ("warned", "eager with more than 2 workers and outer_lr > 1 - outer_momentum", "it is fresh by 1/workers only"),
    ("warned", "sync_every no multiple of the fragments", "they are sent at uneven steps"),
)
"""What numbers decide, and methods that are no choice of parts: said where they are known."""


def member(axis: str, part: Any) -> str:
    """What rows know a part as: by its name, or by what it says of itself."""
    if axis == "cadence":
        if part.rounds_late:
            return "one_round" if part.rounds_late == 1 else "more_rounds"
        return "overlap" if part.lands(0) > 0 else "fragments" if part.fragments > 1 else "every_h"
    name = str(getattr(part, "name", OWN)).partition(":")[0]
    if name in AXES[axis]:
        return name
    if axis == "mixing":
        return OWN_ALL if part.agrees else OWN_GROUPS
    if axis == "codec":
        said = part.lossless, part.biased, part.shared_mask
        return next((name for name, kind in OWN_CODECS.items() if kind[1:4] == said), OWN)
    return OWN


def refusal(choice: Mapping[str, str]) -> str | None:
    """Why the choice makes no sense, with the mend, in one line; None where it does."""
    return next((_message(row, choice) for row in TABLE if row.severity == "refused" and row.meets(choice)), None)


def refuse(choice: Mapping[str, str]) -> None:
    """ValueError with that line."""
    line = refusal(choice)
    if line is not None:
        raise ValueError(line)


def warnings(choice: Mapping[str, str]) -> list[str]:
    """What is to be said of a choice that is not refused, a line each."""
    return [_message(row, choice) for row in TABLE if row.severity == "warned" and row.meets(choice)]


def _message(row: Row, choice: Mapping[str, str]) -> str:
    met = " x ".join(f"{axis} {choice[axis]}" for axis in row.when)
    return f"{met}: {row.because}; choose {row.instead}"
