"""The folder of a run: claimed by exactly one run, tried before the work begins."""

from __future__ import annotations

import getpass
import os
import shutil
from pathlib import Path

from raysim.errors import ConfigError


def claim(folder: Path) -> None:
    """Create the run folder for this run alone. Of several processes that try at the same moment, one succeeds.

    Args:
        folder: The run folder; its parents are created when missing.

    Raises:
        ConfigError: If the folder exists, or cannot be created.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"output.dir: cannot create {folder}, {folder.parent} is a file.") from error
    except OSError as error:
        raise ConfigError(_refused(folder, error)) from error
    try:
        os.mkdir(folder)
    except FileExistsError as error:
        raise ConfigError(
            f"output.dir, name: {folder} exists. Go on with it (`raysim resume`, or `raysim run --resume`), give another "
            "`name` or `output.dir`, or remove the folder."
        ) from error
    except OSError as error:
        raise ConfigError(_refused(folder, error)) from error


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse a run whose files clearly do not fit.

    Args:
        folder: The run folder; it need not exist yet.
        needed_bytes: About what the run will write.

    Raises:
        ConfigError: If less is free.
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise ConfigError(
            f"output.dir: the run will write about {_size(needed_bytes)} to {folder}, {_size(free)} are free. "
            "Free some space, give another `output.dir`, or write fewer checkpoints (`output.checkpoint_every`)."
        )


def _refused(folder: Path, error: OSError) -> str:
    return f"output.dir: user {_user()} cannot create {folder}: {error.strerror or error}."


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A container's user need not have a name.
        return str(os.getuid())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
