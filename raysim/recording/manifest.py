"""JSON files, and the manifest: with what, where and how a run was made."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from raysim.recording.files import write_atomic

_PACKAGES = ("raysim", "ray", "torch", "torchvision", "timm", "medmnist", "pyarrow", "tensorboard", "numpy")
_GIT_TIMEOUT_S = 3.0


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON: UTF-8, indented, keys in the order given, complete or not at all.

    Strict JSON has no NaN and no infinity; they become null. Besides JSON's own types, dataclasses, tuples, numpy
    values, paths and times are taken.

    Args:
        path: The file; its folder exists.
        value: What to write.

    Raises:
        TypeError: If a value is of a type not named above.
    """
    text = json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    with write_atomic(path) as handle:
        # A file name that is no UTF-8 holds lone surrogates, whose replacement \udc80 is their JSON spelling.
        handle.write(f"{text}\n".encode(errors="backslashreplace"))


def build_manifest(
    *, command: Sequence[str] | None = None, started: datetime | None = None, **sections: Any
) -> dict[str, Any]:
    """Everything about a run that is not in its configuration.

    Args:
        command: The command line; default that of this process.
        started: Start of the run, with time zone; default now.
        **sections: Further entries (seed, plan, data, partition, model, threads, ...), appended in the order given.

    Returns:
        A mapping for `write_json`. Versions of packages that are not installed and a commit that is not known are None.
    """
    return {
        "started": (started or datetime.now(UTC)).astimezone(UTC).isoformat(),
        "command": list(sys.argv if command is None else command),
        "folder": os.getcwd(),
        "hostname": socket.gethostname(),
        "versions": package_versions(),
        "git": _git(),
        "hardware": _hardware(),
        **sections,
    }


def package_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that results depend on; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _plain(value: Any) -> Any:
    """The value in JSON's own types."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Commit of the current folder's repository and whether tracked files differ from it."""
    commit = _output("git", "rev-parse", "HEAD")
    changes = _output("git", "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "modified": None if changes is None else bool(changes)}


def _output(*command: str) -> str | None:
    """What a command prints, or None if it cannot be run, fails or takes long."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def _hardware() -> dict[str, Any]:
    import torch

    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "logical_cores": os.cpu_count(),
        "memory_gb": _memory_gb(),
        "cuda_devices": [torch.cuda.get_device_name(device) for device in devices],
    }


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
    except (AttributeError, OSError, ValueError):  # Not known to every system.
        return None


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, text = line.partition(":")
                if name.strip() == "model name":
                    return text.strip()
    except OSError:
        pass
    return platform.processor() or None
