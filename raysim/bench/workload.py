"""Measurements of a configuration's own rounds, in blocks during which nothing else of the benchmark runs."""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from raysim.bench.bare import BareLoop, mirrored
from raysim.bench.findings import Finding, Row, Split, config_lines, splits
from raysim.config import RunConfig
from raysim.errors import ConfigError, RaysimError
from raysim.execution.ray_connection import Connection, connect
from raysim.execution.ray_executor import RayExecutor
from raysim.execution.ray_light import rehearse
from raysim.preparation import Prepared, prepare
from raysim.recorder import Recorder
from raysim.recording.progress import Silent
from raysim.recording.records import RoundRecord
from raysim.recording.tables import read_table
from raysim.simulation import Session, rounds, run_round

BLOCK = 2
"""Rounds of a block, or all that the configuration has: with two, what reaches from one round into the next counts."""
SLEEPING = (1, 2, 4, 8, 16, 32)
SLEEP_S = 1.0
MODELS_PER_SCORER = 4
GPU_SHARES = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Block:
    """Rounds from the initial model on, all of them committed.

    Attributes:
        seconds: From the begin of the first to the commit of the last.
        records: One per round.
        train_s: Seconds in its actor of every client that trained.
        score_s: The same of every model that was scored.
    """

    seconds: float
    records: Sequence[RoundRecord]
    train_s: Sequence[float]
    score_s: Sequence[float]


class Bench:
    """What the parts share: the configuration, how often to repeat, whom to tell, and the processes.

    Args:
        config: The run to measure with.
        repeats: How often each measurement is repeated.
        say: Told how it goes, line by line.

    Raises:
        ConfigError: It does not run on Ray, or cannot run at all.
    """

    def __init__(self, config: RunConfig, repeats: int, say: Callable[[str], None]) -> None:
        if config.execution.backend != "ray":
            raise ConfigError(f"execution.backend: {config.execution.backend}, but what is measured are actors on Ray")
        self.config, self.repeats, self.say = config, repeats, say
        self.prepared = prepare(config)
        self._session = Session()
        self._connection: Connection | None = None

    def executor(self, prepared: Prepared) -> RayExecutor:
        """Actors for a run: those of the part before, if they suit it. Ray stays for actors of every shape."""
        if self._connection is None:
            self._connection = connect(self.config.execution)
        executor = self._session.executor(prepared, Silent())
        assert isinstance(executor, RayExecutor)
        executor.hold_scoring(False)
        return executor

    def block(self, prepared: Prepared, executor: RayExecutor, count: int = BLOCK) -> Block:
        """Run the first rounds of a run, recorded as in any run."""
        with tempfile.TemporaryDirectory(prefix="raysim-bench-") as folder:
            config, output = prepared.config, replace(prepared.config.output, dir=Path(folder))
            config = replace(config, name="block", rounds=min(count, config.rounds), output=output)
            config.folder.mkdir()
            ready = replace(prepared, config=config)
            with contextlib.closing(Recorder(ready, executor, datetime.now(UTC), ())) as recorder:
                records = list(rounds(ready, ready.initial, executor, recorder, Silent()))
            clients = read_table(config.folder, "clients")
        train, score = ([s for s in clients[c].to_pylist() if s is not None] for c in ("train_s", "score_s"))
        return Block((records[-1].finished - records[0].started).total_seconds(), records, train, score)

    def close(self) -> None:
        """End all processes, to be started again when they are needed."""
        connection, self._connection = self._connection, None
        with contextlib.closing(connection) if connection else contextlib.nullcontext():
            self._session.close()


def startup(bench: Bench) -> Finding:
    """Seconds from nothing (or from a cluster that is there) to actors, and to the first round's commit."""
    names = {"first": "first actor ready", "all": "all actors ready", "round": "end of round 1"}
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(bench.repeats):
        bench.close()
        clock = time.perf_counter()
        with _first_ready() as seen:
            executor = bench.executor(bench.prepared)
        times["first"].append(seen[0] - clock)
        times["all"].append(time.perf_counter() - clock)
        block = bench.block(bench.prepared, executor, 1)
        times["round"].append(times["all"][-1] + block.seconds)
        _tell(bench, "startup", repeat, ", ".join(f"{names[name]} {times[name][-1]:.2f} s" for name in names))
    what = _pools(executor)
    rows = [Row.of(names[name], values, "s", what) for name, values in times.items()]
    return Finding("startup", rows, {"plan": executor.plan.as_dict(), **times})


def efficiency(bench: Bench) -> Finding:
    """Rounds of raysim over the same rounds of bare processes, in alternation."""
    config, notes = mirrored(bench.config)
    prepared = bench.prepared if config == bench.config else prepare(config)
    executor = bench.executor(prepared)
    plan, part = executor.plan, "efficiency"
    if len(plan.nodes) > 1:
        why = f"the cluster has {len(plan.nodes)} nodes, and bare processes run on one"
        return Finding(part, notes=[f"{part} skipped: {why}"])
    gpus = int(plan.nodes[0].gpus) if plan.client_gpus else 0
    processes = plan.client_actors + plan.scorer_actors if gpus else max(1, int(plan.nodes[0].cpus))
    ours, floor = list[float](), list[float]()
    with contextlib.closing(BareLoop(prepared, processes, gpus)) as bare:
        for repeat in range(-1, bench.repeats):  # The first warms both up.
            block = bench.block(prepared, executor, 1 if repeat < 0 else BLOCK)
            seconds = bare.rounds(len(block.records))
            if repeat < 0:
                continue
            ours.append(block.seconds / len(block.records))
            floor.append(seconds / len(block.records))
            ratio = ours[-1] / floor[-1]
            _tell(bench, part, repeat, f"raysim {ours[-1]:.3f} s a round, bare {floor[-1]:.3f} s, ratio {ratio:.3f}")
    assert config.weighting is not None
    what = f"{config.algorithm.name} with {config.weighting.name}, {config.model.name} on {config.data.name}"
    rows = [
        Row.of("round, raysim", ours, "s", f"{what}, {_pools(executor)}"),
        Row.of("round, bare PyTorch", floor, "s", f"{processes} processes"),
        Row.of("ratio", [a / b for a, b in zip(ours, floor, strict=True)], "x", "median of the pairs' ratios"),
    ]
    raw = {"plan": plan.as_dict(), "raysim_s": ours, "bare_s": floor, "processes": processes}
    raw["rounds_per_block"] = len(block.records)
    return Finding(part, rows, raw, [f"{part}: {note}" for note in notes])


def overlap(bench: Bench) -> Finding:
    """Rounds whose scoring overlaps with training against rounds that train first and score then, on the same pools."""
    part = "overlap"
    if not bench.prepared.setup.weighting.needs_probe:
        return Finding(part, notes=[f"{part} skipped: {_unscored(bench)}"])
    executor = bench.executor(bench.prepared)
    bench.block(bench.prepared, executor, 1)  # Warm-up.
    times: dict[str, list[float]] = {"overlapped": [], "train_then_score": []}
    idle: dict[str, list[float]] = {"clients": [], "scorers": []}
    for repeat in range(bench.repeats):
        with _held_back(executor):
            after = bench.block(bench.prepared, executor)
        block = bench.block(bench.prepared, executor)
        times["train_then_score"].append(after.seconds / len(after.records))
        times["overlapped"].append(block.seconds / len(block.records))
        idle["clients"].append(_idle(block.train_s, block.seconds, executor.plan.client_actors))
        idle["scorers"].append(_idle(block.score_s, block.seconds, executor.plan.scorer_actors))
        said = ", ".join(f"{name} {values[-1]:.3f} s" for name, values in times.items())
        _tell(bench, part, repeat, said)
    gains = [100 * (1 - a / b) for a, b in zip(times["overlapped"], times["train_then_score"], strict=True)]
    rows = [
        Row.of("round, train then score", times["train_then_score"], "s", _pools(executor)),
        Row.of("round, overlapped", times["overlapped"], "s", "the same pools"),
        Row.of("time saved", gains, "%", "median of the pairs"),
        *(Row.of(f"idle {role}", values, "%", "of the overlapped round") for role, values in idle.items()),
    ]
    shares = {f"idle_{role}": values for role, values in idle.items()}
    return Finding(part, rows, {"plan": executor.plan.as_dict(), **times, **shares})


def traffic(bench: Bench) -> Finding:
    """Bytes that went through the driver's node."""
    part = "traffic"
    executor, state, counted = bench.executor(bench.prepared), bench.prepared.initial, list[int]()
    for _ in range(min(BLOCK, bench.config.rounds)):
        result = run_round(bench.prepared, state, executor, Silent())
        state = result.state
        counted.append(result.driver_bytes)
        del result  # Its updates are dropped before the next round makes new ones.
    bench.say(f"{part}: {len(counted)} rounds")
    clients, size = bench.config.cohort_size, bench.prepared.demand.model_bytes
    mib = [count / 2**20 for count in counted]
    rows = [
        Row("one update", size / 2**20, "MiB", detail=f"{size // 4:,} parameters"),
        Row.of("over the network, per round", mib, "MiB", f"from and to the driver, {clients} clients"),
        Row.of("over the network, per client", [count / clients for count in mib], "MiB"),
    ]
    return Finding(part, rows, {"driver_bytes": counted, "model_bytes": size, "clients_per_round": clients})


def suggestion(bench: Bench) -> Finding:
    """The split of the actors between clients and scorers that makes the shortest round, and the share of a GPU for each."""
    part, executor = "suggestion", bench.executor(bench.prepared)
    plan, rows, raw = executor.plan, list[Row](), dict[str, Any]()
    on_gpus = bool(plan.client_gpus)
    cores = None if on_gpus else sum(node.cpus for node in plan.nodes)
    bench.block(bench.prepared, executor, 1)  # Warm-up.
    train_times, score_times = _work(bench, executor, cores)
    train, score = statistics.median(train_times), statistics.median(score_times)
    actors = max(2, plan.client_actors + plan.scorer_actors)
    found = splits(train, score, actors, bench.config.cohort_size, cores)
    raw |= {"plan": plan.as_dict(), "train_s": train_times, "score_s": score_times, "cores": cores, "splits": found}
    alone = "alone on its share of a GPU" if on_gpus else "alone on its core"
    rows.append(Row.of("training of a cohort, one actor", train_times, "s", alone))
    rows.append(Row.of("scoring of a cohort, one actor", score_times, "s", alone))
    best, share = found[0], str(plan.client_gpus) if on_gpus else None
    if on_gpus:
        measured = _gpu_shares(bench, found[0])
        raw["gpu_shares"] = {str(share): times for share, (_, times) in measured.items()}
        for fraction, (split, times) in measured.items():
            rows.append(
                Row.of(f"round with {fraction} GPU each", times, "s", f"{split.clients} + {split.scorers} actors")
            )
        if measured:
            fastest = min(measured, key=lambda fraction: statistics.median(measured[fraction][1]))
            best, share = measured[fastest][0], str(fastest)
    now = next((s for s in found if (s.clients, s.scorers) == (plan.client_actors, plan.scorer_actors)), None)
    for split in dict.fromkeys([*found[:3], *([now] if now else [])]):
        here = " (as now)" if split == now else ""
        title = f"predicted round, {split.clients} client + {split.scorers} scorer actors{here}"
        rows.append(Row(title, split.seconds, "s", detail="training and scoring only"))
    paste, overrides = config_lines(best, share)
    raw |= {"best": best, "paste": paste}
    return Finding(part, rows, raw, [f"{part}: {paste}", f"{part}: or on the command line {overrides}"])


def scoring(bench: Bench) -> Finding:
    """Images scored per second by more and more scorers, and what of the ideal is left when scoring only sleeps."""
    rows, notes, raw = list[Row](), list[str](), dict[str, Any]()
    if bench.prepared.setup.weighting.needs_probe:
        rows += _scored_images(bench, raw, notes)
    else:
        notes.append(f"scoring: real work skipped: {_unscored(bench)}")
    bench.close()
    slept, too_large = rehearse(
        bench.config.execution,
        SLEEPING,
        models_per_scorer=MODELS_PER_SCORER,
        seconds=SLEEP_S,
        repeats=bench.repeats,
        say=lambda line: bench.say(f"scoring: {line}"),
    )
    if too_large:
        notes.append(f"scoring: {', '.join(map(str, too_large))} sleeping scorers skipped: too little memory")
    raw["sleeping_s"] = slept
    ideal = MODELS_PER_SCORER * SLEEP_S
    for count, times in slept.items():
        what = f"{MODELS_PER_SCORER * count} models of {SLEEP_S:g} s"
        rows.append(
            Row.of(f"{_scorers(count, 'sleeping ')}, ideal over real time", [100 * ideal / s for s in times], "%", what)
        )
    return Finding("scoring", rows, raw, notes)


def _scored_images(bench: Bench, raw: dict[str, Any], notes: list[str]) -> list[Row]:
    """The real scoring of a cohort on 1, 2, 4 ... scorers up to the cores, in turn; all models wait when it begins.

    Beside it on one node bare processes that score as many models: two of them are not twice as fast either where cores
    share what they need.
    """
    mirror, differences = mirrored(bench.config)
    config = replace(mirror, client=replace(mirror.client, local_epochs=1))
    cores = int(sum(node.gpus or node.cpus for node in bench.executor(bench.prepared).plan.nodes))
    most = max(1, min(cores, config.cohort_size))
    execution = replace(config.execution, client_actors=1, scorer_actors=most)
    prepared = prepare(replace(config, execution=execution))
    executor = bench.executor(prepared)
    counts = [2**i for i in range(most.bit_length())]
    ours: dict[int, list[float]] = {count: [] for count in counts}
    bare: dict[int, list[float]] = {count: [] for count in counts}
    plan, images = executor.plan, len(prepared.setup.validation)
    alone = len(plan.nodes) == 1 and not plan.scorer_gpus
    with contextlib.ExitStack() as stack:
        loops = {n: stack.enter_context(contextlib.closing(BareLoop(prepared, n))) for n in counts if alone}
        stack.callback(executor.hold_scoring, False)
        for repeat in range(-1, bench.repeats):
            for count in counts:
                executor.hold_scoring(True, scorers=count)
                result = run_round(prepared, prepared.initial, executor, Silent())
                models = sum(outcome.probe is not None for outcome in result.outcomes)
                ours[count].append(images * models / result.use.score_tail_seconds)
                said = f"{_scorers(count)}: {ours[count][-1]:,.0f} images/s"
                if alone:
                    bare[count].append(images * models / loops[count].scored(models))
                    said += f", {count} bare: {bare[count][-1]:,.0f}"
                if repeat >= 0:
                    _tell(bench, "scoring", repeat, said)
    rows = []
    for title, all_speeds in (("scorer", ours), ("bare process", bare)):
        speeds = {count: values[1:] for count, values in all_speeds.items() if values}
        for count, values in speeds.items():
            name = f"{count} {title}{'' if count == 1 else 'es' if title.endswith('s') else 's'}"
            rows.append(Row.of(name, values, "images/s", f"{config.model.name} on {config.data.name}"))
            if count > 1:
                ups = [many / one for many, one in zip(values, speeds[1], strict=True)]
                rows.append(Row.of(f"{name}, speed-up", ups, "x", f"of {count}"))
    raw["images_per_s"] = {count: values[1:] for count, values in ours.items()}
    raw["bare_images_per_s"] = {count: values[1:] for count, values in bare.items()}
    notes += [f"scoring: {note}" for note in differences]
    return rows


def _work(bench: Bench, executor: RayExecutor, cores: float | None) -> tuple[list[float], list[float]]:
    """Seconds of training and of scoring of a cohort, by repeat, on actors that have a core each.

    Training and scoring are held apart, so that they do not slow each other down. Where actors of one pool alone are more
    than the cores, each has only its share of one.
    """
    sizes = executor.plan.client_actors, executor.plan.scorer_actors
    shares = [min(1.0, cores / size) if cores else 1.0 for size in sizes]
    train, score = list[float](), list[float]()
    with _held_back(executor):
        for repeat in range(bench.repeats):
            block = bench.block(bench.prepared, executor, 1)
            train.append(sum(block.train_s) * shares[0])
            score.append(sum(block.score_s) * shares[1])
            _tell(bench, "suggestion", repeat, f"training {train[-1]:.2f} s, scoring {score[-1]:.2f} s of a cohort")
    return train, score


def _gpu_shares(bench: Bench, split: Split) -> dict[Fraction, tuple[Split, list[float]]]:
    """Rounds with actors that have 1/k of a GPU, divided between clients and scorers as in `split`, for each k that fits."""
    found: dict[Fraction, tuple[Split, list[float]]] = {}
    part_of_clients = split.clients / (split.clients + split.scorers)
    execution = bench.config.execution
    gpus = int(sum(node.gpus for node in bench.executor(bench.prepared).plan.nodes))
    for k in GPU_SHARES:
        if k * gpus > 2 * bench.config.cohort_size:
            break  # More would have nothing to do.
        clients = max(1, min(k * gpus - 1, round(k * gpus * part_of_clients)))
        share = Fraction(1, k)
        settings = replace(
            execution,
            client_actors=clients,
            scorer_actors=k * gpus - clients,
            client=replace(execution.client, num_gpus=str(share)),
            scorer=replace(execution.scorer, num_gpus=str(share)),
        )
        try:
            prepared = prepare(replace(bench.config, execution=settings))
            executor = bench.executor(prepared)
            blocks = [bench.block(prepared, executor) for _ in range(bench.repeats + 1)][1:]
        except RaysimError as error:  # Among others, that so many do not fit in the GPU's memory.
            bench.say(f"suggestion: {share} GPU each skipped: {error}")
            continue
        times = [block.seconds / len(block.records) for block in blocks]
        found[share] = Split(statistics.median(times), clients, k * gpus - clients), times
        bench.say(f"suggestion: {share} GPU each: {', '.join(f'{s:.3f}' for s in times)} s a round")
    return found


@contextlib.contextmanager
def _held_back(executor: RayExecutor) -> Iterator[None]:
    executor.hold_scoring(True)
    try:
        yield
    finally:
        executor.hold_scoring(False)


@contextlib.contextmanager
def _first_ready() -> Iterator[list[float]]:
    """Moments at which the pools log that an actor has answered."""
    seen: list[float] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " ready: " in str(record.msg):
                seen.append(time.perf_counter())

    listener, pools = Listener(), logging.getLogger("raysim.pool")
    level = pools.level
    pools.addHandler(listener)
    pools.setLevel(logging.INFO)
    try:
        yield seen
    finally:
        pools.removeHandler(listener)
        pools.setLevel(level)


def _idle(spent: Sequence[float], seconds: float, actors: int) -> float:
    """Percent of the actors' time in which none of their units ran."""
    return 100 * max(0.0, 1 - sum(spent) / (actors * seconds))


def _pools(executor: RayExecutor) -> str:
    return f"{executor.plan.client_actors} client and {executor.plan.scorer_actors} scorer actors"


def _scorers(count: int, kind: str = "") -> str:
    return f"{count} {kind}scorer{'s' if count > 1 else ''}"


def _unscored(bench: Bench) -> str:
    return f"weighting {bench.prepared.setup.weighting.name} scores no model"


def _tell(bench: Bench, part: str, repeat: int, text: str) -> None:
    bench.say(f"{part}, {repeat + 1} of {bench.repeats}: {text}")
