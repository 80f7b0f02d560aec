"""Fashion-MNIST in its original four idx files, plain or gzipped.

Debian and Ubuntu carry them as the package `dataset-fashion-mnist`, which puts them into
`/usr/share/datasets/fashion-mnist`.

Format: bytes 0, 0, element type (8: unsigned byte), number of axes; then each axis as a big-endian 32-bit number; then
the elements.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from raysim.data.arrays import Dataset, DataSettings, ImageSet, checked_dataset, file_size
from raysim.errors import ConfigError

CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
FOLDERS = ("", "fashion_mnist", "fashion-mnist", "FashionMNIST/raw")
_BYTE = 8


def read_fashion_mnist(settings: DataSettings) -> Dataset:
    """Fashion-MNIST from `data.root` or one of the folders in it that packages and torchvision use."""
    paths = _find(settings.root.absolute())
    train_images, train_labels, test_images, test_labels = (
        read_idx(path, 3 if "images" in path.name else 1) for path in paths
    )
    return checked_dataset(
        train=ImageSet(train_images[:, np.newaxis], train_labels),
        test=ImageSet(test_images[:, np.newaxis], test_labels),
        class_names=CLASS_NAMES,
        origin="Fashion-MNIST: " + ", ".join(file_size(path) for path in paths),
        where=f"data.root {paths[0].parent}",
    )


def _find(root: Path) -> list[Path]:
    """The four files, all out of the first folder that has any of them."""
    for folder in dict.fromkeys(root / name for name in FOLDERS):
        candidates = [[folder / name, folder / f"{name}.gz"] for name in FILES]
        found = [next((path for path in pair if path.is_file()), None) for pair in candidates]
        paths = [path for path in found if path is not None]
        if len(paths) == len(FILES):
            return paths
        if paths:
            absent = [name for name, path in zip(FILES, found, strict=True) if path is None]
            raise ConfigError(
                f"data.root: {folder} lacks {', '.join(absent)} (plain or .gz); Fashion-MNIST has four files"
            )
    state = "has no Fashion-MNIST files" if root.is_dir() else "is not a folder"
    raise ConfigError(
        f"data.root: {root} {state}; expected {', '.join(FILES)}, each plain or .gz, in that folder or below it in "
        f"{', '.join(FOLDERS[1:])} (Debian and Ubuntu: package dataset-fashion-mnist, "
        "data.root /usr/share/datasets/fashion-mnist)"
    )


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """The array of bytes in an idx file.

    Args:
        path: The file; gzipped if its name ends in .gz.
        num_axes: Axes that the array must have.

    Raises:
        ConfigError: The file cannot be read, is no idx file of bytes with that many axes, or is shorter or longer than
            its header says.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        size = path.stat().st_size
        raise ConfigError(
            f"data.root: {path} ({size} bytes) cannot be read ({error}); it is damaged or not complete, fetch it again"
        ) from error
    magic = bytes([0, 0, _BYTE, num_axes])
    header = len(magic) + 4 * num_axes
    if len(content) < header or not content.startswith(magic):
        raise ConfigError(
            f"data.root: {path} ({len(content)} bytes unpacked) begins with '{content[:4].hex(' ')}'; expected an idx "
            f"file of unsigned bytes with {num_axes} axes, '{magic.hex(' ')}' and a header of {header} bytes"
        )
    shape = struct.unpack(f">{num_axes}I", content[len(magic) : header])
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise ConfigError(
            f"data.root: {path} has {len(content)} bytes unpacked, but its header announces {expected} (shape "
            f"{shape}); it is damaged or not complete, fetch it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()
