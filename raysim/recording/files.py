"""Files that are there completely or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from raysim.errors import RunError


@contextmanager
def write_atomic(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside its place, then move it there: a reader sees the old content or the new, never a part.

    The temporary name begins with "." and does not end like the final one, so readers of a whole folder pass it by. It
    is unique: several processes may write the same file, and the last one wins.

    Args:
        path: The final name. Its folder exists.

    Yields:
        The open temporary file. It is removed when the block raises.

    Raises:
        RunError: If the operating system refuses (disk full, no permission); nothing is left under either name.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(temporary, "xb") as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"Cannot write {path}: {error.strerror or error}.") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, so that what is written afterwards is never on disk without it."""
    if os.name != "posix":  # Other systems cannot open a folder.
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
