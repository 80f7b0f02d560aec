"""TensorBoard events of a run: one file, written by the driver, step = round.

    global/loss  global/accuracy  global/macro_f1  global/recall/<class>      the global model on the test set
    global/validation_loss  global/validation_accuracy                        the same on the validation set, if asked for
    score/client_007  weight/client_007                                       each client, runs of up to 50 clients
    score/min  /p10  /median  /p90  /max  and the same below weight/          larger runs
    score/dist  weight/dist                                                   histograms over the cohort
    weight/entropy  weight/max  weight/error                                  error: where only a subset is scored
    validation/loss_median  validation/accuracy_median                        the clients' models, on the validation set
    layer/<unit>/norm_median                                                  norm of the validation gradient, by unit
    time/train  /score_tail  /aggregate  /evaluate  /commit  /round           seconds
    pool/client/utilisation  pool/scorer/utilisation                          0 to 1
    pool/driver_bytes                                                         of vectors, over the network
    fault/retries  fault/failed  fault/excluded  fault/skipped
    config                                                                    a text card: the resolved configuration

"/" separates the parts of a tag. In the name of a class or unit it is written `%2F`, and `%` is written `%25`; every
other character stays as it is. A value that does not exist in a round has no point.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from raysim.errors import RunError
from raysim.recording.records import ClientRecord, RoundRecord

MAX_CLIENT_CURVES = 50
"""The largest number of clients that have a curve each."""

_QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


class TensorBoardWriter:
    """Writes the events of one run, below `folder/tensorboard`.

    Args:
        folder: The run folder.
        class_names: Name of each class, [K].
        unit_names: Name of each unit, [U].
        num_clients: N, all clients of the run.
        resume_round: The first round that will be written when a run is resumed: TensorBoard drops what an earlier file
            says of it and of later rounds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        class_names: Sequence[str],
        unit_names: Sequence[str],
        num_clients: int,
        resume_round: int | None = None,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._recall_tags = [f"global/recall/{escape(name)}" for name in class_names]
        self._unit_tags = [f"layer/{escape(name)}/norm_median" for name in unit_names]
        self._each_client = num_clients <= MAX_CLIENT_CURVES
        self._writer: Any = SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=resume_round)

    def write_config(self, yaml_text: str) -> None:
        """Show the resolved configuration as a text card."""
        # Indented text is code in Markdown, whatever characters it has.
        with self._explained():
            self._writer.add_text("config", "".join(f"    {line}\n" for line in yaml_text.splitlines()))
            self._writer.flush()

    def write_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> None:
        """Write the events of one round and hand them to the operating system.

        Args:
            round_record: The round; its `finished` is the time of the events.
            client_records: The clients of its cohort; empty for round 0.

        Raises:
            RunError: If the file cannot be written.
        """
        step, walltime = round_record.round_num, round_record.finished.timestamp()
        with self._explained():
            for tag, value in self._scalars(round_record, client_records):
                if value is not None:
                    self._writer.add_scalar(tag, value, step, walltime=walltime)
            for name in ("score", "weight"):
                values = _finite(getattr(record, name) for record in client_records)
                if len(values):
                    self._writer.add_histogram(f"{name}/dist", values, step, walltime=walltime)
            self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        with self._explained():
            self._writer.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """TensorBoard writes from a thread: an error shows up in any later call."""
        try:
            yield
        except OSError as error:
            raise RunError(f"Cannot write {self._writer.log_dir}: {error.strerror or error}.") from error

    def _scalars(
        self, round_record: RoundRecord, client_records: Sequence[ClientRecord]
    ) -> Iterable[tuple[str, float | None]]:
        yield "global/loss", round_record.loss
        yield "global/accuracy", round_record.accuracy
        yield "global/macro_f1", round_record.macro_f1
        yield "global/validation_loss", round_record.validation_loss
        yield "global/validation_accuracy", round_record.validation_accuracy
        if round_record.recall is not None:
            yield from zip(self._recall_tags, round_record.recall, strict=True)
        for name in ("score", "weight"):
            yield from self._client_scalars(name, client_records)
        yield "weight/entropy", round_record.weight_entropy
        yield "weight/max", round_record.weight_max
        yield "weight/error", round_record.weight_error
        yield "validation/loss_median", _median(record.validation_loss for record in client_records)
        yield "validation/accuracy_median", _median(record.validation_accuracy for record in client_records)
        norms = [record.unit_norms for record in client_records if record.unit_norms is not None]
        if norms:
            yield from zip(self._unit_tags, np.median(np.array(norms), axis=0).tolist(), strict=True)
        for name in ("train", "score_tail", "aggregate", "evaluate", "commit", "round"):
            yield f"time/{name}", getattr(round_record, f"{name}_s")
        yield "pool/client/utilisation", round_record.client_utilisation
        yield "pool/scorer/utilisation", round_record.scorer_utilisation
        yield "pool/driver_bytes", round_record.driver_bytes
        for name in ("retries", "failed", "excluded", "skipped"):
            yield f"fault/{name}", getattr(round_record, name)

    def _client_scalars(self, name: str, client_records: Sequence[ClientRecord]) -> Iterable[tuple[str, float | None]]:
        if self._each_client:
            for record in client_records:
                yield f"{name}/client_{record.client_id:03d}", getattr(record, name)
            return
        values = _finite(getattr(record, name) for record in client_records)
        if len(values):
            for label, quantile in _QUANTILES.items():
                # weight/max is also a scalar of the round, the same number.
                if (name, label) != ("weight", "max"):
                    yield f"{name}/{label}", float(np.quantile(values, quantile))


def escape(name: str) -> str:
    """A name as one part of a tag; `urllib.parse.unquote` undoes it.

    Example:
        >>> escape("pneumonia a/b")
        'pneumonia a%2Fb'
    """
    return name.replace("%", "%25").replace("/", "%2F")


def _finite(values: Iterable[float | None]) -> np.ndarray:
    present = np.array([value for value in values if value is not None], dtype=np.float64)
    return present[np.isfinite(present)]


def _median(values: Iterable[float | None]) -> float | None:
    present = _finite(values)
    return float(np.median(present)) if len(present) else None
