"""TensorBoard events of a run: one file, written by the driver, step = round.

    global/loss  global/accuracy  global/macro_f1  global/recall/<class>      the global model on the test set
    global/best_accuracy  rounds_to/<50 .. 95>                                so far; the first round with that many per cent
    global/validation_loss  global/validation_accuracy                        the same on the validation set, if asked for
    score/client_007  weight/client_007                                       each client, runs of up to 50 clients
    score/min  /p10  /median  /p90  /max  and the same below weight/          larger runs
    score/size_small  /size_medium  /size_large  and the same below weight/   medians; thirds of all clients by examples
    score/dist  weight/dist                                                   histograms over the cohort
    weight/entropy  weight/max  weight/error                                  error: where only a subset is scored
    validation/loss_median  validation/accuracy_median                        the clients' models, on the validation set
    layer/<unit>/norm_median                                                  norm of the validation gradient, by unit
    time/train  /score_tail  /aggregate  /evaluate  /commit  /round           seconds
    pool/client/utilisation  pool/scorer/utilisation                          0 to 1
    pool/driver_bytes                                                         of vectors, over the network, if there are any
    fault/retries  fault/failed  fault/excluded  fault/skipped
    result/seconds_per_round                                                  once, at the end
    heatmap/weight  heatmap/layer_norm                                        images: clients x rounds, units x rounds
    about  config                                                             text cards: these tags; the configuration

"/" separates the parts of a tag. In the name of a class or unit it is written `%2F`, and `%` is written `%25`; every
other character stays as it is. A value that does not exist in a round has no point.

The file also holds the arrangement of the page Custom Scalars, and of the page HParams the run's values of
`output.hparams`, which metrics to list, and how the run ended (`success`, `failure`; one that was interrupted is `unknown`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from raysim.errors import RunError
from raysim.recording import tensorboard_pages as pages
from raysim.recording.heatmap import PUOR, VIRIDIS, Heatmap, log_ticks
from raysim.recording.logger import RunInfo
from raysim.recording.metrics import RoundMetrics, finite, unit_norms
from raysim.recording.records import ClientRecord, RoundRecord
from raysim.recording.tables import read_table

MAX_HEATMAPS = 10
"""About so many pictures of each kind are written over a run (and some of its first rounds); TensorBoard keeps ten."""

_BINS = 30
_WEIGHT_TICKS = [(-3.0, "1/8"), (-2.0, "1/4"), (-1.0, "1/2"), (0.0, "1"), (1.0, "2"), (2.0, "4"), (3.0, "8")]


class TensorBoardWriter:
    """Writes the events of one run, below `folder/tensorboard`.

    When a run is resumed, what an earlier file says of the rounds before `resume_round` moves into the new one.

    Args:
        info: The run.

    Raises:
        RunError: If the file cannot be written.
    """

    def __init__(self, info: RunInfo) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._info, self._metrics = info, RoundMetrics(info)
        self._folder = info.folder / "tensorboard"
        earlier = sorted(self._folder.glob("events.out.tfevents.*"))
        # Largest clients first, for the picture of weights.
        sizes = np.asarray(info.client_sizes)
        self._order = np.argsort(-sizes, kind="stable")
        self._rank = np.argsort(self._order)
        self._weights: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._norms: dict[int, np.ndarray] = {}
        self._last = self._drawn = 0
        self._artist = ThreadPoolExecutor(1, thread_name_prefix="raysim heat maps")
        self._drawing: list[Future[None]] = []
        with self._explained():
            self._file: Any = EventFileWriter(str(self._folder))
            if info.resume_round is not None:
                self._restore(earlier, info.resume_round)
            self._write(0, time.time(), pages.opening(info))
            self._file.flush()
        for path in earlier:
            path.unlink()

    def write_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> None:
        """Write the events of one round and hand them to the operating system.

        Args:
            round_record: The round; its `finished` is the time of the events.
            client_records: The clients of its cohort; empty for round 0.

        Raises:
            RunError: If the file cannot be written.
        """
        step = round_record.round_num
        values = [pages.scalar(*pair) for pair in self._metrics.of_round(round_record, client_records).items()]
        for name in ("score", "weight"):
            found = finite(getattr(record, name) for record in client_records)
            if len(found):
                values.append(pages.histogram(f"{name}/dist", found, _BINS))
        if step:
            self._remember(step, client_records)
        with self._explained():
            self._write(step, round_record.finished.timestamp(), values)
            self._file.flush()
        if step and self._due(step):
            self._draw()

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Write the last pictures and how the run ended, and close the file."""
        if self._drawn < self._last:
            self._draw()
        self._artist.shutdown()
        with self._explained():
            for drawn in self._drawing:
                drawn.result()
            if result is not None:
                self._write(self._last, time.time(), pages.closing(result))
            self._file.close()

    def _write(self, step: int, wall_time: float, values: Sequence[Any]) -> None:
        """All values of a moment as one event: much cheaper than an event for each."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values:
            self._file.add_event(Event(step=step, wall_time=wall_time, summary=Summary(value=values)))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """TensorBoard writes from a thread: an error shows up in any later call."""
        try:
            yield
        except OSError as error:
            raise RunError(f"Cannot write {self._folder}: {error.strerror or error}.") from error

    def _restore(self, paths: Sequence[Path], resume_round: int) -> None:
        """Take over what earlier files and the table of clients hold of the rounds that stay."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # A page that is open forgets what it has read of the earlier files.
        self._file.add_event(Event(step=0, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))
        row_of = {tag: row for row, tag in enumerate(self._metrics.unit_tags)}
        for path in paths:
            for event in LegacyEventFileLoader(str(path)).Load():
                values = [value for value in event.summary.value if pages.is_of_a_round(value.tag)]
                if event.step < resume_round:
                    self._write(event.step, event.wall_time, values)
                    norms = {row_of[value.tag]: value.simple_value for value in values if value.tag in row_of}
                    if len(norms) == len(row_of) > 0:
                        self._norms[event.step] = np.array([norms[row] for row in range(len(row_of))])
        table = read_table(self._info.folder, "clients").select(["round_num", "client_id", "weight"]).drop_null()
        rounds, clients, weights = (table[name].to_numpy() for name in table.column_names)
        for step in np.unique(rounds[rounds < resume_round]).tolist():
            self._keep_weights(step, clients[rounds == step], weights[rounds == step])
        self._last = self._drawn = resume_round - 1

    def _remember(self, step: int, client_records: Sequence[ClientRecord]) -> None:
        self._last = step
        used = [record for record in client_records if record.weight is not None]
        self._keep_weights(
            step, np.array([r.client_id for r in used], dtype=np.int64), np.array([r.weight for r in used], dtype=float)
        )
        norms = unit_norms(client_records)
        if norms is not None:
            self._norms[step] = norms

    def _keep_weights(self, step: int, clients: np.ndarray, weights: np.ndarray) -> None:
        """As logarithms of the weight over equal weight: twice and half of it are equally far from white."""
        self._weights[step] = clients, np.log2(np.clip(weights * len(weights), 2.0**-3, 2.0**3))

    def _due(self, step: int) -> bool:
        """The first rounds, ever farther apart, then every tenth of the run."""
        every = -(-self._info.rounds // MAX_HEATMAPS)
        return step % every == 0 or step == self._info.rounds or (step < every and step & (step - 1) == 0)

    def _draw(self) -> None:
        """Draw in a thread what there is now; no round waits for it."""
        self._drawn = self._last
        for make in (self._weight_map, self._norm_map):
            picture = make()
            if picture is not None:
                self._drawing.append(self._artist.submit(self._write_picture, self._last, time.time(), *picture))

    def _write_picture(self, step: int, wall_time: float, tag: str, picture: Heatmap) -> None:
        self._write(step, wall_time, [pages.image(tag, *picture.png())])

    def _weight_map(self) -> tuple[str, Heatmap] | None:
        sizes = self._info.client_sizes
        values = np.full((len(sizes), self._last), np.nan, dtype=np.float32)
        for step, (clients, relative) in self._weights.items():
            values[self._rank[clients], step - 1] = relative
        if not np.isfinite(values).any():
            return None
        names = [f"{client} ({sizes[client]})" for client in self._order.tolist()]
        title = "client weight, times equal weight (grey: not used)"
        rows = "client (its training examples)"
        return "heatmap/weight", Heatmap(values, 1, names, title, rows, PUOR, -3.0, 3.0, _WEIGHT_TICKS)

    def _norm_map(self) -> tuple[str, Heatmap] | None:
        values = np.full((len(self._info.unit_names), self._last), np.nan)
        for step, norms in self._norms.items():
            values[:, step - 1] = np.log10(norms, out=np.full(len(norms), np.nan), where=norms > 0)
        values[~np.isfinite(values)] = np.nan
        if np.isnan(values).all():
            return None
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        low, high = (low, high) if high - low > 0.1 else (low - 0.5, high + 0.5)
        title = "norm of the validation gradient, median of the cohort"
        marks = log_ticks(low, high)
        return "heatmap/layer_norm", Heatmap(values, 1, self._info.unit_names, title, "unit", VIRIDIS, low, high, marks)
