"""`isles config`: the full configuration as commented TOML, to start a file of one's own from;
`isles methods`: what `--method` takes, which parts go together, and what each method holds.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer

from isles.cli.terminal import print_named
from isles.replicas import METHODS, canonical


def config(
    method: Annotated[
        str | None, typer.Option(help="Whose settings the section replicas shows. Default: noloco.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Print this preset instead, to change it.")] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Only the 15 settings that matter most.")] = False,
) -> None:
    """Print every setting with its default and what it means, as a CONFIG.toml for `isles train`."""
    from isles.training.config.presets import preset_file
    from isles.training.config.presets import presets as known

    if sum((method is not None or brief, preset is not None, presets)) > 1:
        raise ValueError("--method (or --brief), --preset and --presets each print something else: give one of them")
    if presets:
        print_named(known())
        print("isles train --preset NAME runs one, isles config --preset NAME prints it")
    elif preset is not None:
        print(preset_file(preset).read_text(encoding="utf-8"), end="")
    else:
        from isles.training.config.reading import template

        print(template(method or "noloco", brief=brief), end="")


_WORKERS = 4  # of the memory table: buffers for messages depend on it a little


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[METHOD]", help="Describe this one.")] = None,
    legal: Annotated[
        bool, typer.Option("--legal", help="Print what does not go together, and why: parts of a method, and settings.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Print the bytes a parameter that each method adds to a worker.")
    ] = False,
    stages: Annotated[int, typer.Option(help="With --memory: stages that each replica is cut into.")] = 1,
) -> None:
    """List the methods, or describe one of them."""
    if sum((legal, memory, name is not None)) > 1:
        raise ValueError("--legal, --memory and METHOD each print something else: ask for one of them")
    if stages != 1 and not memory:
        raise ValueError(f"--stages {stages} divides what --memory prints: add it, or leave --stages out")
    if name is not None:
        config(method=name, brief=True)
        print(f"# all settings: isles config --method {canonical(name)}")
    elif legal:
        _legal()
    elif memory:
        _memory(stages)
    else:
        print_named({name: f"{row.what}  ({row.target})" for name, row in METHODS.items()})
        print("or package.module:Class for a method of your own; settings: isles config --method NAME")


def _legal() -> None:
    from isles.replicas.parts.legal import AXES, BY_NUMBERS, TABLE
    from isles.training.config.conflicts import EXTERNAL_SITUATIONS, conflicts

    print('The parts of an outer method, each a setting of method = "custom" (cadence: sync_every, fragments,')
    print("overlap_steps, outer_delay). Any choice goes together unless a line below speaks of it.")
    print("Or package.module:Class of your own, which the lines know by what it says of itself: own (lossy), ...\n")
    print_named({f"  {axis}": ", ".join(members) for axis, members in AXES.items()})
    for severity, meaning in (("refused", "makes no sense"), ("warned", "runs, with a note")):
        print(f"\n{severity} ({meaning}):\n")
        for row in TABLE:
            if row.severity == severity:
                print(f"  {row.title}\n      {row.because}; choose {row.instead}")
        for kind, when, because in BY_NUMBERS:
            if kind == severity:
                print(f"  {when}\n      {because}")

    print("\nNot with each other, whatever the method:")
    for where, rows in groupby(conflicts(), key=lambda row: row.where):
        explained = f" ({EXTERNAL_SITUATIONS[where[0]]})" if where[0] in EXTERNAL_SITUATIONS else ""
        print(f"\n  {' and '.join(one.strip('()') for one in where)}{explained}")
        for row in rows:
            print(f"      {row.what}: {row.because}; {row.mend}")


def _memory(stages: int) -> None:
    from isles.plan.run_plan import MODEL, footprints

    found = footprints(_WORKERS, stages)
    width = max(map(len, METHODS))
    print("Bytes a parameter on the host, beside weights, gradients and the inner optimizer's state: float32 weights,")
    whom = f"{_WORKERS} workers.\n"
    if stages > 1:
        whom = f"{_WORKERS} replicas of {stages} stages;\na worker's, a parameter of the whole model, on average.\n"
    print(f"each method's own defaults, the {MODEL.size} model, {whom}")
    print(f"{'method':<{width}}  {'always':>7}  {'exchanging':>10}  {'at the end':>10}  {'peak':>6}")
    for one in found:
        peak = one.always + max(one.exchange, one.end)
        print(f"{one.method:<{width}}  {one.always:7.2f}  {one.exchange:10.2f}  {one.end:10.2f}  {peak:6.2f}")
    if left_out := METHODS.keys() - {one.method for one in found}:
        print(f"\nneed the whole model at each worker: {', '.join(sorted(left_out))}")
