"""A run: round after round of sample, train and score, weigh, step, evaluate, commit."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysim.algorithms.base import Cohort
from raysim.config import RunConfig, load_config
from raysim.data.partition import Partition
from raysim.errors import ConfigError, RaysimError, RunError
from raysim.evaluation import Metrics
from raysim.execution.base import Broadcast, Executor, Observer, Outcome, PoolUse, WorkItem
from raysim.execution.work import BUFFER_FLOATS, BUFFER_INTS
from raysim.preparation import Prepared, prepare
from raysim.recording.checkpoint import ClientFile, write_checkpoint, write_client_state
from raysim.recording.manifest import build_manifest, write_json
from raysim.recording.progress import Progress
from raysim.recording.records import ClientRecord, RoundRecord
from raysim.recording.runfolder import check_space, claim
from raysim.recording.tables import TableWriter, read_table
from raysim.recording.tensorboard import TensorBoardWriter
from raysim.seeding import Purpose, rng_for
from raysim.state import Buffers, RoundState, as_tensor, record_checksum, to_arrays
from raysim.vector import checksum
from raysim.weighting.base import Weights

logger = logging.getLogger("raysim")


@dataclass(frozen=True)
class RunRecord:
    """What a run left behind.

    Attributes:
        folder: The run folder.
        config: The resolved configuration.
        result: Content of `result.json`: status, final and best metrics, checksums, seconds.
    """

    folder: Path
    config: RunConfig
    result: Mapping[str, Any]

    @property
    def rounds(self) -> Any:
        """The rounds table (Arrow), one row per round."""
        return read_table(self.folder, "rounds")

    @property
    def clients(self) -> Any:
        """The clients table (Arrow), one row per round and sampled client."""
        return read_table(self.folder, "clients")

    @property
    def partition(self) -> Partition:
        """Which client held which example."""
        return Partition.read(self.folder / "partition.parquet")


@dataclass(frozen=True)
class RoundResult:
    """A round that was computed and not yet committed."""

    state: RoundState
    outcomes: Sequence[Outcome]
    weights: Weights | None
    use: PoolUse
    aggregate_s: float


def sample_cohort(seed: int, round_num: int, num_clients: int, size: int) -> list[int]:
    """Clients of a round, ascending: uniform, without replacement, the same for all methods at one seed."""
    rng = rng_for(seed, Purpose.COHORT, round_num=round_num)
    chosen: list[int] = sorted(rng.choice(num_clients, size=size, replace=False).tolist())
    return chosen


def run_round(prepared: Prepared, state: RoundState, executor: Executor, observer: Observer) -> RoundResult:
    """One round, from the state after the last one to the state after this one."""
    setup, population, round_num = prepared.setup, prepared.population, state.round_num + 1
    ids = sample_cohort(setup.seed, round_num, population.num_clients, prepared.config.cohort_size)
    items = [
        WorkItem(client, position, state.clients.get(client), population.num_examples[client])
        for position, client in enumerate(ids)
    ]
    trainable = [item for item in items if item.num_examples > 0]
    outcomes, reference, use = executor.run_cohort(
        Broadcast.of(round_num, state.server, state.buffers), trainable, observer
    )
    for outcome in outcomes:
        if outcome.status == "ok" and outcome.train is not None and outcome.train.scalars["num_steps"] == 0:
            outcome.drop("skipped", "took no step: too few examples for a batch")
    _check_enough(prepared, round_num, outcomes)

    started = time.perf_counter()
    usable = [outcome for outcome in outcomes if outcome.status == "ok"]
    server, buffers, weights = state.server, state.buffers, None
    if usable:
        weights = setup.weighting.weights([o.report() for o in usable], reference, population.layout)
        cohort = Cohort(
            client_ids=tuple(o.client_id for o in usable),
            weights=weights,
            population=population,
            scalars=[o.train.scalars for o in usable if o.train is not None],
            summation=lambda coefficients: executor.sums(usable, coefficients),
            dtype=state.server.params.dtype,
        )
        server = setup.algorithm.server_update(state.server, cohort)
        buffers = mean_buffers(cohort, state.buffers, executor, usable)
        if not torch.isfinite(server.params).all():
            raise RunError(f"round {round_num}: the server's step made the global model non-finite; it is not deployed")
    changed = {o.client_id: o for o in usable if o.state is not None}
    after = RoundState(
        round_num,
        server,
        buffers,
        {**state.clients, **{client: o.state for client, o in changed.items()}},
        {**state.client_checksums, **{k: o.train.state_checksum for k, o in changed.items() if o.train}},
    )
    sampled = {outcome.client_id: outcome for outcome in outcomes}
    complete = [sampled.get(i.client_id) or Outcome(i.client_id, i.position, "skipped", "no examples") for i in items]
    return RoundResult(after, complete, weights, use, time.perf_counter() - started)


def mean_buffers(cohort: Cohort[Any], buffers: Buffers, executor: Executor, usable: Sequence[Outcome]) -> Buffers:
    """Buffers of the new global model: the weighted mean of the clients' floats, the maximum of their integers.

    Only the client weights apply, and nothing of the algorithm: momentum on a running variance makes it negative.
    """
    floats = buffers.floats
    if len(floats):
        floats = cohort.sums(**{BUFFER_FLOATS: cohort.weights.client})[BUFFER_FLOATS]
    ints = buffers.ints
    if len(ints):
        for outcome in usable:
            ints = torch.maximum(ints, as_tensor(executor.fetch(outcome.update)[BUFFER_INTS]))
    return Buffers(floats, ints)


def run(
    config: RunConfig | str | Path,
    overrides: Sequence[str] = (),
    *,
    progress: Progress | None = None,
    command: Sequence[str] | None = None,
) -> RunRecord:
    """Run a configuration to its end.

    Args:
        config: A checked configuration, or the path of a file.
        overrides: `key.path=value`, only with a path.
        progress: Told how it goes; None: nobody.
        command: The command line, for the manifest.

    Raises:
        ConfigError: Found before round 1; no run folder is left.
        RunError: The run cannot go on; finished rounds are kept and readable.
    """
    config = config if isinstance(config, RunConfig) else load_config(config, overrides)
    progress = progress or _Silent()
    prepared = prepare(config)
    folder = config.folder
    claim(folder)
    begun = False
    started = datetime.now(UTC)
    clock = time.perf_counter()
    try:
        with _logging_to(folder / "run.log"), progress:
            for note in prepared.notes:
                logger.info(note)
                progress.message(note)
            check_space(folder, 3 * prepared.demand.model_bytes if config.output.checkpoint_every else 0)
            executor = make_executor(prepared, progress)
            with contextlib.closing(executor):
                recorder = Recorder(prepared, executor, started, command)
                with contextlib.closing(recorder):
                    logger.info("ready after %.1f s", time.perf_counter() - clock)
                    begun = True
                    _run_rounds(prepared, executor, recorder, progress)
    except BaseException as error:
        if begun:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            reason = str(error) or type(error).__name__
            recorder.finish(status, reason, time.perf_counter() - clock)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        raise
    result = recorder.finish("finished", None, time.perf_counter() - clock)
    return RunRecord(folder, config, result)


def load(folder: str | Path) -> RunRecord:
    """The record of a run, as far as the run has come.

    Raises:
        ConfigError: The folder holds no run.
    """
    import json

    folder = Path(folder)
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder}: is not a run folder (it has no config.yaml)")
    result = folder / "result.json"
    content = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {"status": "running"}
    return RunRecord(folder, load_config(path), content)


def make_executor(prepared: Prepared, progress: Progress) -> Executor:
    """The executor that the configuration asks for; the Ray one is imported only then."""
    settings = prepared.config.execution
    if settings.backend == "serial":
        from raysim.execution.serial import SerialExecutor

        return SerialExecutor(prepared.setup)
    from raysim.execution.ray_executor import RayExecutor

    def say(line: str) -> None:
        logger.info(line)
        progress.message(line)

    return RayExecutor(prepared.setup, settings, prepared.demand, say)


def _run_rounds(prepared: Prepared, executor: Executor, recorder: Recorder, progress: Progress) -> None:
    config, state = prepared.config, prepared.initial
    recorder.initial(state, executor.evaluate(state.server, state.buffers))
    updated = False
    while state.round_num < config.rounds:
        begun = recorder.now()
        round_num = state.round_num + 1
        progress.round_started(round_num, config.cohort_size, scored=prepared.setup.weighting.needs_probe)
        result = run_round(prepared, state, executor, progress)
        for note in result.weights.notes if result.weights is not None else ():
            logger.warning("round %d: %s", round_num, note)
            progress.message(f"round {round_num}: {note}")
        for outcome in result.outcomes:
            if outcome.status in ("failed", "excluded"):
                progress.message(f"round {round_num}: client {outcome.client_id} {outcome.status}: {outcome.reason}")
        state = result.state
        updated |= result.weights is not None
        clock = time.perf_counter()
        due = round_num % config.evaluation.every == 0 or round_num == config.rounds
        metrics = executor.evaluate(state.server, state.buffers) if due else None
        record = recorder.commit(result, metrics, begun, time.perf_counter() - clock)
        progress.round_finished(record)
        del result
    if not updated:
        raise RunError("no round had a usable update: the global model is still the initial one")


def _check_enough(prepared: Prepared, round_num: int, outcomes: Sequence[Outcome]) -> None:
    settings = prepared.config.execution
    lost = [o for o in outcomes if o.status == "excluded"]
    if lost and settings.on_nonfinite == "abort":
        raise RunError(
            f"round {round_num}: client {lost[0].client_id}: {lost[0].reason} (execution.on_nonfinite: abort)"
        )
    failed = [o for o in outcomes if o.status == "failed"]
    usable = sum(o.status == "ok" for o in outcomes)
    if failed and usable < settings.min_clients:
        reasons = Counter(o.reason for o in failed).most_common()
        raise RunError(
            f"round {round_num}: {usable} usable updates, execution.min_clients is {settings.min_clients}; failed: "
            + "; ".join(f"{count} x {reason}" for reason, count in reasons)
        )


class Recorder:
    """Writes a run's folder: tables, events, checkpoints, manifest, result. The round's commit is its checkpoint."""

    def __init__(
        self, prepared: Prepared, executor: Executor, started: datetime, command: Sequence[str] | None
    ) -> None:
        config = prepared.config
        self._prepared, self._executor, self._config, self.folder = prepared, executor, config, config.folder
        self._records: list[RoundRecord] = []
        self._initial: RoundRecord | None = None
        self._files: dict[int, ClientFile] = {}
        (self.folder / "config.yaml").write_text(config.as_yaml(), encoding="utf-8")
        setup = prepared.setup
        setup.partition.write(self.folder / "partition.parquet")
        manifest = build_manifest(
            command=command,
            started=started,
            seed=config.seed,
            threads=setup.threads,
            plan=executor.describe(),
            data={
                "name": config.data.name,
                "origin": prepared.origin,
                "hash": checksum(setup.train.images, setup.train.labels, setup.test.images, setup.test.labels),
                "class_names": list(prepared.class_names),
                "train": len(setup.train),
                "validation": len(setup.validation),
                "test": len(setup.test),
                "image_shape": list(setup.train.images.shape[1:]),
            },
            partition={
                "hash": setup.partition.content_hash,
                "clients": setup.partition.num_clients,
                "tries": setup.partition.tries,
                "repaired": setup.partition.repaired,
            },
            model={"name": config.model.name, "parameters": prepared.population.layout.size},
            cohort_size=config.cohort_size,
            scoring_ratio=prepared.demand.scoring_ratio,
            notes=list(prepared.notes),
        )
        write_json(self.folder / "manifest.json", manifest)
        self._tables = TableWriter(self.folder)
        self._board: TensorBoardWriter | None = None
        if config.output.tensorboard:
            self._board = TensorBoardWriter(
                self.folder,
                class_names=prepared.class_names,
                unit_names=prepared.population.layout.names,
                num_clients=prepared.population.num_clients,
            )
            self._board.write_config(config.as_yaml())

    def now(self) -> tuple[datetime, float]:
        """This moment, for people and for differences."""
        return datetime.now(UTC), time.perf_counter()

    def initial(self, state: RoundState, metrics: Metrics) -> None:
        """Record the evaluation of the initial model."""
        now = datetime.now(UTC)
        record = RoundRecord(
            round_num=0, started=now, finished=now, round_s=0.0, **_checksums(state, ()), **_metrics(metrics)
        )
        self._initial = record
        if self._board is not None:
            self._board.write_round(record, ())

    def commit(
        self, result: RoundResult, metrics: Metrics | None, begun: tuple[datetime, float], evaluate_s: float
    ) -> RoundRecord:
        """Make a round permanent: checkpoint, then its rows and events."""
        state, outcomes, use = result.state, result.outcomes, result.use
        clock = time.perf_counter()
        every = self._config.output.checkpoint_every
        if every and (state.round_num % every == 0 or state.round_num == self._config.rounds):
            self._checkpoint(state)
        counts = Counter(outcome.status for outcome in outcomes)
        weights = None if result.weights is None else result.weights.client
        ended, now = self.now()
        record = RoundRecord(
            round_num=state.round_num,
            started=begun[0],
            finished=ended,
            round_s=now - begun[1],
            sampled=len(outcomes),
            ok=counts["ok"],
            skipped=counts["skipped"],
            excluded=counts["excluded"],
            failed=counts["failed"],
            updated=weights is not None,
            weight_max=None if weights is None else float(weights.max()),
            weight_entropy=None if weights is None else _entropy(weights),
            train_s=use.train_seconds,
            score_tail_s=use.score_tail_seconds,
            aggregate_s=result.aggregate_s,
            evaluate_s=evaluate_s,
            commit_s=now - clock,
            client_utilisation=use.client_utilisation,
            scorer_utilisation=use.scorer_utilisation,
            retries=use.retries,
            notes=() if result.weights is None else result.weights.notes,
            **_checksums(state, outcomes),
            **_metrics(metrics),
        )
        clients = _client_records(state.round_num, outcomes, weights)
        self._tables.write_round(record, clients)
        if self._board is not None:
            self._board.write_round(record, clients)
        self._records.append(record)
        return record

    def _checkpoint(self, state: RoundState) -> None:
        for client, digest in state.client_checksums.items():
            known = self._files.get(client)
            if known is None or known.checksum != digest:
                packed = self._executor.fetch(state.clients[client])
                name = write_client_state(self.folder, client, state.round_num, packed.arrays)
                self._files[client] = ClientFile(name, digest)
        arrays = {f"server.{name}": array for name, array in to_arrays(state.server).items()}
        arrays |= {f"buffers.{name}": array for name, array in to_arrays(state.buffers).items()}
        clients = {str(k): {"file": entry.file, "checksum": entry.checksum} for k, entry in self._files.items()}
        write_checkpoint(self.folder, state.round_num, arrays, {"clients": clients})

    def finish(self, status: str, reason: str | None, seconds: float) -> dict[str, Any]:
        """Write `result.json` and return its content."""
        tested = [record for record in self._records if record.accuracy is not None]
        best = max(tested, key=lambda record: record.accuracy or 0.0, default=None)
        last = self._records[-1] if self._records else self._initial
        result = {
            "status": status,
            "reason": reason,
            "name": self._config.name,
            "folder": str(self.folder),
            "rounds": self._config.rounds,
            "rounds_done": len(self._records),
            "initial": _summary(self._initial),
            "final": _summary(tested[-1] if tested else None),
            "best": _summary(best),
            "checksums": None
            if last is None
            else {key: getattr(last, f"{key}_checksum") for key in ("params", "buffers", "server", "clients")},
            "seconds": seconds,
            "seconds_per_round": float(np.mean([r.round_s for r in self._records])) if self._records else None,
            "finished": datetime.now(UTC).isoformat(),
        }
        write_json(self.folder / "result.json", result)
        return result

    @property
    def records(self) -> Sequence[RoundRecord]:
        """The rounds committed so far."""
        return self._records

    def close(self) -> None:
        """Close the event file."""
        if self._board is not None:
            self._board.close()


def _client_records(round_num: int, outcomes: Sequence[Outcome], weights: np.ndarray | None) -> list[ClientRecord]:
    usable = iter([] if weights is None else weights.tolist())
    records = []
    for outcome in outcomes:
        train, probe, actor, scorer = outcome.train, outcome.probe, outcome.actor, outcome.scorer
        finite = probe is not None and outcome.status == "ok"
        records.append(
            ClientRecord(
                round_num=round_num,
                client_id=outcome.client_id,
                position=outcome.position,
                status=outcome.status,
                reason=outcome.reason,
                num_examples=int(train.scalars["num_examples"]) if train else None,
                num_steps=int(train.scalars["num_steps"]) if train else None,
                train_loss=float(train.scalars["loss"]) if train else None,
                score=probe.score if probe else None,
                weight=next(usable) if outcome.status == "ok" and weights is not None else None,
                validation_loss=probe.loss if probe else None,
                validation_accuracy=probe.accuracy if probe else None,
                train_s=train.seconds if train else None,
                score_s=outcome.score_seconds,
                queue_s=outcome.queue_seconds,
                actor=actor.actor if actor else None,
                pid=actor.pid if actor else None,
                node=actor.node if actor else None,
                attempt=actor.attempt if actor else None,
                scorer=scorer.actor if scorer else None,
                scorer_pid=scorer.pid if scorer else None,
                scorer_attempt=scorer.attempt if scorer else None,
                started=outcome.started,
                finished=outcome.finished,
                unit_norms=tuple(probe.unit_norms.tolist()) if probe is not None and finite else None,
            )
        )
    return records


def _checksums(state: RoundState, outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Of parameters, buffers, server state, and the states of the cohort's clients in id order."""
    states = [state.client_checksums.get(outcome.client_id, "") for outcome in outcomes]
    return {
        "params_checksum": checksum(state.server.params.numpy()),
        "buffers_checksum": record_checksum(state.buffers),
        "server_checksum": record_checksum(state.server),
        "clients_checksum": checksum(np.frombuffer(" ".join(states).encode(), dtype=np.uint8)),
    }


def _metrics(metrics: Metrics | None) -> dict[str, Any]:
    if metrics is None:
        return {}
    return {name: getattr(metrics, name) for name in ("loss", "accuracy", "macro_f1", "recall", "classes_present")}


def _summary(record: RoundRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "round": record.round_num,
        "accuracy": record.accuracy,
        "macro_f1": record.macro_f1,
        "loss": record.loss,
    }


def _entropy(weights: np.ndarray) -> float:
    positive = weights[weights > 0]
    return float(-(positive * np.log(positive)).sum())


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Everything that raysim logs, in the run's own file while the run goes on."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(level)
        logger.propagate = propagate


class _Silent:
    """Progress for callers that do not want any."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def round_started(self, round_num: int, cohort_size: int, *, scored: bool) -> None:
        """Nothing."""

    def client_trained(self, client_id: int) -> None:
        """Nothing."""

    def client_scored(self, client_id: int) -> None:
        """Nothing."""

    def round_finished(self, record: RoundRecord) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""
