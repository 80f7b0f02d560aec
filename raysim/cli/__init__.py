"""The command line: one function per command. Commands import what they need, so that `--help` answers at once.

Exit status: 0 done, 2 found before round 1, 3 failed during the run, 130 or 143 interrupted.
"""

from __future__ import annotations

from raysim.cli import runs, studies
from raysim.cli.base import app

__all__ = ["app", "main", "runs", "studies"]


def main() -> None:
    """Entry point of the `raysim` command."""
    app()
