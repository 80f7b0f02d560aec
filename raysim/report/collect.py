"""From folders to runs: what each finished run was, and its tables condensed to what a report needs.

The stored configuration is read as it is written, so that runs of older versions count too and torch is not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.configfile import read_yaml
from raysim.errors import ConfigError
from raysim.fields import flatten
from raysim.recording.runfolder import find_runs
from raysim.recording.tables import read_table

NOT_A_SETTING = ("name", "output", "execution", "data.root")
"""Parts of a configuration that say where things lie and who does the work, not what is computed."""


@dataclass(frozen=True)
class Curve:
    """A run round by round, [R] each; NaN where nothing was measured.

    Attributes:
        round_num: The rounds, ascending.
        accuracy: Of the global model on the test set, 0 to 1.
        validation_accuracy: Of the global model on the validation set; all NaN if the run does not have it.
        costs: Seconds, bytes and counts of the round, by name of the column.
    """

    round_num: np.ndarray
    accuracy: np.ndarray
    validation_accuracy: np.ndarray
    costs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Participation:
    """Which client took part when, [P] each, and what came of it; NaN where there is nothing.

    Attributes:
        round_num: The round.
        client_id: The client.
        score: Its score.
        weight: Its weight; NaN if its update was not used.
    """

    round_num: np.ndarray
    client_id: np.ndarray
    score: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: Its folder.
        settings: Its configuration as dotted keys, without seed and `NOT_A_SETTING`.
        seed: Its seed.
        rounds: Its rounds.
        curve: Round by round.
        clients: Who took part.
        examples: [N], training examples of each client; None if the run has no partition.
        entropy: [N], entropy of each client's labels in nats; None likewise.
        seconds: From start to end, preparation included.
        data_hash: Of its images and labels; None if not recorded.
        partition_hash: Of which client has which; None if not recorded.
        machine: Host and backend that it ran on.
        checksum: Of its final parameters.
    """

    folder: Path
    settings: Mapping[str, Any]
    seed: int
    rounds: int
    curve: Curve
    clients: Participation
    examples: np.ndarray | None
    entropy: np.ndarray | None
    seconds: float | None
    data_hash: str | None
    partition_hash: str | None
    machine: str
    checksum: str | None


@dataclass(frozen=True)
class LeftOut:
    """A run that is not in the report.

    Attributes:
        folder: Its folder.
        reason: Why.
    """

    folder: Path
    reason: str


def collect(folders: Sequence[Path]) -> tuple[list[Run], list[LeftOut]]:
    """Every run at or below the folders, in the order of their paths: those that finished, and the others with a reason.

    Abandoned attempts of a sweep and hidden folders are not looked into.

    Raises:
        ConfigError: A folder does not exist, or no run can be reported.
    """
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise ConfigError([f"{folder}: is not a folder" for folder in missing])
    places = {path.resolve(): path for folder in folders for path in find_runs(folder)}.values()
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    for folder in sorted(places):
        found = _read(folder)
        if isinstance(found, LeftOut):
            left_out.append(found)
        else:
            runs.append(found)
    runs = list(_without_copies(runs, left_out))
    if not runs:
        where = ", ".join(str(folder) for folder in folders)
        why = [f"{item.folder}: {item.reason}" for item in left_out]
        raise ConfigError([f"{where}: no finished run in {len(places)} run folder{'s' * (len(places) != 1)}", *why])
    return runs, left_out


def _read(folder: Path) -> Run | LeftOut:
    try:
        result = _read_json(folder / "result.json")
        values, _ = read_yaml(folder / "config.yaml")
        if (status := result.get("status", "running or killed")) != "finished":
            done = len(list((folder / "rounds").glob("[0-9]*.parquet")))
            reason = f": {result['reason']}" if result.get("reason") else ""
            return LeftOut(folder, f"{status} after {done} of {values.get('rounds', '?')} rounds{reason}")
        curve = curve_of(read_table(folder, "rounds"))
        if not np.isfinite(curve.accuracy).any():
            return LeftOut(folder, "no round was tested")
        return _run(folder, values, result, curve)
    except ConfigError as error:
        return LeftOut(folder, f"unreadable: {error}")
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        return LeftOut(
            folder, f"unreadable: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )


def _run(folder: Path, values: Mapping[str, Any], result: Mapping[str, Any], curve: Curve) -> Run:
    manifest = _read_json(folder / "manifest.json")
    clients = read_table(folder, "clients")
    counts_NK = _class_counts(folder / "partition.parquet")
    backend = (values.get("execution") or {}).get("backend", "?")
    settings = {key: value for key, value in flatten(values).items() if not below(key, ("seed", *NOT_A_SETTING))}
    costs = {f"client_{name}": _sums(clients, name, curve.round_num) for name in ("train_s", "score_s")}
    costs["scored_clients"] = _sums(clients, "score_s", curve.round_num, count=True)
    return Run(
        folder=folder,
        settings=settings,
        seed=int(values["seed"]),
        rounds=int(values["rounds"]),
        curve=Curve(curve.round_num, curve.accuracy, curve.validation_accuracy, {**curve.costs, **costs}),
        clients=Participation(
            column(clients, "round_num").astype(int),
            column(clients, "client_id").astype(int),
            column(clients, "score"),
            column(clients, "weight"),
        ),
        examples=None if counts_NK is None else counts_NK.sum(axis=1),
        entropy=None if counts_NK is None else label_entropy(counts_NK),
        seconds=result.get("seconds"),
        data_hash=(manifest.get("data") or {}).get("hash"),
        partition_hash=(manifest.get("partition") or {}).get("hash"),
        machine=f"{manifest.get('hostname', 'unknown host')}, {backend}",
        checksum=(result.get("checksums") or {}).get("params"),
    )


COSTS = (
    "round_s",
    "train_s",
    "score_tail_s",
    "aggregate_s",
    "evaluate_s",
    "commit_s",
    "driver_bytes",
    "scored_images",
    "client_utilisation",
    "scorer_utilisation",
    "failed",
    "excluded",
    "retries",
)
"""Columns of the table of rounds that say what a round cost."""


def curve_of(rounds: Any) -> Curve:
    """The curve in a table of rounds; columns that the table lacks are NaN."""
    return Curve(
        column(rounds, "round_num").astype(int),
        column(rounds, "accuracy"),
        column(rounds, "validation_accuracy"),
        {name: column(rounds, name) for name in COSTS},
    )


def column(table: Any, name: str) -> np.ndarray:
    """A column as float64; nulls, and all of a column that is not there, are NaN."""
    if name not in table.column_names:
        return np.full(len(table), np.nan)
    return np.array(table[name].to_pylist(), dtype=np.float64)


def label_entropy(counts_NK: np.ndarray) -> np.ndarray:
    """Entropy of each client's labels, -sum_k p_k ln p_k, in nats; 0 for a client without examples."""
    shares = counts_NK / np.maximum(counts_NK.sum(axis=1, keepdims=True), 1)
    entropy: np.ndarray = np.abs((shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1))
    return entropy


def below(key: str, sections: Sequence[str]) -> bool:
    """Whether a dotted key is one of the sections or lies in one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _sums(clients: Any, name: str, round_num: np.ndarray, *, count: bool = False) -> np.ndarray:
    """Sum (or number) of what the clients of each round have in a column, [R]; NaN for a round where no client has any."""
    values, at = column(clients, name), column(clients, "round_num")
    known = np.isfinite(values)
    totals = [values[known & (at == number)] for number in round_num]
    return np.array([(len(part) if count else part.sum()) if len(part) else np.nan for part in totals])


def _class_counts(path: Path) -> np.ndarray | None:
    """[N, K], examples of each class at each client."""
    if not path.is_file():
        return None
    table = pq.ParquetFile(path).read()
    if not {"client", "label"} <= set(table.column_names) or not len(table):
        return None
    client, label = (table[name].to_numpy().astype(int) for name in ("client", "label"))
    # Clients without examples have no row.
    num_clients = int((table.schema.metadata or {}).get(b"num_clients", client.max() + 1))
    counts = np.zeros((num_clients, label.max() + 1), dtype=np.int64)
    np.add.at(counts, (client, label), 1)
    return counts


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _without_copies(runs: Sequence[Run], left_out: list[LeftOut]) -> Iterator[Run]:
    """One run of each setting and seed: a second one is no second observation."""
    first: dict[str, Run] = {}
    for run in runs:
        key = json.dumps([run.settings, run.seed], sort_keys=True, default=str)
        other = first.setdefault(key, run)
        if other is run:
            yield run
        else:
            same = "the same" if run.checksum and run.checksum == other.checksum else "another"
            left_out.append(LeftOut(run.folder, f"same settings and seed as {other.folder}, with {same} result"))
