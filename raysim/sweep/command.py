"""`raysim sweep`, from its options to its exit status."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from raysim.errors import ConfigError, RunError
from raysim.execution.jobs import PACKAGE_LIMIT, Driver
from raysim.sweep.board import Board
from raysim.sweep.folder import SweepFolder
from raysim.sweep.jobs import JobSweep, entrypoint, job_id, parse_resources, submit_line
from raysim.sweep.package import package
from raysim.sweep.settings import Point, Sweep, load_sweep


@dataclass(frozen=True)
class Options:
    """How a sweep is run.

    Attributes:
        submit: Address of the dashboard of the cluster that runs the points as jobs; None: they run here.
        show: Print the lines that submit them, instead.
        stop: End the jobs, instead.
        max_concurrent: Points at the same time; None: what the sweep says.
        retries: How often a failed point is run again.
        working_dir: Source that the jobs are sent; None: raysim is installed on the cluster.
        entrypoint_cpus: CPUs that each job's driver reserves.
        entrypoint_memory: Bytes that it reserves.
        entrypoint_resources: `NAME=AMOUNT` of custom resources that it reserves.
    """

    submit: str | None = None
    show: bool = False
    stop: bool = False
    max_concurrent: int | None = None
    retries: int = 0
    working_dir: Path | None = None
    entrypoint_cpus: float | None = None
    entrypoint_memory: int | None = None
    entrypoint_resources: Sequence[str] = ()

    def check(self) -> None:
        """Refuse options that would do nothing.

        Raises:
            ConfigError: All of them.
        """
        for_jobs = {
            "--working-dir": self.working_dir is not None,
            "--entrypoint-cpus": self.entrypoint_cpus is not None,
            "--entrypoint-memory": self.entrypoint_memory is not None,
            "--entrypoint-resource": bool(self.entrypoint_resources),
        }
        problems = []
        if not self.submit and not self.show:
            problems += [
                f"{name} is for jobs; give --submit or --print, too" for name, given in for_jobs.items() if given
            ]
        if self.stop and not self.submit:
            problems.append("--stop ends jobs; give --submit with the cluster's address, too")
        if self.stop and self.show:
            problems.append("give --stop or --print, not both")
        idle = {"--retries": self.retries > 0, "--max-concurrent": self.max_concurrent is not None and self.stop}
        if self.stop or self.show:
            problems += [
                f"{name} has no effect with {'--stop' if self.stop else '--print'}" for name in idle if idle[name]
            ]
        if problems:
            raise ConfigError(problems)


def run_sweep(
    file: Path, overrides: Sequence[str], options: Options, out: Console, progress: Console, command: Sequence[str]
) -> None:
    """Run a sweep in the way that the options say.

    Args:
        file: The sweep.
        overrides: `key.path=value` settings of its base.
        options: How.
        out: Where the summary or the lines go.
        progress: Where the progress goes.
        command: The command line, for manifests.

    Raises:
        ConfigError: Found before a point was run.
        RunError: Not every point is finished.
    """
    options.check()
    sweep = load_sweep(file, overrides)
    folder = SweepFolder(sweep.folder)

    def say(line: str) -> None:
        progress.print(line, markup=False, highlight=False, soft_wrap=True)

    if options.stop:
        count = _job_sweep(sweep, folder, options, {}).stop(say)
        say(f"{count} jobs were ended" if count else "no job of this sweep was running")
        return
    folder.create()
    with folder.locked():
        folder.write(sweep)
        # Lines that are only printed change no state.
        board = Board(
            sweep.name, sweep.points, None if options.show else progress, None if options.show else folder.state_file
        )
        left = [point for point in sweep.points if board.rows[point.name].status != "finished"]
        if options.show:
            for line in _lines(sweep, folder, options, left, say):
                # Not through rich, which would wrap it.
                out.file.write(f"{line}\n")
            return
        done = len(sweep.points) - len(left)
        say(f"{sweep.name}: {len(sweep.points)} points, {done} finished before -> {folder.path}")
        count = options.max_concurrent or sweep.max_concurrent
        try:
            with board:
                if options.submit and left:
                    runtime_env = _runtime_env(sweep, folder, options, say)
                    _job_sweep(sweep, folder, options, runtime_env).run(left, board, options.retries)
                elif left:
                    from raysim.sweep.lanes import run_here

                    run_here(left, folder, board, count, options.retries, command)
        finally:
            if not left or any(row.attempts for row in board.rows.values()):
                out.print(board.table())
                out.print(f"results {folder.path}", markup=False, highlight=False, soft_wrap=True)
    if board.unfinished:
        failed = [f"{row.name}: {row.reason or row.status}" for row in board.unfinished]
        raise RunError(
            "\n  ".join(
                [
                    f"{len(failed)} of {len(board.rows)} points are not finished; the same command tries them again",
                    *failed,
                ]
            )
        )


def _driver(options: Options) -> Driver:
    resources = parse_resources(options.entrypoint_resources)
    return Driver(options.entrypoint_cpus, options.entrypoint_memory, resources)


def _job_sweep(sweep: Sweep, folder: SweepFolder, options: Options, runtime_env: Mapping[str, Any]) -> JobSweep:
    from raysim.execution.ray_jobs import Jobs

    count = options.max_concurrent or sweep.max_concurrent
    return JobSweep(sweep, folder, Jobs(str(options.submit)), _driver(options), runtime_env, count)


def _runtime_env(sweep: Sweep, folder: SweepFolder, options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Of every job: nothing, as everything is in the point's file, or the source it is sent."""
    if options.working_dir is None:
        return {}
    archive = folder.path / "source.zip"
    data = [
        path for point in sweep.points for path in (point.config.data.root, point.config.data.path) if path is not None
    ]
    source = options.working_dir.absolute()
    left_out = [
        path for path in {folder.path, sweep.folder.parent, *data} if path != source and not source.is_relative_to(path)
    ]
    files, size = package(source, archive, left_out, PACKAGE_LIMIT)
    say(f"source for the jobs: {files} files of {source}, {size / 2**20:.1f} MiB packed")
    return {"working_dir": str(archive)}


def _lines(
    sweep: Sweep, folder: SweepFolder, options: Options, points: Sequence[Point], say: Callable[[str], None]
) -> list[str]:
    runtime_env = _runtime_env(sweep, folder, options, say)
    if options.submit:
        return _job_sweep(sweep, folder, options, runtime_env).lines(points)
    # Without a cluster to ask, an id is counted up with the attempts that left something: Ray takes none twice.
    count = options.max_concurrent or sweep.max_concurrent
    lines = []
    for point in points:
        attempts = folder.attempts_at(point)
        job = job_id(sweep.name, point) + (f"-{attempts + 1}" if attempts else "")
        lines.append(
            submit_line(None, job, entrypoint(folder.point_file(point.name), count), runtime_env, _driver(options))
        )
    return lines
