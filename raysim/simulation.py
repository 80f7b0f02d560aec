"""A run: round after round of sample, train and score, weigh, step, evaluate, commit."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from raysim.algorithms.base import Coefficients, Cohort
from raysim.config import RunConfig, load_config, resolve
from raysim.configfile import apply_overrides
from raysim.errors import RunError
from raysim.evaluation import Metrics
from raysim.execution.base import Broadcast, Executor, Observer, Outcome, Packed, WorkItem
from raysim.execution.work import BUFFER_FLOATS
from raysim.preparation import Prepared, prepare
from raysim.recorder import Recorder, RoundResult
from raysim.recording.progress import Progress, Silent, make_progress
from raysim.recording.records import RoundRecord
from raysim.recording.runfolder import check_space, claim
from raysim.resuming import Earlier, check_same, is_unused, read_earlier, sole_writer, stored_config
from raysim.runrecord import RunRecord, result_of
from raysim.seeding import Purpose, rng_for
from raysim.state import Buffers, RoundState, ServerState
from raysim.vector import first_nonfinite
from raysim.verdict import check_enough, fresh_probes, verdict_on
from raysim.weighting.base import Weights

logger = logging.getLogger("raysim")


def sample_cohort(seed: int, round_num: int, num_clients: int, size: int) -> list[int]:
    """Clients of a round, ascending: uniform, without replacement, the same for all methods at one seed."""
    rng = rng_for(seed, Purpose.COHORT, round_num=round_num)
    chosen: list[int] = sorted(rng.choice(num_clients, size=size, replace=False).tolist())
    return chosen


def run_round(prepared: Prepared, state: RoundState, executor: Executor, observer: Observer) -> RoundResult:
    """One round, from the state after the last one to the state after this one."""
    setup, population, round_num = prepared.setup, prepared.population, state.round_num + 1
    ids = sample_cohort(setup.seed, round_num, population.num_clients, prepared.config.cohort_size)
    kept = {k: probe for k, probe in state.probes.items() if round_num - probe.round_num < setup.scoring.rescore_every}
    items = [
        WorkItem(client, position, state.clients.get(client), population.num_examples[client], kept.get(client))
        for position, client in enumerate(ids)
    ]
    trainable = [item for item in items if item.num_examples > 0]
    broadcast = Broadcast.of(round_num, state.server, state.buffers)
    outcomes, reference, use = executor.run_cohort(broadcast, trainable, observer)
    check_enough(prepared, round_num, outcomes)

    started = time.perf_counter()
    verdict = verdict_on(prepared, executor, broadcast, outcomes, reference)
    if verdict.level:
        scored, started = started, time.perf_counter()
        use = replace(use, score_tail_seconds=use.score_tail_seconds + started - scored)
    usable = [outcome for outcome in outcomes if outcome.status == "ok"]
    server, buffers, weights = state.server, state.buffers, verdict.weights
    if weights is not None:
        for index, reason in weights.rejected.items():
            usable[index].drop("excluded", reason)
        weights = weights.of([i for i, outcome in enumerate(usable) if outcome.status == "ok"])
        usable = [outcome for outcome in usable if outcome.status == "ok"]
        summation = _Summation(executor, usable, weights)
        cohort: Cohort[Any] = Cohort(
            client_ids=tuple(o.client_id for o in usable),
            weights=weights,
            population=population,
            scalars=[o.train.scalars for o in usable if o.train is not None],
            summation=summation,
            dtype=state.server.params.dtype,
        )
        server = setup.algorithm.server_update(state.server, cohort)
        buffers = summation.mean_buffers(state.server.params.dtype)
        if setup.fusion is not None:
            server, buffers, weights = _fused(executor, usable, state, server, buffers, weights)
        if first_nonfinite(server.params.numpy()) is not None:
            raise RunError(f"round {round_num}: the server's step made the global model non-finite; it is not deployed")
    changed = {o.client_id: o for o in usable if o.state is not None}
    after = RoundState(
        round_num,
        server,
        buffers,
        # The states that changed last come last.
        {k: s for k, s in state.clients.items() if k not in changed} | {k: o.state for k, o in changed.items()},
        {**state.client_checksums, **{client: str(o.train.state_checksum) for client, o in changed.items() if o.train}},
        {**kept, **fresh_probes(setup.scoring, round_num, usable)},
    )
    for outcome in outcomes:
        outcome.update = None  # Its vectors are dropped before the next round makes new ones.
    sampled = {outcome.client_id: outcome for outcome in outcomes}
    complete = [sampled.get(i.client_id) or Outcome(i.client_id, i.position, "skipped", "no examples") for i in items]
    took = time.perf_counter() - started
    driver_bytes = executor.end_round()
    return RoundResult(after, complete, weights, use, took, driver_bytes, verdict.error, verdict.scored_images)


def _fused(
    executor: Executor,
    usable: Sequence[Outcome],
    state: RoundState,
    server: ServerState,
    buffers: Buffers,
    weights: Weights,
) -> tuple[ServerState, Buffers, Weights]:
    """The server's training on its own data, which has the last word on the model and on what each client counts."""
    broadcast = Broadcast.of(state.round_num + 1, state.server, state.buffers)
    fused = executor.fuse(usable, broadcast, Packed.of(server), Packed.of(buffers), weights.client)
    logger.info("round %d: %s", broadcast.round_num, fused.note)
    if not np.isfinite(fused.params).all():
        raise RunError(f"round {broadcast.round_num}: the fusion made the global model non-finite ({fused.note})")
    if fused.weights is not None:
        weights = Weights(fused.weights, notes=weights.notes)
    return replace(server, params=torch.from_numpy(fused.params.copy())), fused.buffers.unpack(), weights


class _Summation:
    """The executor's sums over a cohort's updates; the mean of the float buffers comes along in the first pass."""

    def __init__(self, executor: Executor, usable: Sequence[Outcome], weights: Weights) -> None:
        self._executor, self._usable, self._weights = executor, usable, weights
        self._floats: np.ndarray | None = None

    def __call__(self, coefficients: Mapping[str, Coefficients]) -> dict[str, np.ndarray]:
        if self._floats is not None:
            return self._executor.sums(self._usable, coefficients)
        totals = self._executor.sums(self._usable, {**coefficients, BUFFER_FLOATS: Coefficients(self._weights.client)})
        self._floats = totals.pop(BUFFER_FLOATS)
        return totals

    def mean_buffers(self, dtype: torch.dtype) -> Buffers:
        """Buffers of the new global model: the weighted mean of the clients' floats, the maximum of their integers.

        Only the client weights apply, and nothing of the algorithm: momentum on a running variance makes it negative.
        """
        if self._floats is None:
            self({})
        ints = np.max([o.train.buffer_ints for o in self._usable if o.train is not None], axis=0)
        return Buffers(torch.from_numpy(self._floats).to(dtype), torch.from_numpy(ints))


def run(
    config: RunConfig | str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    progress: Progress | bool = False,
    command: Sequence[str] | None = None,
    session: Session | None = None,
    resume: bool = False,
) -> RunRecord:
    """Run a configuration to its end.

    Args:
        config: A checked configuration, the path of a file, or a configuration's content: nested mappings.
        overrides: `key.path=value`.
        progress: Told how it goes; True: shown on the standard error stream (below a notebook's cell), False: not.
        command: The command line, for the manifest.
        session: Whose processes to use; None: they are started for this run and ended with it.
        resume: If the run folder exists, go on with the run in it, to the bits of a run that was never stopped; a finished
            one is left as it is. False: an existing folder is refused.

    Raises:
        ConfigError: Found before round 1; no run folder is left, or it is as it was.
        RunError: The run cannot go on; finished rounds are kept and readable.
    """
    clock = time.perf_counter()
    config = _checked(config, overrides)
    if isinstance(progress, bool):
        progress = make_progress(config.rounds, Console(stderr=True)) if progress else Silent()
    folder = config.folder
    if not (resume and folder.exists()):
        prepared = prepare(config)
        claim(folder)
        with sole_writer(folder):
            return _run(prepared, Earlier(prepared.initial), clock, progress, command, session)
    with sole_writer(folder):
        if not is_unused(folder):
            check_same(config)
            result = result_of(folder)
            if result["status"] == "finished" and result["rounds_done"] >= config.rounds:
                progress.message(f"{folder} is finished: {result['rounds_done']} rounds are done")
                return RunRecord(folder, config, result)
        prepared = prepare(config)
        return _run(prepared, read_earlier(prepared), clock, progress, command, session)


def _checked(config: RunConfig | str | Path | Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    if isinstance(config, str | Path):
        return load_config(config, overrides)
    if isinstance(config, RunConfig) and not overrides:
        return config
    values: dict[str, Any] = config.as_dict() if isinstance(config, RunConfig) else copy.deepcopy(dict(config))
    apply_overrides(values, {}, overrides)
    return resolve(values)


def resume(
    folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    progress: Progress | bool = False,
    session: Session | None = None,
) -> RunRecord:
    """Go on with the run in a folder, from its last checkpoint, to the bits of a run that was never stopped.

    Args:
        folder: The run folder.
        overrides: `key.path=value`, for example more `rounds`.
        progress: As for `run`.
        session: As for `run`.

    Raises:
        ConfigError: The folder holds no run, another process is writing it, or a setting is changed that may not be.
        RunError: The run cannot go on; finished rounds are kept and readable.
    """
    return run(stored_config(Path(folder), overrides), progress=progress, session=session, resume=True)


def _run(
    prepared: Prepared,
    earlier: Earlier,
    clock: float,
    progress: Progress,
    command: Sequence[str] | None,
    session: Session | None,
) -> RunRecord:
    """The rounds that are not done yet, in a folder that no other process writes to."""
    config, folder = prepared.config, prepared.config.folder
    resumed = bool(earlier.manifest or earlier.rounds or earlier.state.round_num)
    started, begun = datetime.now(UTC), False
    try:
        with _logging_to(folder / "run.log"), progress:
            for note in (*prepared.notes, *earlier.notes):
                logger.info(note)
                progress.message(note)
            check_space(folder, 3 * prepared.demand.model_bytes if config.output.checkpoint_every else 0)
            with session.used() if session else contextlib.closing(Session()) as own:
                executor = own.executor(prepared, progress)
                recorder = Recorder(prepared, executor, started, command, earlier, progress.message)
                begun = True
                ready = _ready(earlier.state.round_num + 1, time.perf_counter() - clock, executor)
                logger.info(ready)
                progress.message(ready)
                for _ in rounds(prepared, earlier.state, executor, recorder, progress):
                    pass
                recorder.check_updated()
    except BaseException as error:
        if begun:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            reason = str(error) or type(error).__name__
            recorder.finish(status, reason, time.perf_counter() - clock)
            raise
        if not resumed:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    result = recorder.finish("finished", None, time.perf_counter() - clock)
    return RunRecord(folder, config, result)


class Session:
    """Keeps the processes of one run for the next: Ray and the pools of actors start once for many runs in a row.

        with raysim.Session() as session:
            for seed in range(5):
                raysim.run("configs/quickstart.yaml", [f"seed={seed}", f"name=seed-{seed}"], session=session)

    Pools that a run needs in another shape are started afresh. Results are those of separate runs, bit for bit.

    Args:
        parts: The pools are planned for 1/parts of the cluster, so that as many sessions can share it.
    """

    def __init__(self, parts: int = 1) -> None:
        self._executor: Executor | None = None
        self._parts = parts

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def executor(self, prepared: Prepared, progress: Progress) -> Executor:
        """The executor of the run before, if it suits this one, else a new one."""
        executor, settings = self._executor, prepared.config.execution
        if executor is None or not executor.adopt(prepared.setup, settings, prepared.demand):
            self.close()
            executor = self._executor = make_executor(prepared, progress, self._parts)
        return executor

    @contextlib.contextmanager
    def used(self) -> Iterator[Session]:
        """The session for one run; after an error its processes are ended, as units may still run there."""
        try:
            yield self
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()


def make_executor(prepared: Prepared, progress: Progress, parts: int = 1) -> Executor:
    """The executor that the configuration asks for, on 1/parts of the cluster; the Ray one is imported only then."""
    settings = prepared.config.execution
    if settings.backend == "serial":
        from raysim.execution.serial import SerialExecutor

        return SerialExecutor(prepared.setup)
    from raysim.execution.ray_executor import RayExecutor

    def say(line: str) -> None:
        logger.info(line)
        progress.message(line)

    return RayExecutor(prepared.setup, settings, prepared.demand, say, parts)


def rounds(
    prepared: Prepared, state: RoundState, executor: Executor, recorder: Recorder, progress: Progress
) -> Iterator[RoundRecord]:
    """The rounds of a run from a state on, each yielded once it is committed.

    A round's model may be tested while the next round trains; its row is written as soon as the test is in.
    """
    config, algorithm = prepared.config, prepared.setup.algorithm
    committed: deque[RoundRecord] = deque()
    then: list[Callable[[RoundRecord], None]] = [committed.append, progress.round_finished]
    if config.execution.prometheus:
        from raysim.execution.ray_metrics import RunMetrics

        then.append(RunMetrics(config.name, config.rounds).round_finished)
    if state.round_num == 0:
        executor.evaluate(algorithm.evaluated(state.server), state.buffers, partial(recorder.initial, state))
    try:
        while state.round_num < config.rounds:
            begun = recorder.now()
            round_num = state.round_num + 1
            progress.round_started(round_num, config.cohort_size, scored=prepared.setup.weighting.needs_probe)
            result = run_round(prepared, state, executor, progress)
            executor.drain()
            _tell(round_num, result, progress)
            state = recorder.within_budget(result.state)
            ending = _Ending(result, recorder, begun, then)
            if round_num % config.evaluation.every == 0 or round_num == config.rounds:
                executor.evaluate(algorithm.evaluated(state.server), state.buffers, ending.commit)
            else:
                ending.commit(None)
            if round_num < config.rounds:
                ending.ended = recorder.now()
            del result
            while committed:
                yield committed.popleft()
        executor.drain()
    except Exception:
        with contextlib.suppress(Exception):
            executor.drain(limit_s=10.0)  # Lest a round that was computed is lost with the one after it.
        raise
    yield from committed


class _Ending:
    """A round that is computed, until its row is written.

    Attributes:
        ended: When the next round began; before that, and for the last round, testing and writing belong to the round.
    """

    def __init__(
        self,
        result: RoundResult,
        recorder: Recorder,
        begun: tuple[datetime, float],
        then: Sequence[Callable[[RoundRecord], None]],
    ) -> None:
        self._result, self._recorder, self._begun, self._then = result, recorder, begun, then
        self._computed = time.perf_counter()
        self.ended: tuple[datetime, float] | None = None

    def commit(self, metrics: Metrics | None) -> None:
        """Make the round permanent."""
        seconds = time.perf_counter() - self._computed if metrics is not None else 0.0
        record = self._recorder.commit(self._result, metrics, self._begun, self.ended, seconds)
        for then in self._then:
            then(record)


def _ready(round_num: int, seconds: float, executor: Executor) -> str:
    """How long the first round of this process was waited for, and for what."""
    parts = executor.describe().get("startup_s", {})
    detail = ", ".join(f"{name} {spent:.1f}" for name, spent in parts.items())
    return f"ready for round {round_num} after {seconds:.1f} s" + (f" ({detail})" if detail else "")


def _tell(round_num: int, result: RoundResult, progress: Progress) -> None:
    """Whatever a user should not have to look for in the tables."""
    for note in result.weights.notes if result.weights is not None else ():
        logger.warning("round %d: %s", round_num, note)
        progress.message(f"round {round_num}: {note}")
    for outcome in result.outcomes:
        if outcome.status in ("failed", "excluded"):
            text = f"round {round_num}: client {outcome.client_id} {outcome.status}: {outcome.reason}"
            logger.warning(text)
            progress.message(text)
    if result.weights is None:
        ids = ", ".join(str(outcome.client_id) for outcome in result.outcomes)
        logger.warning("round %d: no update, the global model stays; clients %s", round_num, ids)
        progress.message(f"round {round_num}: no usable update, the global model stays")


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
