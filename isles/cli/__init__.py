"""The `isles` command; a file for each group of verbs.

Exit codes: 0 done, 1 the run failed, 2 user error, 130 interrupted.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Annotated

import typer
from typer.main import get_command

from isles.base.errors import notify_warnings
from isles.base.version import __version__
from isles.cli import (
    compare,
    data,
    doctor,
    experts,
    launch,
    model,
    resume,
    settings,
    simulate,
    token,
    torchrun,
    train,
    tune,
)
from isles.cli.elastic import join, lighthouse, status
from isles.cli.plans import family
from isles.cli.terminal import explain, say
from isles.training.interrupts import Interrupts

app = typer.Typer(
    name="isles",
    help="Train one language model on poorly connected workers.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # and of all commands below
)
app.command("train")(train.train)
app.command("compare")(compare.compare)
app.command("tune")(tune.tune)
app.command("resume")(resume.resume)
app.command("eval")(model.evaluate)
app.command("generate")(model.generate)
app.command("export")(model.export)
app.command("report")(compare.report)
app.command("config")(settings.config)
app.command("simulate")(simulate.simulate)
app.command("methods")(settings.methods)
app.command("doctor")(doctor.doctor)
app.command("token")(token.token)
app.command("lighthouse")(lighthouse.lighthouse)
app.command("join")(join.join)
app.command("status")(status.status)
app.add_typer(data.app, name="data")
app.add_typer(experts.app, name="experts")
app.add_typer(family.app, name="plan")
app.add_typer(launch.app, name="launch")
app.add_typer(join.swarm, name="swarm")

_UsageError = typer.BadParameter.__bases__[0]  # click's, wherever this version of typer keeps it
_LAST_WORD = 3.0  # seconds


@app.callback(invoke_without_command=True)
def _isles(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Train one language model on poorly connected workers."""
    if version or context.invoked_subcommand is None:
        print(f"isles {__version__}" if version else context.get_help())
        raise typer.Exit


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, a failed run one line and 1."""
    atexit.register(gc.freeze)  # at its end Python would walk through all of torch: half a second of CPU time
    sys.path.append(os.getcwd())  # where package.module:Class of one's own is looked for last, as under python -m
    try:
        code = _run()
    finally:
        for child in multiprocessing.active_children():  # left over where a run was interrupted while it started
            child.kill()
    sys.exit(code)


def _run() -> int:
    try:
        with notify_warnings(_note), Interrupts():
            return _command()(standalone_mode=False) or 0
    except _UsageError as error:
        message = explain(error)
        return _fail(message, 2) if message else 0  # none: a room such as `isles experts` has shown its help
    except ValueError as error:
        return _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:  # a full disk, a closed terminal
        return _fail(_with_notes(error), 1)
    except RuntimeError as error:
        from isles.comm.errors import CommError

        if "home directory" in str(error):  # of Path.expanduser, for ~NAME
            return _fail("a path begins with ~NAME, and this machine knows no user NAME: write the whole path", 2)
        if not isinstance(error, CommError):
            raise
        return _fail(_with_notes(error), 1)


def _note(event: dict[str, str]) -> None:
    if torchrun.is_main_process():
        say(event["notice"], "warning", "note: ")


@cache
def _command() -> Callable[..., int | None]:
    """Made once: it takes as long as a short command, and a program may give many."""
    return get_command(app)


def _with_notes(error: Exception) -> str:
    """The error and what was noted on it, such as how to go on."""
    return "; ".join([str(error), *getattr(error, "__notes__", [])])


def _fail(message: str, code: int) -> int:
    if torchrun.is_main_process():
        say(" ".join(message.splitlines()), "error", "isles: ")
    else:  # torchrun ends all processes with the first one that fails: rank 0 speaks before
        time.sleep(_LAST_WORD)
    return code
