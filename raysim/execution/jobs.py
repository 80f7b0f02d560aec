"""What is said of a Ray job. Nothing here imports ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raysim.errors import RunError

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
PACKAGE_LIMIT = 512 * 2**20
"""Bytes of a working directory beyond which Ray refuses it, unless told otherwise."""


@dataclass(frozen=True)
class Job:
    """A submitted job.

    Attributes:
        id: Its submission id.
        status: `PENDING`, `RUNNING`, `SUCCEEDED`, `FAILED` or `STOPPED`.
        entrypoint: Its command line.
        message: Ray's words about the status.
        exit_code: Of its driver, once it has ended.
    """

    id: str
    status: str
    entrypoint: str
    message: str
    exit_code: int | None

    @property
    def ended(self) -> bool:
        """Whether it will not change any more."""
        return self.status in ENDED


@dataclass(frozen=True)
class Driver:
    """What a job's driver reserves; anything lets it leave the head node.

    Attributes:
        cpus: CPUs.
        memory: Bytes.
        resources: Custom resources, each with its amount.
    """

    cpus: float | None = None
    memory: int | None = None
    resources: Mapping[str, float] | None = None


class Unreachable(RunError):
    """The job server does not answer at the moment."""
