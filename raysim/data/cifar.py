"""CIFAR-10 in its original "python version": five training batches, a test batch and the class names, as pickled dicts.

Loading a pickle can run any code, so these are read by an unpickler that knows only what such files hold: numpy arrays,
byte strings, numbers, lists and dicts.
"""

from __future__ import annotations

import codecs
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raysim.data.arrays import Dataset, DataSettings, ImageSet, checked_dataset, file_size
from raysim.errors import ConfigError

TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
META_FILE = "batches.meta"
FOLDER = "cifar-10-batches-py"
SIDE = 32

_reconstruct = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    # How Python 3 writes byte strings for Python 2.
    ("_codecs", "encode"): codecs.encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}, which such a file never does")
        return _ALLOWED[module_name, global_name]


def read_cifar10(settings: DataSettings) -> Dataset:
    """CIFAR-10 from `data.root` or the folder `cifar-10-batches-py` in it."""
    folder = _find(settings.root.absolute())
    return checked_dataset(
        train=_read_batches([folder / name for name in TRAIN_FILES]),
        test=_read_batches([folder / TEST_FILE]),
        class_names=_read_class_names(folder / META_FILE),
        origin="CIFAR-10: " + ", ".join(file_size(folder / name) for name in (*TRAIN_FILES, TEST_FILE, META_FILE)),
        where=f"data.root {folder}",
    )


def _find(root: Path) -> Path:
    """The first folder that has any of the files; it must have all."""
    files = (*TRAIN_FILES, TEST_FILE, META_FILE)
    for folder in (root, root / FOLDER):
        absent = [name for name in files if not (folder / name).is_file()]
        if not absent:
            return folder
        if len(absent) < len(files):
            raise ConfigError(f"data.root: {folder} lacks {', '.join(absent)}; CIFAR-10 consists of {', '.join(files)}")
    state = "has no CIFAR-10 files" if root.is_dir() else "is not a folder"
    raise ConfigError(
        f"data.root: {root} {state}; expected {', '.join(files)} (unpacked from cifar-10-python.tar.gz) in that folder "
        f"or below it in {FOLDER}"
    )


def _read_batches(paths: Sequence[Path]) -> ImageSet:
    """The batches one after another; a row holds the 32 x 32 pixels of red, then green, then blue."""
    images, labels = [], []
    for path in paths:
        content = _read_pickle(path)
        rows, batch_labels = content.get("data"), content.get("labels")
        if not (isinstance(rows, np.ndarray) and rows.dtype == np.uint8 and rows.shape[1:] == (3 * SIDE * SIDE,)):
            found = f"{rows.dtype} array of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
            raise ConfigError(f"data.root: {path}: 'data' is a {found}, expected a uint8 array of shape (N, 3072)")
        if not (isinstance(batch_labels, list) and all(isinstance(label, int) for label in batch_labels)):
            raise ConfigError(
                f"data.root: {path}: 'labels' is a {type(batch_labels).__name__}, expected a list of integers"
            )
        if len(batch_labels) != len(rows):
            raise ConfigError(f"data.root: {path} has {len(rows)} images, but {len(batch_labels)} labels")
        images.append(rows.reshape(-1, 3, SIDE, SIDE))
        labels.append(np.array(batch_labels, dtype=np.int64))
    return ImageSet(np.concatenate(images), np.concatenate(labels))


def _read_class_names(path: Path) -> list[str]:
    names = _read_pickle(path).get("label_names")
    if not (isinstance(names, list) and names and all(isinstance(name, (bytes, str)) for name in names)):
        raise ConfigError(f"data.root: {path}: 'label_names' is missing or empty, expected a list of class names")
    return [_text(name) for name in names]


def _read_pickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ConfigError(
            f"data.root: {path} ({path.stat().st_size} bytes) cannot be read as a CIFAR-10 batch ({error}); it is "
            "damaged or not complete, unpack or fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"data.root: {path} holds a {type(content).__name__}, expected the dict of a CIFAR-10 batch")
    return {_text(key): value for key, value in content.items()}


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
