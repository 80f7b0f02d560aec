"""Points run from here: one after the other with the same pools, or in lanes, each on its own part of the cluster.

A lane is a process. Runs seed torch's generator, log to the logger `raysim` and are ended by a signal, all of which belongs to
a process as a whole, so two runs in threads of one process could not be told apart. All lanes use one Ray.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from raysim.errors import ConfigError, RaysimError
from raysim.execution.ray_plan import starts_ray
from raysim.preparation import prepare
from raysim.simulation import Session
from raysim.sweep.board import Board, PointProgress
from raysim.sweep.folder import SweepFolder, progressed, run_point
from raysim.sweep.settings import Point

ENDING_S = 30.0
"""Longest time a lane gets to record that its run was interrupted."""
SHARED_RAY = ("address", "num_cpus", "num_gpus", "object_store_memory_mb")
"""Settings of the one Ray that all points use."""

Tell = Callable[[str, Any], None]


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        status: `finished`, `failed` or `interrupted`.
        reason: Why it did not finish.
        again: Whether another try may help; not if the configuration is wrong.
        result: Content of `result.json`.
    """

    status: str
    reason: str | None = None
    again: bool = False
    result: dict[str, Any] | None = None


def run_here(
    points: Sequence[Point],
    folder: SweepFolder,
    board: Board,
    max_concurrent: int,
    retries: int,
    command: Sequence[str],
) -> None:
    """Run points to their ends; one that fails is recorded, and the next one is begun.

    Args:
        points: What is to be run.
        folder: Where they lie.
        board: Told how it goes.
        max_concurrent: Number of lanes.
        retries: How often a failed point is run again.
        command: The command line, for the manifests.

    Raises:
        ConfigError: The points want different Rays, or theirs cannot be reached.
    """
    queue = deque(points)
    lanes = min(max_concurrent, len(points))
    with _one_ray(points, lanes) as address:
        if lanes <= 1:
            with Session() as session:
                while queue:
                    point = queue.popleft()
                    end = _run_shown(point, folder, board, session, command)
                    _settle(point, end, board, queue, retries)
        else:
            _run_in_lanes(queue, folder, board, lanes, retries, address, command)


def _run_shown(point: Point, folder: SweepFolder, board: Board, session: Session, command: Sequence[str]) -> End:
    board.begin(point.name)

    def tell(kind: str, value: Any) -> None:
        _show(board, point.name, kind, value)

    try:
        return attempt(folder.point_file(point.name), session, tell, command)
    except BaseException:
        board.end(point.name, "interrupted", None, None)
        raise


def attempt(file: Path, session: Session, tell: Tell, command: Sequence[str], parts: int = 1) -> End:
    """Run a point; what goes wrong is returned. Interruptions pass through."""
    progress = PointProgress(lambda *values: tell("round", values))
    try:
        record = run_point(
            file, progress=progress, session=session, command=command, say=lambda line: tell("message", line)
        )
    except ConfigError as error:
        reason = "; ".join(error.problems)
        if parts > 1 and reason.startswith("execution"):
            reason += f" (with max_concurrent: {parts} a point gets 1/{parts} of the cluster)"
        return End("failed", reason)
    except RaysimError as error:
        return End("failed", str(error), again=True)
    except Exception as error:
        errors = file.parent.parent / "errors.log"
        with errors.open("a", encoding="utf-8") as log:
            log.write(f"{datetime.now(UTC).isoformat()} {file.stem}\n{traceback.format_exc()}\n")
        return End("failed", f"unexpected {type(error).__name__}: {error} (traceback in {errors})", again=True)
    return End("finished", result=dict(record.result))


def _show(board: Board, name: str, kind: str, value: Any) -> None:
    if kind == "round":
        board.round_done(name, *value)
    else:
        board.message(value)


def _settle(point: Point, end: End, board: Board, queue: deque[Point], retries: int) -> None:
    board.end(point.name, end.status, end.reason, end.result)
    if end.again and board.rows[point.name].attempts <= retries:
        queue.append(point)


@contextlib.contextmanager
def _one_ray(points: Sequence[Point], lanes: int) -> Iterator[str | None]:
    """This process's connection to the Ray of all points; yields its address, None if no point uses Ray."""
    using = [point for point in points if point.config.execution.backend == "ray"]
    if not using:
        yield None
        return
    first = using[0].config.execution
    for point in using:
        for key in SHARED_RAY:
            ours, theirs = getattr(first, key), getattr(point.config.execution, key)
            if ours != theirs:
                raise ConfigError(
                    f"execution.{key}: {ours} for {using[0].name}, {theirs} for {point.name}; the points of a "
                    "sweep share one Ray"
                )
    from raysim.execution.ray_connection import connect, gcs_address

    store_bytes = 0.0
    if starts_ray(first):
        with contextlib.suppress(RaysimError):  # The point says so itself when its turn comes.
            store_bytes = lanes * prepare(using[0].config).demand.store_bytes
    with contextlib.closing(connect(first, store_bytes)):
        yield gcs_address()


class _Lane:
    """A process that runs points, seen from the outside."""

    def __init__(self, parts: int, address: str | None, command: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_lane, args=(theirs, parts, address, list(command)), daemon=True)
        self.process.start()
        theirs.close()
        self.point: Point | None = None

    def begin(self, point: Point, folder: SweepFolder, board: Board) -> None:
        """Hand it a point."""
        self.point = point
        board.begin(point.name)
        with contextlib.suppress(OSError):  # It has just died, which the next look at the pipe tells.
            self.pipe.send(folder.point_file(point.name))

    def end(self) -> None:
        """Let it record an interruption, then end it."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(ENDING_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(ENDING_S)


def _run_in_lanes(
    queue: deque[Point],
    folder: SweepFolder,
    board: Board,
    count: int,
    retries: int,
    address: str | None,
    command: Sequence[str],
) -> None:
    lanes: list[_Lane] = []
    try:
        lanes += [_Lane(count, address, command) for _ in range(count)]
        while queue or any(lane.point for lane in lanes):
            for index, lane in enumerate(lanes):
                if lane.point is None and queue:
                    if not lane.process.is_alive():
                        lane = lanes[index] = _Lane(count, address, command)
                    lane.begin(queue.popleft(), folder, board)
            busy = {lane.pipe: lane for lane in lanes if lane.point is not None}
            for pipe in wait(list(busy), timeout=1.0):
                lane = busy[pipe]  # type: ignore[index]
                assert lane.point is not None
                try:
                    kind, value = lane.pipe.recv()
                except (EOFError, OSError):
                    lane.process.join(ENDING_S)
                    kind = "end"
                    value = End("failed", f"its process ended with exit code {lane.process.exitcode}", again=True)
                if kind == "end":
                    _settle(lane.point, value, board, queue, retries)
                    lane.point = None
                else:
                    _show(board, lane.point.name, kind, value)
    finally:
        for lane in lanes:
            lane.process.terminate()
        for lane in lanes:
            lane.end()
            if lane.point is not None:
                # It may have ended without having been heard.
                found = progressed(lane.point.config)
                ended = found.status == "finished"
                board.end(
                    lane.point.name, "finished" if ended else "interrupted", None, found.result if ended else None
                )


def _lane(pipe: Connection, parts: int, address: str | None, command: Sequence[str]) -> None:
    """Run the points that come through the pipe, until it closes or this process is told to end."""

    def stop(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Once: the run is being recorded.
        raise KeyboardInterrupt("the sweep was ended")

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to all processes; the parent passes it on.
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if address is not None:
        os.environ["RAY_ADDRESS"] = address

    def tell(kind: str, value: Any) -> None:
        pipe.send((kind, value))

    try:
        with Session(parts) as session:
            while True:
                tell("end", attempt(pipe.recv(), session, tell, command, parts))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        pass
