"""Faults that tests ask for, so that a process dies or an update spoils at a chosen client and round."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from raysim.errors import ConfigError


@dataclass(frozen=True)
class Fault:
    """A fault for tests, from `RAYSIM_FAULT="kind=kill,client=3,round=2"`.

    Attributes:
        kind: `kill` the process, `raise` an error, `sleep`, or return `nan`.
        client: Client whose unit it strikes; None: any.
        round_num: Round it strikes in; None: any.
        stage: `train` or `score`.
        attempt: Attempt it strikes; None: any.
        seconds: How long to sleep.
    """

    kind: str
    client: int | None = None
    round_num: int | None = None
    stage: str = "train"
    attempt: int | None = None
    seconds: float = 0.0

    @classmethod
    def from_environment(cls) -> tuple[Fault, ...]:
        """The faults that `RAYSIM_FAULT` asks for, separated by `;`.

        Raises:
            ConfigError: It cannot be read.
        """
        faults = []
        for text in filter(None, os.environ.get("RAYSIM_FAULT", "").split(";")):
            try:
                given = dict(part.strip().split("=") for part in text.split(","))
                client, round_num, attempt = (
                    int(given[key]) if key in given else None for key in ("client", "round", "attempt")
                )
                stage, seconds = given.get("stage", "train"), float(given.get("seconds", 0))
                fault = cls(given["kind"], client, round_num, stage, attempt, seconds)
                if fault.kind not in ("kill", "raise", "sleep", "nan") or fault.stage not in ("train", "score"):
                    raise ValueError
            except (ValueError, KeyError):
                raise ConfigError(
                    f"RAYSIM_FAULT: {text!r} is not kind=kill|raise|sleep|nan[,client=N][,round=N][,stage=train|score]"
                    "[,attempt=N][,seconds=S]"
                ) from None
            faults.append(fault)
        return tuple(faults)

    def strikes(self, stage: str, client_id: int, round_num: int, attempt: int) -> bool:
        """Whether it applies to a unit."""
        return (
            self.stage == stage
            and self.client in (None, client_id)
            and self.round_num in (None, round_num)
            and self.attempt in (None, attempt)
        )


def strike(faults: Iterable[Fault], stage: str, client_id: int, round_num: int, attempt: int) -> set[str]:
    """Let the faults that apply to a unit happen; returns their kinds."""
    kinds = set()
    for fault in faults:
        if not fault.strikes(stage, client_id, round_num, attempt):
            continue
        kinds.add(fault.kind)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "raise":
            raise RuntimeError(f"fault asked for: client {client_id}, round {round_num}, {stage}")
        elif fault.kind == "sleep":
            time.sleep(fault.seconds)
    return kinds
