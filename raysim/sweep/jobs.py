"""Points as Ray jobs, submitted and watched from here, or as `ray job submit` lines to run elsewhere.

A job is told one thing, the URL of its point's file: it has no character that a shell would touch, and everything else is in
the file. The folder of the sweep lies on storage that the submitter and all nodes see under the same path.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes, urlsplit

import pyarrow.parquet as pq

from raysim.errors import ConfigError, RunError
from raysim.execution.jobs import Driver, Job, Unreachable
from raysim.recording.files import write_atomic
from raysim.sweep.board import Board
from raysim.sweep.folder import SweepFolder, progressed
from raysim.sweep.settings import Point, Sweep, slug

if TYPE_CHECKING:
    from raysim.execution.ray_jobs import Jobs

POLL_S = 1.0
SILENCE_S = 30.0
"""Longest time that the head may not answer before we give up watching."""
PENDING_S = 30.0
"""A job that has not begun after this time is spoken of."""
VISIBLE_S = 10.0
"""Longest time that a shared file system takes to show what a job has written."""
STOP_S = 30.0
"""Longest wait for stopped jobs to end."""
WRONG_CONFIGURATION = 2
"""Exit status of a run that another try would not mend."""


def entrypoint(file: Path, parts: int) -> str:
    """The command line of a point's job."""
    return f"python -m raysim point {file.as_uri()}" + (f" --parts {parts}" if parts > 1 else "")


def path_of(url: str) -> Path:
    """The path behind a `file:` URL; any other text is a path."""
    return Path(os.fsdecode(unquote_to_bytes(urlsplit(url).path))) if url.startswith("file:") else Path(url)


@dataclass
class _Running:
    job: str
    point: Point
    since: float = field(default_factory=time.monotonic)
    told: bool = False


class JobSweep:
    """The jobs of a sweep on one cluster.

    Args:
        sweep: The sweep.
        folder: Its folder.
        jobs: The cluster.
        driver: What each job's driver reserves.
        runtime_env: Of each job.
        max_concurrent: Jobs that run at the same time, each with pools for its part of the cluster.
    """

    def __init__(
        self,
        sweep: Sweep,
        folder: SweepFolder,
        jobs: Jobs,
        driver: Driver,
        runtime_env: Mapping[str, Any],
        max_concurrent: int,
    ) -> None:
        self._sweep, self._folder, self._jobs, self._driver = sweep, folder, jobs, driver
        self._runtime_env, self._max_concurrent = runtime_env, max_concurrent
        self._url_of = {point.name: folder.point_file(point.name).as_uri() for point in sweep.points}

    def run(self, points: Sequence[Point], board: Board, retries: int) -> None:
        """Submit points and wait for their jobs; jobs of an earlier call that still run are waited for, too.

        Raises:
            RunError: The head does not answer any more; the jobs go on.
        """
        self._folder.stop_file.unlink(missing_ok=True)
        queue = deque(points)
        running: dict[str, _Running] = {}
        for job in self._ours(self._jobs.list()):
            point = self._point_of(job, queue)
            if point is not None and not job.ended:
                queue.remove(point)
                running[job.id] = _Running(job.id, point)
                board.begin(point.name, job.id)
        answered = time.monotonic()
        while queue or running:
            if queue and self._folder.stop_file.exists():
                board.message(f"stopped: {len(queue)} points are not submitted")
                queue.clear()
            try:
                while queue and len(running) < self._max_concurrent:
                    job_id = self._submit(queue[0])
                    point = queue.popleft()
                    running[job_id] = _Running(job_id, point)
                    board.begin(point.name, job_id)
                time.sleep(POLL_S)
                found = {job.id: job for job in self._jobs.list()}
                answered = time.monotonic()
                for each in list(running.values()):
                    if self._watch(each, found.get(each.job), board, queue, retries):
                        del running[each.job]
            except Unreachable as error:
                if time.monotonic() - answered > SILENCE_S:
                    raise RunError(
                        f"{error}; the jobs go on if the cluster does, the same command waits for them again"
                    ) from None

    def stop(self, say: Callable[[str], None]) -> int:
        """End all jobs of the sweep that have not ended; returns how many there were.

        Raises:
            RunError: Some do not end.
        """
        if self._folder.path.is_dir():
            self._folder.stop_file.touch()  # A command that waits for the jobs would submit the next ones.
        begun = [job for job in self._ours(self._jobs.list()) if not job.ended]
        for job in begun:
            self._jobs.stop(job.id)
            say(f"{job.id}: told to end")
        deadline = time.monotonic() + STOP_S
        ids = {job.id for job in begun}
        while left := [job for job in self._jobs.list() if job.id in ids and not job.ended]:
            if time.monotonic() > deadline:
                raise RunError(f"after {STOP_S:g} s still not ended: {', '.join(job.id for job in left)}")
            time.sleep(POLL_S)
        for job in begun:
            self._save_log(job.id)
        return len(begun)

    def lines(self, points: Sequence[Point]) -> list[str]:
        """The `ray job submit` lines of points, for a shell."""
        known = self._jobs.list()
        return [
            submit_line(
                self._jobs.address,
                self._next_id(point, known),
                self._entrypoint(point),
                self._runtime_env,
                self._driver,
            )
            for point in points
        ]

    def _entrypoint(self, point: Point) -> str:
        return entrypoint(self._folder.point_file(point.name), self._max_concurrent)

    def _ours(self, jobs: Sequence[Job]) -> list[Job]:
        urls = set(self._url_of.values())
        return [job for job in jobs if urls & set(job.entrypoint.split())]

    def _point_of(self, job: Job, points: Sequence[Point]) -> Point | None:
        words = job.entrypoint.split()
        return next((point for point in points if self._url_of[point.name] in words), None)

    def _submit(self, point: Point) -> str:
        known = self._jobs.list()
        # A submission whose answer was lost: its job goes on.
        begun = [job for job in self._ours(known) if not job.ended and self._point_of(job, [point]) is not None]
        if begun:
            return begun[0].id
        job = self._next_id(point, known)
        self._jobs.submit(job, self._entrypoint(point), self._runtime_env, self._driver)
        return job

    def _next_id(self, point: Point, known: Sequence[Job]) -> str:
        """`<sweep>-<id>`, then `-2` and so on: Ray takes an id once, whatever became of its job."""
        base = job_id(self._sweep.name, point)
        pattern = re.compile(rf"{re.escape(base)}(?:-(\d+))?")
        numbers = [int(match[1] or 1) for job in known if (match := pattern.fullmatch(job.id))]
        return f"{base}-{max(numbers) + 1}" if numbers else base

    def _watch(self, each: _Running, job: Job | None, board: Board, queue: deque[Point], retries: int) -> bool:
        """Look at a job that was running; whether it has ended."""
        point = each.point
        if job is not None and not job.ended:
            if job.status == "PENDING" and not each.told and time.monotonic() - each.since > PENDING_S:
                board.message(f"{each.job}: still pending: {job.message}")
                each.told = True
            row = latest_round(point.config.folder)
            if row is not None and job.status == "RUNNING":
                board.round_done(point.name, *row)
            return False
        if job is not None:
            self._save_log(each.job)
        found = progressed(point.config)
        deadline = time.monotonic() + VISIBLE_S
        while (
            job is not None and job.status == "SUCCEEDED" and found.status != "finished" and time.monotonic() < deadline
        ):
            time.sleep(0.5)
            found = progressed(point.config)
        if found.status == "finished":
            board.end(point.name, "finished", None, found.result)
            return True
        again = job is None or (job.status == "FAILED" and job.exit_code != WRONG_CONFIGURATION)
        status = "interrupted" if job is not None and job.status == "STOPPED" else "failed"
        board.end(point.name, status, self._reason(each.job, job, point), found.result)
        if again and board.rows[point.name].attempts <= retries:
            queue.append(point)
        return True

    def _reason(self, job_id: str, job: Job | None, point: Point) -> str:
        if job is None:
            return f"job {job_id}: the cluster does not know it any more"
        if job.status == "SUCCEEDED":
            return (
                f"job {job_id} succeeded, but {point.config.folder} has no finished result here: the folder of a sweep must "
                "lie on storage that this machine and all nodes see under the same path"
            )
        if job.status == "STOPPED":
            return f"job {job_id} was stopped"
        log = self._folder.job_log(job_id)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        said = [line.strip() for line in text.splitlines() if line.startswith(("raysim: ", "  "))]
        begins = [i for i, line in enumerate(said) if line.startswith("raysim: ")]
        if begins:
            return f"job {job_id}: {' '.join(line.removeprefix('raysim: ') for line in said[begins[-1] :])}"
        return f"job {job_id}: {' '.join(job.message.split())} (log: {log})"

    def _save_log(self, job: str) -> None:
        with contextlib.suppress(RunError), write_atomic(self._folder.job_log(job)) as handle:
            handle.write(self._jobs.log(job).encode(errors="replace"))


def job_id(sweep: str, point: Point) -> str:
    """The submission id of a point's first job."""
    return f"{slug({'name': sweep}) or 'sweep'}-{point.id}"


def submit_line(address: str | None, job: str, command: str, runtime_env: Mapping[str, Any], driver: Driver) -> str:
    """One `ray job submit`, quoted for a shell; it waits for the job."""
    words = ["ray", "job", "submit", *(["--address", address] if address else []), "--submission-id", job]
    if runtime_env:
        words += ["--runtime-env-json", json.dumps(runtime_env)]
    if driver.cpus is not None:
        words += ["--entrypoint-num-cpus", f"{driver.cpus:g}"]
    if driver.memory is not None:
        words += ["--entrypoint-memory", str(driver.memory)]
    if driver.resources:
        words += ["--entrypoint-resources", json.dumps(dict(driver.resources))]
    return shlex.join([*words, "--", *shlex.split(command)])


def latest_round(folder: Path) -> tuple[int, float | None] | None:
    """The last committed round of a run that goes on elsewhere, and its accuracy."""
    # Of the many files the last one only: this is asked for every second.
    last = max((folder / "rounds").glob("[0-9]*.parquet"), default=None)
    if last is None:
        return None
    try:
        row = pq.read_table(last, columns=["round_num", "accuracy"]).to_pylist()[-1]
    except (OSError, ValueError):  # Moved away, or not yet complete on a shared file system.
        return None
    return int(row["round_num"]), row["accuracy"]


def parse_resources(texts: Sequence[str]) -> dict[str, float]:
    """`NAME=AMOUNT` settings of custom resources.

    Raises:
        ConfigError: One is no such setting.
    """
    found = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            raise ConfigError(f"--entrypoint-resource: {text!r} is not NAME=AMOUNT") from None
        if not name or not found[name] > 0:
            raise ConfigError(f"--entrypoint-resource: {text!r} is not NAME=AMOUNT")
    return found
