"""Small real runs for tests."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import raysim

CHECKSUMS = ("params_checksum", "buffers_checksum", "server_checksum", "clients_checksum")

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
"""The quickstart, shortened to five rounds; its LeNet-5 has BatchNorm."""

SIX_CLIENTS = [
    "partition.clients=6",
    "client.per_round=6",
    "client.local_epochs=1",
    "execution.client.num_cpus=0.1",
    "execution.scorer.num_cpus=0.1",
]

TINY = (
    "model.name=mlp",
    "partition.clients=6",
    "client.per_round=4",
    "client.local_epochs=1",
    "output.tensorboard=false",
)
"""A run of a second."""


def run(folder: Path, name: str, *overrides: str, rounds: int = 5, backend: str = "ray") -> raysim.RunRecord:
    """The quickstart with overrides, in `folder/name`."""
    return raysim.run(QUICKSTART, settings(folder, name, *overrides, rounds=rounds, backend=backend))


def settings(folder: Path, name: str, *overrides: str, rounds: int = 5, backend: str = "ray") -> list[str]:
    """Overrides of the quickstart; without GPUs unless asked for, as the tests' Ray has some in its books only."""
    return [
        f"output.dir={folder}",
        f"name={name}",
        f"rounds={rounds}",
        f"execution.backend={backend}",
        "execution.client.num_gpus=0",
        "execution.scorer.num_gpus=0",
        *overrides,
    ]


def checksums(record: raysim.RunRecord) -> list[dict[str, Any]]:
    """The oracle of equality: every round's checksums and test metrics, and the partition."""
    table = record.rounds.select(["round_num", *CHECKSUMS, "accuracy", "loss"])
    return [*table.to_pylist(), {"partition": record.partition.content_hash}]


class KillOnLog(threading.Thread):
    """Kills the process that a line of a run's log names, as soon as the line appears."""

    def __init__(self, log: Path, pattern: str) -> None:
        super().__init__(daemon=True)
        self._log, self._pattern = log, re.compile(pattern)
        self.killed: int | None = None
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 120
        while self.killed is None and time.monotonic() < deadline:
            match = self._pattern.search(self._log.read_text()) if self._log.exists() else None
            if match:
                time.sleep(0.5)  # The unit has begun, and sleeps.
                self.killed = int(match["pid"])
                os.kill(self.killed, signal.SIGKILL)
            time.sleep(0.05)
