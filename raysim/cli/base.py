"""What every command shares: the application, common arguments, and how errors become exit statuses."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from raysim import __version__

app = typer.Typer(
    name="raysim",
    help="Federated learning simulated on Ray: clients train while scorers weigh them (FedVG).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the file.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Federated learning simulated on Ray: clients train while scorers weigh them (FedVG)."""
    if show:
        typer.echo(f"raysim {__version__}")
        raise typer.Exit


class Terminated(BaseException):
    """SIGTERM arrived."""


@contextmanager
def explained(debug: bool, kept: str = "the finished rounds are kept") -> Iterator[None]:
    """Turn errors into a message and an exit status; a user sees a traceback only when asking for it."""
    from raysim.errors import ConfigError, RaysimError

    _on_sigterm()
    try:
        yield
    except RaysimError as error:
        if debug:
            traceback.print_exc()
        problems = error.problems if isinstance(error, ConfigError) else (str(error),)
        if len(problems) > 1:
            typer.echo(f"raysim: {len(problems)} problems", err=True)
        for problem in problems:
            typer.echo(f"raysim: {problem}" if len(problems) == 1 else f"  {problem}", err=True)
        raise typer.Exit(error.exit_status) from None
    except KeyboardInterrupt:
        typer.echo(f"raysim: interrupted; {kept}", err=True)
        raise typer.Exit(130) from None
    except Terminated:
        typer.echo(f"raysim: terminated; {kept}", err=True)
        raise typer.Exit(143) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        hint = "" if debug else " (run again with --debug for the traceback)"
        typer.echo(f"raysim: unexpected {type(error).__name__}: {error}{hint}", err=True)
        raise typer.Exit(3) from None


def _on_sigterm() -> None:
    def terminate(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
