"""The Parquet tables of a run: one row per round (`rounds/`), one row per round and client (`clients/`).

Every round is one file per table, `rounds/00001.parquet`, there as soon as the round is committed and never changed
afterwards. Each folder as a whole is the table: `pandas.read_parquet("runs/name/rounds")`, `pyarrow.dataset.dataset`
and DuckDB's `read_parquet('runs/name/rounds/*.parquet')` work while the run goes on, and the tables of several runs
concatenate, because the schemas never depend on the configuration or on the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.recording.files import write_atomic
from raysim.recording.records import ClientRecord, RoundRecord

TableName = Literal["rounds", "clients"]

_TIME = pa.timestamp("us", tz="UTC")

COLUMNS: Mapping[TableName, Mapping[str, tuple[Any, str]]] = {
    "rounds": {
        "round_num": (pa.int32(), "Round, 1 = first; 0 is the evaluation of the initial model."),
        "started": (_TIME, "Begin of the round."),
        "finished": (_TIME, "End of the round."),
        "sampled": (pa.int32(), "Clients of the cohort."),
        "ok": (pa.int32(), "Clients whose update was used."),
        "skipped": (pa.int32(), "Clients without anything to train on."),
        "excluded": (pa.int32(), "Clients whose update was not usable (not finite)."),
        "failed": (pa.int32(), "Clients whose work did not end."),
        "updated": (pa.bool_(), "Whether the global model changed; false if no client's update was usable."),
        "loss": (pa.float64(), "Mean loss of the global model on the test set; null when not evaluated this round."),
        "accuracy": (pa.float64(), "Accuracy of the global model on the test set, 0 to 1."),
        "macro_f1": (pa.float64(), "F1 score of the global model on the test set, averaged over the classes."),
        "recall": (pa.list_(pa.float64()), "Recall per class; null for a class that the test set lacks."),
        "classes_present": (pa.int32(), "Classes that the test set has."),
        "weight_max": (pa.float64(), "Largest client weight."),
        "weight_entropy": (pa.float64(), "Entropy of the client weights, natural logarithm."),
        "weight_error": (
            pa.float64(),
            "Estimate of the total variation between the weights and those from the whole validation set; null when all of "
            "it was scored.",
        ),
        "scored_images": (pa.int32(), "Validation images that models were scored on; null when none was."),
        "train_s": (pa.float64(), "Seconds from the first dispatch to the last update."),
        "score_tail_s": (pa.float64(), "Seconds from the last update being ready to the last score."),
        "aggregate_s": (pa.float64(), "Seconds of weighting and summing."),
        "evaluate_s": (
            pa.float64(),
            "Seconds of evaluating the global model; the next round may have begun meanwhile.",
        ),
        "commit_s": (pa.float64(), "Seconds of writing the checkpoint; the rows and events of the round follow it."),
        "round_s": (
            pa.float64(),
            "Seconds from its begin to that of the next round; of the last one, to its checkpoint.",
        ),
        "client_utilisation": (pa.float64(), "Share of the client actors' time spent training, 0 to 1."),
        "scorer_utilisation": (pa.float64(), "Share of the scorers' time spent scoring, 0 to 1."),
        "retries": (pa.int32(), "Units of work that were run again."),
        "driver_bytes": (pa.int64(), "Bytes of vectors that the driver sent to other nodes and got from them."),
        "params_checksum": (pa.string(), "Checksum of the global parameters after the round."),
        "buffers_checksum": (pa.string(), "Checksum of the global buffers after the round."),
        "server_checksum": (pa.string(), "Checksum of the server state after the round."),
        "clients_checksum": (pa.string(), "Checksum of the cohort's client states after the round."),
        "notes": (pa.list_(pa.string()), "What else is worth knowing, one sentence each."),
    },
    "clients": {
        "round_num": (pa.int32(), "Round, 1 = first."),
        "client_id": (pa.int32(), "Client, 0 to N-1."),
        "position": (pa.int32(), "Place in the sampled cohort, from 0."),
        "status": (pa.string(), "ok, skipped (nothing to train on), excluded (update not usable) or failed."),
        "reason": (pa.string(), "Why the client was not used."),
        "num_examples": (pa.int64(), "Training examples n_k."),
        "num_steps": (pa.int64(), "Optimizer steps really taken."),
        "train_loss": (pa.float64(), "Mean training loss over the examples seen."),
        "score": (pa.float64(), "Score of the client's model; larger = farther from stationary."),
        "score_age": (pa.int32(), "Rounds since that score was taken; 0 = of this round's model."),
        "weight": (pa.float64(), "Aggregation weight; sums to 1 over the clients of a round."),
        "validation_loss": (pa.float64(), "Mean loss of the client's model on the validation set."),
        "validation_accuracy": (pa.float64(), "Accuracy of the client's model on the validation set, 0 to 1."),
        "train_s": (pa.float64(), "Seconds of local work."),
        "score_s": (pa.float64(), "Seconds of scoring."),
        "queue_s": (pa.float64(), "Seconds between the update being ready and scoring begun."),
        "peak_memory": (pa.int64(), "Most GPU memory, in bytes, that local work held; null on CPUs."),
        "actor": (pa.string(), "Name of the actor that trained the client."),
        "pid": (pa.int32(), "Process id of that actor."),
        "node": (pa.string(), "Id of the node of that actor."),
        "attempt": (pa.int32(), "Number of the attempt that ended, 1 = first."),
        "scorer": (pa.string(), "Name of the actor that scored the client's model."),
        "scorer_pid": (pa.int32(), "Process id of that actor."),
        "scorer_attempt": (pa.int32(), "Number of the scoring attempt that ended, 1 = first."),
        "started": (_TIME, "Begin of local work."),
        "finished": (_TIME, "End of the client's part: scoring, or local work where nothing is scored."),
    },
}
"""Type and meaning of every column, by table. The files hold the meaning too: `description` in the field's metadata."""


def _schema(table: TableName) -> Any:
    return pa.schema(
        [pa.field(name, kind, metadata={"description": text}) for name, (kind, text) in COLUMNS[table].items()]
    )


ROUNDS = _schema("rounds")
"""Schema of the table of rounds."""
CLIENTS = _schema("clients")
"""Schema of the table of clients."""
_SCHEMAS: dict[TableName, Any] = {"rounds": ROUNDS, "clients": CLIENTS}
_KEYS: dict[TableName, tuple[str, ...]] = {"rounds": ("round_num",), "clients": ("round_num", "client_id")}


class TableWriter:
    """Writes the tables of one run.

    Args:
        folder: The run folder, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for table in COLUMNS:
            (folder / table).mkdir(exist_ok=True)

    def write_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> None:
        """Write the rows of one round. Writing a round again replaces it.

        Args:
            round_record: The round.
            client_records: The clients of its cohort, in any order; may be empty.
        """
        if any(record.round_num != round_record.round_num for record in client_records):
            raise ValueError(f"A client record of another round than {round_record.round_num}.")
        # The clients first: a round in the table of rounds has its clients.
        self._write("clients", round_record.round_num, sorted(client_records, key=lambda client: client.client_id))
        self._write("rounds", round_record.round_num, [round_record])

    def discard_after(self, round_num: int) -> None:
        """Remove what a killed process left behind of the rounds after `round_num`; call it before a run is resumed."""
        for table in COLUMNS:
            for path in (self._folder / table).iterdir():
                if path.name.endswith(".tmp") or (path.suffix == ".parquet" and int(path.stem) > round_num):
                    path.unlink()

    def _write(self, table: TableName, round_num: int, records: Sequence[RoundRecord] | Sequence[ClientRecord]) -> None:
        rows = [{name: getattr(record, name) for name in COLUMNS[table]} for record in records]
        with write_atomic(self._folder / table / f"{round_num:05d}.parquet") as handle:
            pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMAS[table]), handle)


def read_rounds(folder: Path) -> list[RoundRecord]:
    """The table of rounds as records, by round."""
    rows = read_table(folder, "rounds").to_pylist()
    plain: list[dict[str, Any]] = [{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    return [RoundRecord(**row) for row in plain]


def read_table(folder: Path, table: TableName) -> Any:
    """A table of a run, as far as the run has come.

    Args:
        folder: The run folder.
        table: `rounds` or `clients`.

    Returns:
        A `pyarrow.Table` of schema `ROUNDS` or `CLIENTS`, sorted by round (and client); empty if no round is done. A column
        that an older version did not write is null.
    """
    schema = _SCHEMAS[table]
    paths = sorted((folder / table).glob("[0-9]*.parquet"))
    parts = [pq.ParquetFile(path).read() for path in paths]
    rows = pa.concat_tables([schema.empty_table(), *parts], promote_options="default").select(schema.names).cast(schema)
    return rows.sort_by([(key, "ascending") for key in _KEYS[table]])
