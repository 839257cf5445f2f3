"""The tables of `benchmarks.boundaries` in docs/boundaries.md, with what they say; between two comments each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "boundaries.md"
NEAR = 0.05
"""Nats above the whole stream that a subspace may be in the table of widths."""
_FULL = 3  # seeds
Losses = Mapping[int, float]
"""By seed."""


def put(maker: str, lines: Sequence[str]) -> None:
    """`lines` where the page says that `maker` puts them. ValueError where it does not."""
    begin, end = f"<!-- made by {maker} -->", "<!-- end -->"
    before, found, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    if not found:
        raise ValueError(f"{PAGE}: no line {begin}")
    text = "\n".join([begin, *lines])
    PAGE.write_text(f"{before}{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def losses_of(runs: Sequence[Mapping[str, Any]], width: int, name: str, key: str = "loss") -> dict[int, float]:
    """Of a row, by seed; of two runs of one the later."""
    found = {one["seed"]: one.get(key, False) for one in runs if one["width"] == width and one["name"] == name}
    return dict(sorted(found.items()))


def listing(runs: Sequence[Mapping[str, Any]], variants: Sequence[tuple[int, Any]]) -> Iterator[str]:
    """A line of each of `variants`: (width, benchmarks.boundaries.Variant)."""
    dense = next(variant.nbytes(width) for width, variant in variants if variant.name == "dense")
    yield "| boundary | bytes | ratio | loss | seeds |"
    yield "|---|---|---|---|---|"
    for width, variant in variants:
        own = losses_of(runs, width, variant.name)
        if not own:
            continue
        bare = mean(losses_of(runs, width, variant.name, "bare").values())
        beside = f" ({bare:.3f} without masks)" if variant.boundary.startswith("dct") else ""
        nbytes = variant.nbytes(width)
        ratio = f"{dense / nbytes:.1f}" if variant.layers > 1 else ""
        copied = losses_of(runs, width, variant.name, "copied")
        seeds = ", ".join(f"{loss:.3f}{'*' if copied[seed] else ''}" for seed, loss in own.items())
        yield f"| {variant.name} | {nbytes:g} | {ratio} | {mean(own.values()):.3f}{beside} | {seeds} |"
    short = [variant.name for width, variant in variants if len(losses_of(runs, width, variant.name)) < _FULL]
    if short:
        yield f"\nFewer than {_FULL} seeds: {', '.join(short)}."


def apart(one: Losses, other: Losses) -> tuple[float, str]:
    """Mean difference over the seeds of both, and each."""
    both = [seed for seed in one if seed in other]
    each = [one[seed] - other[seed] for seed in both]
    return mean(each), ", ".join(f"{difference:+.2f}" for difference in each)


def verdict(runs: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """On "no convergence degradation" at the paper's rate."""
    dense, inside, masks, alone, separate = (
        losses_of(runs, width, name)
        for name in ("dense", "subspace, k 3", "dct, 3 entries", "last stage alone", "masks apart, 3 entries")
    )
    behind, seeds = apart(inside, dense)
    spread = max(dense.values()) - min(dense.values())
    worst = max(inside[seed] - dense[seed] for seed in inside)
    seen = "is seen" if worst <= spread and len(inside) >= _FULL else "is not what is seen"
    yield (
        f'**"No convergence degradation" {seen}**: a subspace of 3 is {behind:.2f} nats behind the whole stream after '
        f"as many steps ({seeds} by seed; the whole stream's seeds differ by {spread:.2f}), and masks of as many bytes "
        f"{apart(masks, dense)[0]:.2f}. It is {-apart(inside, separate)[0]:.2f} nats ahead of masks chosen apart. The "
        f"last stage alone, which knows the ids, is at {apart(alone, dense)[0]:+.2f}."
    )


def widths(runs: Sequence[Mapping[str, Any]], parts: Sequence[float]) -> Iterator[str]:
    """A line of each width: differences to the whole stream; then the smallest parts that are near it."""
    yield f"| width | whole | seeds | {' | '.join(f'{part:.3g} d' for part in parts)} |"
    yield "|---|---|---|" + "---|" * len(parts)
    found: list[tuple[int, float | None]] = []
    for width in sorted({one["width"] for one in runs}):
        dense, near, still, cells = losses_of(runs, width, "dense"), None, True, []
        for part in sorted(parts, reverse=True):
            own = losses_of(runs, width, f"subspace {part:g} d")
            both = [own[seed] - dense[seed] for seed in own if seed in dense]
            cells.append(f"{mean(both):+.3f} ({len(both)})" if both else "")
            still = still and (not both or mean(both) <= NEAR)
            near = part if still and both else near
        yield f"| {width} | {mean(dense.values()):.3f} | {len(dense)} | {' | '.join(reversed(cells))} |"
        found.append((width, near))
    latest = {(one["width"], one["name"], one["seed"]): bool(one.get("copied")) for one in runs}
    inside = [copied for (_, name, _), copied in latest.items() if name != "dense"]
    if any(inside):
        yield f"\nOf {len(inside)} runs of subspaces {sum(inside)} are of that earlier version."
    told = [f"{width}: {f'{part:.3g} d = {part * width:g}' if part else 'none tried'}" for width, part in found]
    known = [part for _, part in found if part]
    falls = len(known) == len(found) and known == sorted(known, reverse=True) and known[0] > known[-1]
    yield ""
    yield (
        f"Smallest part within {NEAR} nats of the whole stream, with all larger ones too: {'; '.join(told)}. So the "
        f"part {'falls' if falls else 'does not clearly fall'} with the width."
    )


def rates(runs: Sequence[Mapping[str, Any]], variants: Sequence[tuple[int, Any]]) -> Iterator[str]:
    """A line of each boundary, its losses by rate."""
    tried = sorted({variant.rate for _, variant in variants})
    yield f"| boundary | {' | '.join(f'rate {rate:g}' for rate in tried)} |"
    yield "|---|" + "---|" * len(tried)
    for name in dict.fromkeys(variant.name.rpartition(", ")[0] for _, variant in variants):
        found = {rate: losses_of(runs, 64, f"{name}, rate {rate:g}") for rate in tried}
        yield f"| {name} | {' | '.join(f'{mean(own.values()):.3f}' if own else '' for own in found.values())} |"
