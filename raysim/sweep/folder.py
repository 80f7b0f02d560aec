"""A sweep on disk, and the one way to run a point of it.

`runs/SWEEP/` holds a run folder for each point, and `sweep.yaml` (the points), `points/NAME.yaml` (each point's resolved
configuration), `state.json` (how far each is), `jobs/` (logs of jobs), `attempts/` (what was in the place of a point that had
to begin again).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from ruamel.yaml import YAML

from raysim.config import RunConfig, load_config
from raysim.errors import ConfigError
from raysim.recording.files import write_atomic
from raysim.recording.progress import Progress
from raysim.recording.runfolder import ATTEMPTS
from raysim.resuming import check_same, is_unused
from raysim.runrecord import RunRecord, load
from raysim.simulation import Session, run
from raysim.sweep.settings import Point, Sweep, same_numerics


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep.

    Attributes:
        path: Absolute.
    """

    path: Path

    @property
    def state_file(self) -> Path:
        """How far each point is, for programs."""
        return self.path / "state.json"

    def point_file(self, name: str) -> Path:
        """A point's configuration."""
        return self.path / "points" / f"{name}.yaml"

    def job_log(self, job: str) -> Path:
        """What a job printed."""
        return self.path / "jobs" / f"{job}.log"

    @property
    def stop_file(self) -> Path:
        """There while a command that waits for jobs shall submit no more."""
        return self.path / ".locks" / "stop"

    def attempts_at(self, point: Point) -> int:
        """How often a point was begun, as far as the folder shows."""
        abandoned = len(list((self.path / ATTEMPTS).glob(f"{point.name}.*")))
        if not point.config.folder.is_dir():
            return abandoned
        try:
            manifest = json.loads((point.config.folder / "manifest.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            manifest = {}
        return abandoned + 1 + len(manifest.get("resumed", ()))

    def create(self) -> None:
        """Make the folder, unless it is there.

        Raises:
            ConfigError: It cannot be made, or is something else.
        """
        try:
            (self.path / ".locks").mkdir(parents=True, exist_ok=True)
            others = [entry.name for entry in os.scandir(self.path) if not entry.name.startswith(".")]
        except OSError as error:
            raise ConfigError(f"output.dir: cannot create {self.path}: {error.strerror or error}") from error
        if others and not (self.path / "sweep.yaml").is_file():
            raise ConfigError(f"output.dir, name: {self.path} exists and is no sweep; give the sweep another `name`")

    def write(self, sweep: Sweep) -> None:
        """Write the points, for every way to run them, and for readers."""
        points = [{"name": point.name, "id": point.id, "settings": dict(point.settings)} for point in sweep.points]
        yaml: Any = YAML(typ="safe", pure=True)
        yaml.allow_unicode, yaml.default_flow_style = True, False
        yaml.sort_base_mapping_type_on_output = False
        with write_atomic(self.path / "sweep.yaml") as handle:
            yaml.dump({"name": sweep.name, "max_concurrent": sweep.max_concurrent, "points": points}, handle)
        for name in ("points", "jobs"):
            (self.path / name).mkdir(exist_ok=True)
        for point in sweep.points:
            with write_atomic(self.point_file(point.name)) as handle:
                handle.write(point.config.as_yaml().encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other `raysim sweep`s out of the folder.

        Raises:
            ConfigError: One is at work in it.
        """
        with _lock(
            self.path / ".locks" / "sweep.lock",
            f"another raysim sweep is at work in {self.path}; wait for it, or end it",
        ):
            yield


@dataclass(frozen=True)
class Progressed:
    """How far a point is, read from its run folder.

    Attributes:
        status: `missing`, `finished`, `failed`, `interrupted` or `unfinished` (running, or killed).
        result: Content of `result.json`, if it is there.
    """

    status: str
    result: dict[str, Any] | None = None


def progressed(config: RunConfig) -> Progressed:
    """How far a run is. One of other numerics in its folder counts as unfinished."""
    if not config.folder.is_dir():
        return Progressed("missing")
    path = config.folder / "result.json"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        status = str(result["status"])
        if status == "finished" and not same_numerics(load_config(config.folder / "config.yaml"), config):
            return Progressed("unfinished")
    except (FileNotFoundError, ValueError, KeyError, ConfigError):
        return Progressed("unfinished")
    return Progressed(status if status in ("finished", "failed", "interrupted") else "unfinished", result)


def reclaim(folder: Path) -> Path | None:
    """Clear the place of a point that has to begin again: what an earlier attempt left moves to `attempts/`.

    Returns:
        Where it is now; None if there was nothing.
    """
    if not folder.exists():
        return None
    attempts = folder.parent / ATTEMPTS
    attempts.mkdir(exist_ok=True)
    number = 1
    while (moved := attempts / f"{folder.name}.{number}").exists():
        number += 1
    folder.rename(moved)
    return moved


def run_point(
    file: Path,
    *,
    progress: Progress | None = None,
    session: Session | None = None,
    command: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> RunRecord:
    """Run a point from its file, or go on with it; one that is finished is left alone.

    Args:
        file: `points/NAME.yaml` of a sweep's folder.
        progress: Told how it goes.
        session: Whose processes to use.
        command: The command line, for the manifest.
        say: Told what becomes of an earlier attempt.

    Raises:
        ConfigError: The folder is not there on this node, another process runs the point, or the run cannot start.
        RunError: The run failed.
    """
    sweep = file.parent.parent
    if not file.is_file() or not os.access(sweep, os.W_OK):
        what = "cannot be written" if file.is_file() else f"has no points/{file.name}"
        raise ConfigError(
            f"{sweep} {what}; the folder of a sweep (output.dir) must lie on storage that every "
            "node sees under the same path"
        )
    config = load_config(file)
    with _lock(sweep / ".locks" / f"{config.name}.lock", f"{config.name}: another process is running this point"):
        if progressed(config).status == "finished":
            return load(config.folder)
        if config.folder.exists() and not is_unused(config.folder):
            try:
                check_same(config)
            except ConfigError as error:
                moved = reclaim(config.folder)
                say(f"{config.name} begins again, what was there is now {moved}: {'; '.join(error.problems)}")
        return run(config, progress=progress or False, session=session, command=command, resume=True)


@contextmanager
def _lock(path: Path, taken: str) -> Iterator[None]:
    """A lock that ends with the process, whatever ends it."""
    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout:
        raise ConfigError(taken) from None
    except OSError as error:
        if error.filename != str(path):
            raise
        raise ConfigError(f"{path}: cannot be locked: {error.strerror or error}") from error
