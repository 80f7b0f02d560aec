"""Data: one reader per family of files, the server's validation set, and the partition over clients."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from raysim.data.arrays import Dataset, DataSettings
from raysim.data.cifar import read_cifar10
from raysim.data.digits import read_digits
from raysim.data.idx import read_fashion_mnist
from raysim.data.npz import read_npz
from raysim.data.resizing import resize
from raysim.errors import ConfigError

__all__ = ["SOURCES", "load_dataset", "resize"]

SOURCES: dict[str, Callable[[DataSettings], Dataset]] = {
    "cifar10": read_cifar10,
    "digits": read_digits,
    "fashion_mnist": read_fashion_mnist,
    "npz": read_npz,
}
"""Every data set that `data.name` can name, with its reader."""


def load_dataset(settings: DataSettings) -> Dataset:
    """Read and check the data set, in its own image size.

    Raises:
        ConfigError: Unknown name, or files that are absent, damaged or not what the reader takes.
    """
    if settings.name not in SOURCES:
        close = difflib.get_close_matches(settings.name, SOURCES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"data.name: unknown data set '{settings.name}'{hint}; accepted are {', '.join(SOURCES)}")
    return SOURCES[settings.name](settings)
