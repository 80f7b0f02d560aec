"""Images and labels as plain arrays: what every reader returns and everything else indexes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from raysim.fields import Count, ProperFraction, Section


@dataclass(frozen=True)
class ValidationSettings(Section):
    """Where the server's validation set comes from.

    Attributes:
        source: `holdout`: a stratified part of the training data, taken out before partitioning, never seen by a client.
            `split`: the validation part that the data set itself has (MedMNIST).
        fraction: Share of the training data for `holdout` (0.1 as in the FedVG paper).
    """

    source: Literal["holdout", "split"] = "holdout"
    fraction: ProperFraction = 0.1


@dataclass(frozen=True)
class DataSettings(Section):
    """Which images to use.

    Attributes:
        name: Reader: digits, fashion_mnist, cifar10, npz.
        root: Folder of the data set's files (fashion_mnist, cifar10).
        path: The file (npz).
        image_size: Side in pixels that images are resized to; null: the images' own size if the model takes it, else the
            model's.
        validation: The server's validation set.
    """

    name: str = "digits"
    root: Path = Path("data")
    path: Path | None = None
    image_size: Count | None = None
    validation: ValidationSettings = field(default_factory=ValidationSettings)


@dataclass(frozen=True)
class ImageSet:
    """Labelled images.

    Attributes:
        images: uint8 or uint16 [N, C, H, W], contiguous. They are scaled to [0, 1] by their type's range, never by their
            own maximum.
        labels: int64 [N].
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> ImageSet:
        """The examples at `indices`, copied."""
        return ImageSet(np.ascontiguousarray(self.images[indices]), self.labels[indices])


@dataclass(frozen=True)
class Dataset:
    """A data set as its reader delivers it, before any split of raysim.

    Attributes:
        train: Training examples (partitioned over the clients, minus a held-out validation set).
        validation: The data set's own validation part, or None.
        test: The stated test set; never trained on, never scored on.
        class_names: Name of each label 0..K-1.
        origin: Where it came from, for the manifest (file names with sizes, package and version).
    """

    train: ImageSet
    validation: ImageSet | None
    test: ImageSet
    class_names: tuple[str, ...]
    origin: str

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)
