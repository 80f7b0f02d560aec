"""What a run left behind, read from its folder: while it goes on, and for good."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from raysim.config import RunConfig, load_config
from raysim.data.partition import Partition
from raysim.errors import ConfigError
from raysim.recording.records import RoundRecord
from raysim.recording.runfolder import find_runs
from raysim.recording.tables import read_rounds, read_table


@dataclass(frozen=True)
class RunRecord:
    """What a run left behind.

    Attributes:
        folder: The run folder.
        config: The resolved configuration.
        result: Content of `result.json`: status, final and best metrics, checksums, seconds (of a resumed run those of the
            earlier rounds and of the last process).
    """

    folder: Path
    config: RunConfig
    result: Mapping[str, Any]

    def __repr__(self) -> str:
        done, final, best = (self.result.get(key) for key in ("rounds_done", "final", "best"))
        parts = [f"{self.config.name!r}, {self.result['status']}"]
        if done is not None:
            parts.append(f"{done} of {self.config.rounds} rounds")
        if final and best:
            parts.append(f"accuracy {final['accuracy']:.4f}, best {best['accuracy']:.4f} in round {best['round']}")
        return f"RunRecord({', '.join(parts)}, {self.folder})"

    @property
    def rounds(self) -> Any:
        """The rounds table (Arrow), one row per round."""
        return read_table(self.folder, "rounds")

    @property
    def round_records(self) -> list[RoundRecord]:
        """The rows of the rounds table as records."""
        return read_rounds(self.folder)

    @property
    def clients(self) -> Any:
        """The clients table (Arrow), one row per round and sampled client."""
        return read_table(self.folder, "clients")

    @property
    def partition(self) -> Partition:
        """Which client held which example."""
        return Partition.read(self.folder / "partition.parquet")

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of `manifest.json`: versions, hardware, resource plan, hashes."""
        content: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        return content

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes 0..K-1."""
        return tuple(self.manifest["data"]["class_names"])

    @property
    def class_counts(self) -> np.ndarray:
        """[N, K], training examples of each class at each client."""
        table = pq.read_table(self.folder / "partition.parquet")
        counts = np.zeros((self.partition.num_clients, len(self.class_names)), dtype=np.int64)
        np.add.at(counts, (table["client"].to_numpy(), table["label"].to_numpy()), 1)
        return counts


def load(folder: str | Path) -> RunRecord:
    """The record of a run, as far as the run has come.

    Raises:
        ConfigError: The folder holds no run.
    """
    folder = Path(folder)
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder}: is not a run folder (it has no config.yaml)")
    return RunRecord(folder, load_config(path), result_of(folder))


def load_all(folder: str | Path) -> list[RunRecord]:
    """The records of all runs at or below a folder, of a sweep, for example; by path.

    Raises:
        ConfigError: There is none.
    """
    paths = [path for path in find_runs(Path(folder)) if (path / "config.yaml").is_file()]
    if not paths:
        raise ConfigError(f"{folder}: holds no run (no config.yaml, there or in the folders below)")
    return [load(path) for path in paths]


def result_of(folder: Path) -> dict[str, Any]:
    """Content of `result.json`; without the file, status `running`."""
    path = folder / "result.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"status": "running"}
    return content
