"""The errors a user meets, each with the exit status it ends the command with."""

from __future__ import annotations

from collections.abc import Sequence


class RaysimError(Exception):
    """Base of all errors that are explained to the user without a traceback.

    `exit_status` is 2 when the fault was found before round 1 and 3 when a run failed.
    """

    exit_status = 3


class ConfigError(RaysimError):
    """The run as described cannot work. Lists every problem found, so that one look mends all of them.

    Args:
        problems: One sentence each: where, what was given, what is accepted.
    """

    exit_status = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RunError(RaysimError):
    """A run that had begun cannot go on (no client left, every update failed, disk full, ...)."""

    exit_status = 3
