"""What a run writes into its folder, and when: everything once at the start, then round by round, then the result.

A round is committed by its checkpoint (where one is due), then its rows, then its events.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from raysim.errors import RunError
from raysim.evaluation import Metrics
from raysim.execution.base import Executor, Outcome, PoolUse, StoredState
from raysim.preparation import Prepared
from raysim.recording.checkpoint import ClientFile, write_checkpoint, write_client_state
from raysim.recording.files import write_atomic
from raysim.recording.hparams import pick
from raysim.recording.logger import RunInfo
from raysim.recording.loggers import Loggers, open_loggers
from raysim.recording.manifest import build_manifest, write_json
from raysim.recording.records import ClientRecord, RoundRecord
from raysim.recording.tables import TableWriter
from raysim.resuming import Earlier
from raysim.state import RoundState, ServerState, num_bytes, record_checksum, to_arrays
from raysim.vector import checksum
from raysim.weighting.base import Weights


@dataclass(frozen=True)
class RoundResult:
    """A round that was computed and not yet committed."""

    state: RoundState
    outcomes: Sequence[Outcome]
    weights: Weights | None
    use: PoolUse
    aggregate_s: float
    driver_bytes: int = 0
    weight_error: float | None = None
    scored_images: int | None = None


class Recorder:
    """Writes a run's folder: tables, events, checkpoints, manifest, result. The round's commit is its checkpoint."""

    def __init__(
        self,
        prepared: Prepared,
        executor: Executor,
        started: datetime,
        command: Sequence[str] | None,
        earlier: Earlier | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        config, earlier = prepared.config, earlier or Earlier(prepared.initial)
        self._prepared, self._executor, self._config, self.folder = prepared, executor, config, config.folder
        self._records = list(earlier.rounds)
        self._initial = earlier.initial
        self._last: RoundRecord | None = self._records[-1] if self._records else None
        self._files: dict[int, ClientFile] = dict(earlier.files)
        self._as_yaml = config.as_yaml()
        client_state = prepared.setup.algorithm.init_client(prepared.initial.server.params)
        self._state_kind = None if client_state is None else type(client_state)
        self._state_bytes = num_bytes(client_state)
        self._seconds_before = sum(row.round_s for row in earlier.rounds)
        # Loggers may refuse, and a folder that is resumed is then as it was.
        self._loggers = self._open_loggers(earlier, say)
        try:
            self._claim(earlier, started, command)
        except BaseException:
            self.close()
            raise

    def _open_loggers(self, earlier: Earlier, say: Callable[[str], None]) -> Loggers:
        prepared, config, output = self._prepared, self._config, self._config.output
        plain = config.as_dict()
        info = RunInfo(
            folder=self.folder,
            name=config.name,
            rounds=config.rounds,
            class_names=prepared.class_names,
            unit_names=[unit.name for unit in prepared.setup.weighting.scored_units(prepared.population.layout)],
            client_sizes=prepared.population.num_examples,
            config=plain,
            config_yaml=self._as_yaml,
            hparams=pick(plain, output.hparams),
            resume_round=earlier.state.round_num + 1 if earlier.rounds else None,
            study=output.hparams if isinstance(output.hparams, Mapping) else {},
        )
        # TensorBoard last: it replaces the files of an earlier process.
        return open_loggers(info, [*output.loggers, *(["tensorboard"] if output.tensorboard else [])], say)

    def _claim(self, earlier: Earlier, started: datetime, command: Sequence[str] | None) -> None:
        """Write what is known at the start, and take away what the rounds to come will write again."""
        prepared, executor, config, setup = self._prepared, self._executor, self._config, self._prepared.setup
        with write_atomic(self.folder / "config.yaml") as handle:
            handle.write(self._as_yaml.encode())
        setup.partition.write(self.folder / "partition.parquet", labels=setup.train.labels)
        manifest = build_manifest(
            command=command,
            started=started,
            seed=config.seed,
            threads=setup.threads,
            plan=executor.describe(),
            data={
                "name": config.data.name,
                "origin": prepared.origin,
                "hash": setup.data_hash,
                "validation_hash": checksum(setup.validation.images, setup.validation.labels),
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
        if earlier.manifest:
            again = {"after_round": earlier.state.round_num, **manifest}
            manifest = {**earlier.manifest, "resumed": [*earlier.manifest.get("resumed", ()), again]}
        self._resumed_after = [entry["after_round"] for entry in manifest.get("resumed", ())]
        write_json(self.folder / "manifest.json", manifest)
        self._tables = TableWriter(self.folder)
        (self.folder / "result.json").unlink(missing_ok=True)
        self._tables.discard_after(earlier.state.round_num)

    def now(self) -> tuple[datetime, float]:
        """This moment, for people and for differences."""
        return datetime.now(UTC), time.perf_counter()

    def initial(self, state: RoundState, metrics: Metrics) -> None:
        """Record the evaluation of the initial model."""
        now = datetime.now(UTC)
        record = RoundRecord(
            round_num=0, started=now, finished=now, round_s=0.0, **checksums(state, ()), **_metrics(metrics)
        )
        self._initial, self._last = _summary(record), record
        self._loggers.write_round(record, ())

    def commit(
        self,
        result: RoundResult,
        metrics: Metrics | None,
        begun: tuple[datetime, float],
        ended: tuple[datetime, float] | None,
        evaluate_s: float,
    ) -> RoundRecord:
        """Make a round permanent: checkpoint, then its rows and events.

        Args:
            result: What was computed.
            metrics: Of its model on the test set; None if it was not tested.
            begun: When the round began.
            ended: When the next round began; None: not yet, so the checkpoint is part of the round.
            evaluate_s: Seconds that the test took.
        """
        state, outcomes, use = result.state, result.outcomes, result.use
        clock = time.perf_counter()
        every = self._config.output.checkpoint_every
        if every and (state.round_num % every == 0 or state.round_num == self._config.rounds):
            self._checkpoint(state)
        counts = Counter(outcome.status for outcome in outcomes)
        weights = None if result.weights is None else result.weights.client
        now = self.now()
        finished, until = ended or now
        record = RoundRecord(
            round_num=state.round_num,
            started=begun[0],
            finished=finished,
            round_s=until - begun[1],
            sampled=len(outcomes),
            ok=counts["ok"],
            skipped=counts["skipped"],
            excluded=counts["excluded"],
            failed=counts["failed"],
            updated=weights is not None,
            weight_max=None if weights is None else float(weights.max()),
            weight_entropy=None if weights is None else _entropy(weights),
            weight_error=result.weight_error,
            scored_images=result.scored_images,
            train_s=use.train_seconds,
            score_tail_s=use.score_tail_seconds,
            aggregate_s=result.aggregate_s,
            evaluate_s=evaluate_s,
            commit_s=now[1] - clock,
            driver_bytes=result.driver_bytes,
            client_utilisation=use.client_utilisation,
            scorer_utilisation=use.scorer_utilisation,
            retries=use.retries,
            notes=() if result.weights is None else result.weights.notes,
            **checksums(state, outcomes),
            **_metrics(metrics),
        )
        clients = _client_records(state.round_num, outcomes, weights)
        self._tables.write_round(record, clients)
        self._loggers.write_round(record, clients)
        self._records.append(record)
        self._last = record
        return record

    def within_budget(self, state: RoundState) -> RoundState:
        """The state with those of the clients in files, used longest ago first, that exceed `execution.state_cache_mb`."""
        held = [client for client, handle in state.clients.items() if not isinstance(handle, StoredState)]
        budget = self._config.execution.state_cache_mb * 2**20
        excess = len(held) - int(budget // self._state_bytes) if self._state_bytes else 0
        if excess <= 0:
            return state
        assert self._state_kind is not None
        stored = {
            client: StoredState(self._state_kind, self.folder, self._client_file(state, client))
            for client in held[:excess]
        }
        return replace(state, clients={**state.clients, **stored})

    def _client_file(self, state: RoundState, client: int) -> ClientFile:
        """The file with the client's state, written if there is none yet."""
        digest, known = state.client_checksums[client], self._files.get(client)
        if known is None or known.checksum != digest:
            packed = self._executor.fetch(state.clients[client])
            name = write_client_state(self.folder, client, state.round_num, packed.arrays)
            known = self._files[client] = ClientFile(name, digest)
        return known

    def _checkpoint(self, state: RoundState) -> None:
        with ThreadPoolExecutor(max_workers=8) as threads:  # Most of the time of a small file is the wait for the disk.
            list(threads.map(partial(self._client_file, state), state.client_checksums))
        arrays = {f"server.{name}": array for name, array in to_arrays(state.server).items()}
        arrays |= {f"buffers.{name}": array for name, array in to_arrays(state.buffers).items()}
        clients = {str(k): {"file": entry.file, "checksum": entry.checksum} for k, entry in self._files.items()}
        write_checkpoint(
            self.folder,
            state.round_num,
            arrays,
            {
                "clients": clients,
                "probes": {str(client): kept.as_plain() for client, kept in state.probes.items()},
                "initial": self._initial,
            },
        )

    def finish(self, status: str, reason: str | None, seconds: float) -> dict[str, Any]:
        """Write `result.json` and return its content."""
        tested = [record for record in self._records if record.accuracy is not None]
        best = max(tested, key=lambda record: record.accuracy or 0.0, default=None)
        chosen = max(
            (record for record in tested if record.validation_accuracy is not None),
            key=lambda record: record.validation_accuracy or 0.0,
            default=None,
        )
        result = {
            "status": status,
            "reason": reason,
            "name": self._config.name,
            "folder": str(self.folder),
            "rounds": self._config.rounds,
            "rounds_done": len(self._records),
            "initial": self._initial,
            "final": _summary(tested[-1] if tested else None),
            "best": _summary(best),
            "best_validation": _summary(chosen),
            "checksums": None
            if self._last is None
            else {key: getattr(self._last, f"{key}_checksum") for key in ("params", "buffers", "server", "clients")},
            "seconds": self._seconds_before + seconds,
            "resumed_after": self._resumed_after,
            "seconds_per_round": float(np.mean([r.round_s for r in self._records])) if self._records else None,
            "finished": datetime.now(UTC).isoformat(),
        }
        write_json(self.folder / "result.json", result)
        self._loggers.finish(result)
        return result

    def check_updated(self) -> None:
        """Refuse to call a run finished that never changed its model."""
        if not any(record.updated for record in self._records):
            raise RunError("no round had a usable update: the global model is still the initial one")

    def close(self) -> None:
        """Let the loggers go, where no result is written."""
        self._loggers.finish(None)


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
                score_age=outcome.score_age,
                weight=next(usable) if outcome.status == "ok" and weights is not None else None,
                validation_loss=probe.loss if probe else None,
                validation_accuracy=probe.accuracy if probe else None,
                train_s=train.seconds if train else None,
                score_s=outcome.score_seconds,
                queue_s=outcome.queue_seconds,
                peak_memory=train.gpu_memory.peak if train and train.gpu_memory else None,
                actor=actor.actor if actor else None,
                pid=actor.pid if actor else None,
                node=actor.node if actor else None,
                attempt=actor.attempt if actor else None,
                scorer=scorer.actor if scorer else None,
                scorer_pid=scorer.pid if scorer else None,
                scorer_attempt=scorer.attempt if scorer else None,
                started=outcome.started,
                finished=outcome.finished,
                unit_norms=tuple(probe.values.tolist()) if probe is not None and finite else None,
            )
        )
    return records


def checksums(state: RoundState, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of parameters, buffers, server state, and the states of the cohort's clients in id order."""
    states = [state.client_checksums.get(outcome.client_id, "") for outcome in outcomes]
    params = checksum(state.server.params.numpy())
    return {
        "params_checksum": params,
        "buffers_checksum": record_checksum(state.buffers),
        # Of a server state that is nothing but the parameters it is the same.
        "server_checksum": params if type(state.server) is ServerState else record_checksum(state.server),
        "clients_checksum": checksum(np.frombuffer(" ".join(states).encode(), dtype=np.uint8)),
    }


def _metrics(metrics: Metrics | None) -> dict[str, Any]:
    if metrics is None:
        return {}
    return {item.name: getattr(metrics, item.name) for item in fields(metrics)}


def _summary(record: RoundRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "round": record.round_num,
        "accuracy": record.accuracy,
        "macro_f1": record.macro_f1,
        "loss": record.loss,
    } | (
        {}
        if record.validation_accuracy is None
        else {
            "validation_accuracy": record.validation_accuracy,
            "validation_loss": record.validation_loss,
        }
    )


def _entropy(weights: np.ndarray) -> float:
    positive = weights[weights > 0]
    return float(-(positive * np.log(positive)).sum())
