"""The `isles` command: one file a verb. Exit codes: 0 done, 1 the run failed, 2 user error, 130 interrupted."""

from __future__ import annotations

import sys

import typer

from isles.cli import report, train

app = typer.Typer(
    name="isles",
    help="Train one language model on poorly connected workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("report")(report.report)


@app.callback()
def _isles() -> None:
    """Train one language model on poorly connected workers."""


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, a failed run one line and 1."""
    try:
        app()
    except ValueError as error:
        sys.exit(_fail(error, 2))
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        from isles.comm.errors import CommError

        if not isinstance(error, CommError):
            raise
        sys.exit(_fail(error, 1))


def _fail(error: Exception, code: int) -> int:
    print(f"isles: {error}", file=sys.stderr)
    return code
