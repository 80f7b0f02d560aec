"""One npz file in the layout of MedMNIST: arrays `<part>_images` and `<part>_labels` of the parts train, val and test.

The part `val` may be absent. Images are (N, H, W) or (N, H, W, C) with 1 or 3 channels, 8 or 16 bits unsigned; labels
are (N,) or (N, 1). If the file is named like a set of MedMNIST (`dermamnist.npz`, `pathmnist_64.npz`), the class names
come from the package's metadata.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from raysim.data.arrays import Dataset, DataSettings, ImageSet, checked_dataset, file_size
from raysim.errors import ConfigError

_CHANNELS = (1, 3)


def read_npz(settings: DataSettings) -> Dataset:
    """The data set in the file `data.path`."""
    if settings.path is None:
        raise ConfigError("data.path: missing; data.name npz needs the npz file with train_images, train_labels, ...")
    path = settings.path.absolute()
    parts = {prefix: _image_set(prefix, *arrays, path) for prefix, arrays in _load(path).items()}
    info = _medmnist_info(path)
    return checked_dataset(
        train=parts["train"],
        validation=parts.get("val"),
        test=parts["test"],
        class_names=None if info is None else [info["label"][str(label)] for label in range(len(info["label"]))],
        origin=file_size(path),
        where=f"data.path {path}",
    )


def _load(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images and labels of each part of the file, by prefix."""
    if not path.is_file():
        state = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"data.path: {path} {state}; expected an npz file{_source_of(path)}")
    try:
        # The file is opened here because np.load leaves a damaged one open.
        with path.open("rb") as file:
            return _read_parts(file, path)
    except (OSError, EOFError, ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(
            f"data.path: {path} ({path.stat().st_size} bytes) cannot be read as an npz file of plain arrays ({error}); "
            f"if it is damaged or not complete, fetch it again{_source_of(path)}"
        ) from error


def _read_parts(file: BinaryIO, path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    # Objects are pickles, which can run any code: allow_pickle stays off.
    archive = np.load(file, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError("it holds a single array")
    with archive:
        keys = set(archive.files)
        wanted = ["train", "test", *(["val"] if keys & {"val_images", "val_labels"} else [])]
        names = [f"{prefix}_{kind}" for prefix in wanted for kind in ("images", "labels")]
        if absent := [name for name in names if name not in keys]:
            raise ConfigError(
                f"data.path: {path} lacks {', '.join(absent)}; it has {', '.join(sorted(keys)) or 'no arrays'}; "
                "expected train_images, train_labels, test_images, test_labels and optionally val_images, val_labels"
            )
        return {prefix: (archive[f"{prefix}_images"], archive[f"{prefix}_labels"]) for prefix in wanted}


def _image_set(prefix: str, images: np.ndarray, labels: np.ndarray, path: Path) -> ImageSet:
    return ImageSet(
        _channels_first(images, f"data.path: {path}: {prefix}_images"),
        _flat_labels(labels, f"data.path: {path}: {prefix}_labels"),
    )


def _channels_first(images: np.ndarray, where: str) -> np.ndarray:
    """The images as a view [N, C, H, W]."""
    if images.dtype.kind != "u" or images.dtype.itemsize > 2:
        raise ConfigError(
            f"{where} are of type {images.dtype}; accepted are uint8 and uint16, which have a known range"
        )
    if images.ndim == 3:
        return images[:, np.newaxis]
    if images.ndim == 4:
        first, last = images.shape[1] in _CHANNELS, images.shape[3] in _CHANNELS
        if last and not first:
            return np.moveaxis(images, 3, 1)
        if first and not last:
            return images
        if first and last:
            raise ConfigError(
                f"{where} have shape {images.shape}: channels first or last cannot be told apart; "
                "expected (N, H, W, C) with H other than 1 and 3"
            )
    raise ConfigError(
        f"{where} have shape {images.shape}; expected (N, H, W) or (N, H, W, C) with 1 or 3 channels; "
        "volumes (the 3D sets of MedMNIST) are not supported"
    )


def _flat_labels(labels: np.ndarray, where: str) -> np.ndarray:
    """The labels as [N]."""
    if labels.ndim == 2 and labels.shape[1] > 1:
        one_hot = np.isin(labels, (0, 1)).all() and (labels.sum(axis=1) == 1).all()
        kind = "one-hot: store the number of the class instead (argmax over axis 1)" if one_hot else "multi-label"
        raise ConfigError(
            f"{where} have shape {labels.shape}, which looks {kind}; expected one label for each image, (N,) or (N, 1)"
        )
    if labels.ndim not in (1, 2) or (labels.ndim == 2 and labels.shape[1] == 0):
        raise ConfigError(f"{where} have shape {labels.shape}; expected one label for each image, (N,) or (N, 1)")
    if labels.dtype.kind not in "iu":
        raise ConfigError(f"{where} are of type {labels.dtype}; expected integers")
    return labels.reshape(-1)


def _medmnist_info(path: Path) -> dict[str, Any] | None:
    """MedMNIST's metadata of the set that the file is named after."""
    name = _medmnist_name(path)
    if "mnist" not in name:  # as in all its sets; spares others the import
        return None
    from medmnist import INFO

    info: dict[str, Any] | None = INFO.get(name)
    return info


def _medmnist_name(path: Path) -> str:
    return re.sub(r"_(64|128|224)$", "", path.stem)


def _source_of(path: Path) -> str:
    """Where the file can be had, if it is one of MedMNIST's, as the end of a sentence."""
    info = _medmnist_info(path)
    size = path.stem.removeprefix(_medmnist_name(path))
    if info is None or f"url{size}" not in info:
        return ""
    return f" from {info[f'url{size}']} (MD5 {info[f'MD5{size}']})"
