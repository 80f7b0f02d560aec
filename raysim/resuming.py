"""Going on with a run that was stopped: what its folder still holds, and whether it is the run that is asked for.

A run goes on from its newest checkpoint whose round is in the table of rounds; what was written of later rounds is
computed again, to the same bits. Data, partition and every setting that is part of the numerics have to be the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from raysim.config import RunConfig, load_config
from raysim.errors import ConfigError
from raysim.execution.base import StoredState
from raysim.execution.settings import is_numeric
from raysim.fields import flatten
from raysim.preparation import Prepared
from raysim.recording.checkpoint import ClientFile, read_latest
from raysim.recording.manifest import package_versions
from raysim.recording.records import RoundRecord
from raysim.recording.tables import read_rounds
from raysim.runrecord import result_of
from raysim.state import RoundState, from_arrays
from raysim.vector import checksum
from raysim.weighting.base import KeptProbe

logger = logging.getLogger("raysim")

FREE = ("name", "rounds", "evaluation.every", "execution", "output", "data.root", "data.path", "partition.path")
"""Settings that a resumed run may change. The content behind the paths is compared by its hash."""


@dataclass(frozen=True)
class Earlier:
    """What an earlier process left behind of a run.

    Attributes:
        state: The state after the last round that counts, or the initial one.
        rounds: The rows of the rounds that count.
        initial: Metrics of the initial model, if a round was done.
        manifest: Of the process that began the run.
        files: By client id, where the client's state lies.
        notes: What a user should know before the run goes on.
    """

    state: RoundState
    rounds: list[RoundRecord] = field(default_factory=list)
    initial: Mapping[str, Any] | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    files: Mapping[int, ClientFile] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold a run folder: while one process writes to it, no other does. The system ends the hold with the process.

    Raises:
        ConfigError: Another process holds it.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"{folder}: another process is writing this run; wait for its end, or stop it") from None
    except (NotImplementedError, OSError) as error:
        # A file system without locks. A new run's folder was claimed by one process; nothing guards one that is resumed.
        logger.warning("%s: cannot be locked (%s); see that no other process writes this run", folder, error)
        yield
        return
    try:
        yield
    finally:
        lock.release()


def is_unused(folder: Path) -> bool:
    """Whether a process claimed the folder and ended before it wrote anything of its run."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {".lock", "run.log"}


def stored_config(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of the run in a folder, wherever the folder was moved to.

    Args:
        folder: The run folder.
        overrides: `key.path=value`.

    Raises:
        ConfigError: The folder holds no run, or an override is wrong.
    """
    folder = folder.absolute()
    _check_run_folder(folder)
    if moved := [text for text in overrides if text.partition("=")[0] in ("name", "output.dir")]:
        raise ConfigError(
            f"command line: {', '.join(moved)}: a resumed run stays in its folder, {folder}; leave it out"
        )
    config = load_config(folder / "config.yaml", overrides)
    return replace(config, name=folder.name, output=replace(config.output, dir=folder.parent))


def check_same(config: RunConfig) -> None:
    """Refuse to go on with a run under other settings than it was begun with.

    Raises:
        ConfigError: The folder holds no run, or these settings differ.
    """
    _check_run_folder(config.folder)
    stored = load_config(config.folder / "config.yaml")
    before, now = flatten(stored.as_dict()), flatten(config.as_dict())
    problems = [
        f"{key}: {now.get(key)}, but the run in {config.folder} was begun with {before.get(key)}; a resumed run may change "
        f"only {', '.join(FREE)}"
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key) and not _is_free(key)
    ]
    schedule = config.client.optimizer.schedule.name
    if stored.rounds != config.rounds and schedule == "cosine":
        problems.append(
            f"rounds: {config.rounds}, but the run was begun with {stored.rounds}, and client.optimizer.schedule: {schedule} "
            "depends on it"
        )
    if problems:
        raise ConfigError(sorted(problems))


def read_earlier(prepared: Prepared) -> Earlier:
    """What the folder of a run holds, ready to go on from.

    Raises:
        ConfigError: The data or the partition are not those that the run was begun with, or more rounds are done than
            are asked for.
    """
    folder, setup = prepared.config.folder, prepared.setup
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    validation = checksum(setup.validation.images, setup.validation.labels)
    problems = [
        f"{section}: {name} {now}, but the run in {folder} was begun with {manifest[section][name]}"
        for section, name, now in (
            ("data", "hash", setup.data_hash),
            ("data", "validation_hash", validation),
            ("partition", "hash", setup.partition.content_hash),
        )
        if manifest and manifest[section].get(name, now) != now
    ]
    if problems:
        raise ConfigError(problems)
    rows = read_rounds(folder)
    checkpoint = read_latest(folder, up_to=rows[-1].round_num if rows else 0)
    if checkpoint is None and result_of(folder)["status"] == "finished":
        raise ConfigError(f"{folder} is finished and has no usable checkpoint, so it cannot go on; give another name")
    if checkpoint is None:
        lost = f"{len(rows)} rounds are" if rows else "no round is"
        note = f"{folder} has no usable checkpoint: {lost} done, and the run begins again"
        return Earlier(prepared.initial, manifest=manifest, notes=(note,))
    if checkpoint.round_num > prepared.config.rounds:
        raise ConfigError(f"rounds: {prepared.config.rounds}, but {checkpoint.round_num} are done in {folder}")
    files = checkpoint.clients
    client = setup.algorithm.init_client(prepared.initial.server.params)
    state = RoundState(
        checkpoint.round_num,
        from_arrays(type(prepared.initial.server), _section(checkpoint.arrays, "server")),
        from_arrays(type(prepared.initial.buffers), _section(checkpoint.arrays, "buffers")),
        {client_id: StoredState(type(client), folder, entry) for client_id, entry in files.items()},
        {client_id: entry.checksum for client_id, entry in files.items()},
        {int(k): KeptProbe.from_plain(probe) for k, probe in checkpoint.info.get("probes", {}).items()},
    )
    done = [row for row in rows if row.round_num <= checkpoint.round_num]
    if checkpoint.round_num == prepared.config.rounds and done[-1].accuracy is None:
        raise ConfigError(f"rounds: {prepared.config.rounds}, but that round of {folder} was not tested; give more")
    again = f", {len(rows) - len(done)} later ones are computed again" if len(rows) > len(done) else ""
    notes = [f"resumed after round {checkpoint.round_num}{again}", *_other_versions(manifest)]
    return Earlier(state, done, checkpoint.info.get("initial"), manifest, files, tuple(notes))


def _check_run_folder(folder: Path) -> None:
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: is not a run folder (it has no config.yaml), so there is nothing to resume")


def _section(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}


def _other_versions(manifest: Mapping[str, Any]) -> list[str]:
    before, now = manifest.get("versions", {}), package_versions()
    changed = [f"{name} {before[name]} then, {now[name]} now" for name in before if before[name] != now.get(name)]
    return (
        [f"other versions than the run was begun with, so its bits may differ: {'; '.join(changed)}"] if changed else []
    )


def _is_free(key: str) -> bool:
    return not is_numeric(key) and any(key == free or key.startswith(f"{free}.") for free in FREE)
