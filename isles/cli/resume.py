"""`isles resume RUN`: go on where a run stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli import torchrun
from isles.cli.terminal import Log, OwnDevice, Trust, end_in_order
from isles.cli.train import Node, Nodes, Rendezvous, TokenText, go_on

if TYPE_CHECKING:
    from isles.training.config.sections import Config


def resume(
    run: Annotated[Path, typer.Argument(help="Directory of a run that was interrupted or broke off.")],
    workers: Annotated[
        int | None, typer.Option(help="Continue with this many workers; prints what changes. Default: as before.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Go back to the checkpoint of this inner step. Default: the newest.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Go on to this inner step, also after the end. Default: as the run was begun.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Go on with each replica in so many stages, the same bits by name.")
    ] = None,
    device: OwnDevice = None,
    nodes: Nodes = 1,
    node: Node = 0,
    rendezvous: Rendezvous = "",
    token: TokenText = None,
    log: Log = "text",
    trust: Trust = False,
) -> None:
    """Go on from the newest checkpoint of a run; with as many workers, to the same result as if it had not stopped.

    A complete run: --steps N trains on to step N, --step K goes back to a checkpoint; the later ones are deleted.

    A run whose workers come and go: its lighthouse restarts at the same address, with as many workers here as before.
    """
    from isles.cli.elastic.lighthouse import restart_lighthouse
    from isles.launch.nodes import NodeSpec
    from isles.training.records.tokens import read_token

    node_spec = NodeSpec(nodes=nodes, node=node, rendezvous=rendezvous, token=read_token(token, nodes))
    if nodes == 1:
        torchrun.adopt()
    end_in_order()
    if (run / "experts.toml").exists():
        raise ValueError(f"{run}: holds experts; type the isles experts command that began them again, and they go on")
    complete, comes_and_goes = (run / "summary.json").exists(), (run / "members.jsonl").exists()
    if comes_and_goes and (step, steps, stages, device, nodes) != (None, None, None, None, 1):
        options = "--step, --steps, --stages, --device and --nodes"
        raise ValueError(
            f"{run}: its workers come and go: leave {options} out; run.start begins another from its model"
        )
    if complete and (comes_and_goes or (step, steps) == (None, None)):
        more = "begin another with run.start" if comes_and_goes else "go on with --steps N, or go back with --step K"
        raise ValueError(f"{run}: this run is complete; {more}")
    if comes_and_goes:
        restart_lighthouse(run, workers)
        return
    if (workers, stages) != (None, None) and (node_spec.nodes > 1 or torchrun.size() is not None):
        option = f"--stages {stages}" if workers is None else f"--workers {workers}"
        raise ValueError(
            f"{option}: the states of all workers must lie in one directory, and one process changes them; "
            "do it without --nodes and torchrun"
        )
    from isles.running.backends import start_server
    from isles.training.records.reshard import prepare

    if torchrun.size() is None:
        start_server()
    ready = prepare(run, workers, stages, step, trust=trust, shared=torchrun.size() is not None)
    torchrun.check(ready.config.world.workers)
    config, notes = ready.config, ready.notes
    if steps is not None:
        config = replace(config, run=replace(config.run, steps=steps, tokens=0))
        notes = [*notes, _longer(ready.config, steps, ready.step)]
    config = config if device is None else replace(config, model=replace(config.model, device=device))
    go_on(replace(ready, config=config, notes=notes), run, node_spec)


def _longer(config: Config, steps: int, done: int) -> str:
    """What `steps` inner steps instead of those of `config` mean after `done`. ValueError if they are fewer."""
    from isles.training.config.inner import lr_factor

    if steps <= done:
        raise ValueError(f"--steps {steps}: the checkpoint is of step {done}; choose more, or an earlier one by --step")
    before, after = (config.inner.lr * lr_factor(done + 1, last, config.inner) for last in (config.run.steps, steps))
    return (
        f"run.steps = {steps} instead of {config.run.steps}: the schedule is that of a run of {steps} steps from its "
        f"beginning, so the learning rate of step {done + 1} is {after:.3g} (instead of {before:.3g})"
    )
