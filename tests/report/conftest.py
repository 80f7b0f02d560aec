from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from raysim.recording.records import ClientRecord, RoundRecord
from raysim.recording.tables import TableWriter

START = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """Writes a run folder as a run leaves it; keyword arguments replace what it holds."""
    return write_run


def write_run(
    folder: Path,
    accuracy: Sequence[float | None] = (0.2, 0.4, 0.5),
    *,
    seed: int = 0,
    alpha: float = 0.1,
    weighting: Any = "size",
    algorithm: Any = "fedavg",
    clients: int = 4,
    scores: bool = True,
    data_hash: str = "d" * 16,
    status: str = "finished",
    settings: dict[str, Any] | None = None,
    weights: Sequence[float] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    config = {
        "name": folder.name,
        "seed": seed,
        "rounds": len(accuracy),
        "data": {"name": "digits", "root": f"/somewhere/{folder.name}"},
        "partition": {"scheme": "dirichlet", "clients": clients, "alpha": alpha},
        "algorithm": {"name": algorithm} if isinstance(algorithm, str) else algorithm,
        "weighting": {"name": weighting} if isinstance(weighting, str) else weighting,
        "fusion": None,
        "execution": {"backend": "serial", "threads": seed + 1},
        "output": {"dir": str(folder.parent)},
        **(settings or {}),
    }
    with (folder / "config.yaml").open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(config, file)
    manifest = {"hostname": "here", "data": {"hash": data_hash}, "partition": {"hash": f"{alpha}-{seed}"}}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    result = {"status": status, "seconds": 3.0, "checksums": {"params": "c" * 16}}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    # Client k has 10 (k + 1) examples of k + 1 classes.
    counts = np.array([[10 if label <= client else 0 for label in range(clients)] for client in range(clients)])
    client, label = (np.repeat(index.ravel(), counts.ravel()) for index in np.indices(counts.shape))
    metadata = {"num_clients": str(clients)}
    table = pa.table({"client": client, "label": label}).replace_schema_metadata(metadata)
    pq.write_table(table, folder / "partition.parquet")
    shares = np.arange(1, clients + 1) / np.arange(1, clients + 1).sum() if weights is None else weights
    writer = TableWriter(folder)
    names = ("params", "buffers", "server", "clients")
    for number, value in enumerate(accuracy, start=1):
        record = RoundRecord(
            round_num=number,
            started=START,
            finished=START,
            round_s=1.0 + number,
            accuracy=value,
            train_s=0.5,
            **{f"{name}_checksum": "c" * 16 for name in names},
        )
        parts = [
            ClientRecord(
                round_num=number,
                client_id=one,
                position=one,
                status="ok",
                num_examples=10 * (one + 1),
                score=1.0 / (one + 1) if scores else None,
                weight=float(shares[one]),
                train_s=0.25,
                score_s=0.125 if scores else None,
            )
            for one in range(clients)
        ]
        writer.write_round(record, parts)
    return folder
