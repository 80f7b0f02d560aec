"""Checkpoints: everything the next round depends on, on disk, committed by one small file.

    checkpoints/round-00005.npz           arrays of the run: global vector, buffers, server state, ...
    checkpoints/round-00005.json          manifest: names the file, shape, type and checksum of every array, and `info`
    checkpoints/clients/00007-00005.npz   state of client 7 since round 5

The manifest is written last. A checkpoint without one does not exist, so a process may be killed at any moment: the
previous checkpoint still counts. Client states are files of their own, written once per change by whichever process
holds them; the manifests name those that belong to them in `info["clients"]`. File names in a manifest are relative to
`checkpoints/`.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raysim.recording.files import write_atomic
from raysim.recording.manifest import write_json

FORMAT = 1
"""Version of the layout described above."""

_LOG = logging.getLogger(__name__)
_ROUND_FILE = re.compile(r"\.?round-(?P<round>\d+)\.(npz|json)(\.\w+\.tmp)?")
_CLIENT_FILE = re.compile(r"\.?(?P<client>\d+)-(?P<round>\d+)\.npz(\.\w+\.tmp)?")


@dataclass(frozen=True)
class ClientFile:
    """Where a client's state lies.

    Attributes:
        file: File name relative to `checkpoints/`.
        checksum: `arrays_checksum` of its arrays.
    """

    file: str
    checksum: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        round_num: Rounds done.
        arrays: The arrays as they were written.
        info: What was given as `info`, after a round trip through JSON (keys are text, tuples are lists).
    """

    round_num: int
    arrays: dict[str, np.ndarray]
    info: dict[str, Any]

    @property
    def clients(self) -> dict[int, ClientFile]:
        """By client id, the files named in `info["clients"]`."""
        entries = self.info.get("clients", {})
        return {int(client_id): ClientFile(entry["file"], entry["checksum"]) for client_id, entry in entries.items()}


def arrays_checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Checksum of arrays in the order of their names; the same as `record_checksum` of the record they came from."""
    from raysim.vector import checksum

    return checksum(*(arrays[name] for name in sorted(arrays)))


def write_checkpoint(
    folder: Path, round_num: int, arrays: Mapping[str, np.ndarray], info: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Write the checkpoint of a round, then remove what no checkpoint needs any more.

    Args:
        folder: The run folder.
        round_num: Rounds done.
        arrays: By any name, also with "/".
        info: What else belongs to the state, for `write_json`. Its entry `clients`, if there is one, maps client ids to
            `ClientFile`s (or mappings with their fields), written before by `write_client_state`.
        keep: Checkpoints to keep, this one included, at least 1.

    Returns:
        The manifest, whose existence commits the checkpoint.

    Raises:
        RunError: If it cannot be written; the earlier checkpoints are as they were.
    """
    from raysim.vector import checksum

    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}.")
    place = folder / "checkpoints"
    place.mkdir(exist_ok=True)
    stem = f"round-{round_num:05d}"
    _save(place / f"{stem}.npz", arrays)
    entries = {
        name: {"shape": array.shape, "dtype": array.dtype.str, "checksum": checksum(array)}
        for name, array in arrays.items()
    }
    path = place / f"{stem}.json"
    write_json(
        path, {"format": FORMAT, "round_num": round_num, "file": f"{stem}.npz", "arrays": entries, "info": dict(info)}
    )
    _prune(place, round_num, keep)
    return path


def read_latest(folder: Path, *, up_to: int | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole; a broken one is passed by with a logged warning.

    Every array is compared with its checksum. Of the client states only the presence is checked here; their content is
    checked by `read_client_state`.

    Args:
        folder: The run folder.
        up_to: Rounds done at most; None: any number.

    Returns:
        The checkpoint, or None if there is none.
    """
    place = folder / "checkpoints"
    for round_num, path in sorted(_manifests(place).items(), reverse=True):
        if up_to is not None and round_num > up_to:
            continue
        try:
            return _read(path)
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            _LOG.warning("Checkpoint %s is broken and passed by: %s", path, error)
    return None


def write_client_state(folder: Path, client_id: int, round_num: int, arrays: Mapping[str, np.ndarray]) -> str:
    """Write a client's state after it changed in a round. May be called from any process that sees the run folder.

    Args:
        folder: The run folder.
        client_id: The client.
        round_num: The round that changed the state.
        arrays: The state.

    Returns:
        The file name relative to `checkpoints/`.

    Raises:
        RunError: If it cannot be written.
    """
    name = f"clients/{client_id:05d}-{round_num:05d}.npz"
    path = folder / "checkpoints" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    _save(path, arrays)
    return name


def read_client_state(folder: Path, client: ClientFile) -> dict[str, np.ndarray]:
    """The arrays of a client's state.

    Args:
        folder: The run folder.
        client: What `Checkpoint.clients` says of the client.

    Raises:
        OSError: If the file is missing.
        ValueError: If its content is not what was written.
    """
    path = folder / "checkpoints" / client.file
    try:
        arrays = _load(path)
    except (EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if arrays_checksum(arrays) != client.checksum:
        raise ValueError(f"{path} is damaged: its checksum is not {client.checksum}.")
    return arrays


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """What `np.savez` does, for arrays of any name (`file` included) and never with pickled objects."""
    with write_atomic(path) as handle, zipfile.ZipFile(handle, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            # A fixed date: equal arrays make equal files.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _load(path: Path) -> dict[str, np.ndarray]:
    # numpy leaves a file open that it cannot read, so it is opened here.
    with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _manifests(place: Path) -> dict[int, Path]:
    return {int(path.stem.removeprefix("round-")): path for path in place.glob("round-[0-9]*.json")}


def _read(path: Path) -> Checkpoint:
    """Read and check one checkpoint; a broken one raises one of many errors."""
    from raysim.vector import checksum

    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']} is not {FORMAT}, the one this version of raysim reads")
    arrays = _load(path.parent / manifest["file"])
    if set(arrays) != set(manifest["arrays"]):
        raise ValueError(f"{manifest['file']} does not hold the arrays of the manifest")
    for name, array in arrays.items():
        if checksum(array) != manifest["arrays"][name]["checksum"]:
            raise ValueError(f"array {name} in {manifest['file']} does not have the checksum of the manifest")
    checkpoint = Checkpoint(manifest["round_num"], arrays, manifest["info"])
    for client in checkpoint.clients.values():
        with zipfile.ZipFile(path.parent / client.file):  # Its directory is at the end: a cut file is found.
            pass
    return checkpoint


def _prune(place: Path, round_num: int, keep: int) -> None:
    """Remove what the newest `keep` checkpoints up to `round_num` do not need; manifests first.

    Checkpoints of later rounds are of an earlier attempt: they were broken, or the run would not be at this round.
    """
    manifests = _manifests(place)
    kept = sorted(number for number in manifests if number <= round_num)[-keep:]
    for number, path in manifests.items():
        if number not in kept:
            path.unlink()
    for path in place.iterdir():
        match = _ROUND_FILE.fullmatch(path.name)
        if match and (path.name.startswith(".") or int(match["round"]) not in kept):
            path.unlink(missing_ok=True)
    if (place / "clients").is_dir():
        named = {Path(name).name for number in kept for name in _client_files(manifests[number])}
        for path in (place / "clients").iterdir():
            match = _CLIENT_FILE.fullmatch(path.name)
            # States of later rounds may be on their way to the next checkpoint.
            if match and path.name not in named and int(match["round"]) <= round_num:
                path.unlink(missing_ok=True)


def _client_files(manifest: Path) -> list[str]:
    """Files of client states that a manifest names; none if it is broken."""
    try:
        info = json.loads(manifest.read_text(encoding="utf-8"))["info"]
        return [client.file for client in Checkpoint(0, {}, info).clients.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
