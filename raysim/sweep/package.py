"""The source that jobs are sent: a folder's files without data, results, version control and caches."""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from raysim.errors import ConfigError

CACHES = {"__pycache__", "node_modules", "venv"}
AT_TOP = {"data", "datasets", "out", "output", "outputs", "results", "runs", "build", "dist"}
"""Folders that are left out where they lie directly in the packaged folder."""
GIT_TIMEOUT_S = 20.0


def package(source: Path, target: Path, left_out: Sequence[Path], limit: int) -> tuple[int, int]:
    """Zip a folder's files.

    Without: everything that git ignores, where the folder is a repository's; hidden files and caches; folders named like data
    or results at the top; run folders; `left_out`.

    Args:
        source: The folder.
        target: The archive.
        left_out: Folders and files that stay here.
        limit: Most bytes.

    Returns:
        Number of files and size of the archive in bytes.

    Raises:
        ConfigError: The files, or the archive, have more bytes than the limit; names the largest folders.
    """
    if not source.is_dir():
        raise ConfigError(f"--working-dir: {source} is no folder")
    inside = [path.resolve() for path in left_out]
    files = [path for path in _files(source) if not any(path.resolve().is_relative_to(out) for out in inside)]
    if not files:
        raise ConfigError(f"--working-dir: {source} has no file to send")
    sizes = {path: path.stat().st_size for path in files}
    if sum(sizes.values()) > limit:
        raise ConfigError(_too_large(source, sizes, limit))
    # The same files give the same bytes, so that Ray finds a package it has already.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(source).as_posix())
            entry.external_attr, entry.compress_type = (path.stat().st_mode & 0o777) << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return len(files), target.stat().st_size


def _files(source: Path) -> list[Path]:
    listed = _unignored(source)
    found = []
    for folder, names, leaves in os.walk(source):
        here = Path(folder)
        is_run = {"manifest.json", "config.yaml"} <= set(leaves)
        names[:] = sorted(
            name
            for name in names
            if not name.startswith(".")
            and name not in CACHES
            and not is_run
            and not (here == source and name in AT_TOP)
        )
        if not is_run:
            found += [here / leaf for leaf in sorted(leaves) if not leaf.startswith(".") and not leaf.endswith(".pyc")]
    return [path for path in found if path.is_file() and (listed is None or path in listed)]


def _unignored(source: Path) -> set[Path] | None:
    """What git tracks or would; None if the folder is in no repository or git is not there."""
    command = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return {source / os.fsdecode(name) for name in done.stdout.split(b"\0") if name}


def _too_large(source: Path, sizes: dict[Path, int], limit: int) -> str:
    folders: Counter[str] = Counter()
    for path, size in sizes.items():
        folders[f"{path.parent.relative_to(source).as_posix()}/"] += size
    largest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for name, size in folders.most_common(5))
    return (
        f"--working-dir: {source} has {sum(sizes.values()) / 2**20:.0f} MiB in {len(sizes)} files, Ray takes "
        f"{limit / 2**20:.0f}; the largest folders: {largest}; move data out of it, or let git ignore it"
    )
