"""Images and labels as plain arrays: what every reader returns and everything else indexes, and how readers check them.

Shapes: N examples, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raysim.errors import ConfigError
from raysim.fields import Count, ProperFraction, Section

_MAX_CLASSES = 65536
"""More classes than that, counted by the largest label of a file without class names, are taken for a broken file."""


@dataclass(frozen=True)
class ValidationSettings(Section):
    """Where the server's validation set comes from.

    Attributes:
        source: `holdout`: a stratified part of the training data, taken out before partitioning, never seen by a
            client. `split`: the validation part that the data set itself has (MedMNIST).
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
        image_size: Side in pixels that images are resized to; null: the images' own size if the model takes it, else
            the model's.
        train_images: Training images to use (before a validation set is held out): a stratified sample, drawn with the
            run's seed; null: all.
        validation: The server's validation set.
    """

    name: str = "digits"
    root: Path = Path("data")
    path: Path | None = None
    image_size: Count | None = None
    train_images: Count | None = None
    validation: ValidationSettings = field(default_factory=ValidationSettings)


@dataclass(frozen=True)
class ImageSet:
    """Labelled images.

    Attributes:
        images: uint8 or uint16 [N, C, H, W], contiguous. They are scaled to [0, 1] by their type's range, never by
            their own maximum.
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
        notes: Remarks for the user that do not stop a run ("class 5 has no training example").
    """

    train: ImageSet
    validation: ImageSet | None
    test: ImageSet
    class_names: tuple[str, ...]
    origin: str
    notes: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)

    def with_notes(self) -> Dataset:
        """The same, with a note of the classes that nobody can learn."""
        absent = np.flatnonzero(np.bincount(self.train.labels, minlength=self.num_classes) == 0)
        note = f"class {absent[0]} has" if len(absent) == 1 else f"classes {listing(absent)} have"
        return replace(self, notes=(f"{note} no training example",) if len(absent) else ())


def checked_dataset(
    *,
    train: ImageSet,
    test: ImageSet,
    validation: ImageSet | None = None,
    class_names: Sequence[str] | None,
    origin: str,
    where: str,
) -> Dataset:
    """The parts that a reader found as one data set, if they belong together.

    Args:
        train: Training part; images [N, C, H, W], labels of any integer type [N].
        test: Test part.
        validation: Validation part, if the data set has one.
        class_names: Names of the labels 0..K-1; None: K is the largest label of all parts + 1, and the names are the
            numbers.
        origin: See `Dataset`.
        where: Configuration key and path that errors begin with.

    Returns:
        The data set, with contiguous images and int64 labels; classes that nobody can learn are in its notes.

    Raises:
        ConfigError: A part is empty, images and labels differ in number, the images of two parts differ in shape or
            type, or labels lie outside 0..K-1; all such faults together.
    """
    parts = {"train": train, "validation": validation, "test": test}
    present = {name: part for name, part in parts.items() if part is not None}
    problems = []
    for name, part in present.items():
        if len(part.images) != len(part.labels):
            problems.append(f"{where}: the {name} part has {len(part.images)} images, but {len(part.labels)} labels")
        elif len(part) == 0:
            problems.append(f"{where}: the {name} part is empty; it needs at least one example")
        if (shape := part.images.shape[1:]) != train.images.shape[1:] or part.images.dtype != train.images.dtype:
            problems.append(
                f"{where}: {name} images are {part.images.dtype} of shape (channels, height, width) {shape}, training "
                f"images {train.images.dtype} of shape {train.images.shape[1:]}; all parts must be alike"
            )
    num_classes = len(class_names) if class_names is not None else 1 + max(_largest(part) for part in present.values())
    if num_classes > _MAX_CLASSES:
        problems.append(
            f"{where}: the largest label is {num_classes - 1}; labels must be 0..K-1, at most {_MAX_CLASSES - 1}"
        )
    else:
        for name, part in present.items():
            if len(outside := np.unique(part.labels[(part.labels < 0) | (part.labels >= num_classes)])):
                problems.append(
                    f"{where}: the {name} part has labels outside 0..{num_classes - 1}: {listing(outside)} "
                    f"({num_classes} classes; labels must be 0..K-1)"
                )
    if problems:
        raise ConfigError(problems)

    def final(part: ImageSet) -> ImageSet:
        images = np.ascontiguousarray(part.images, dtype=part.images.dtype.newbyteorder("="))
        return ImageSet(images, np.ascontiguousarray(part.labels, dtype=np.int64))

    return Dataset(
        train=final(train),
        validation=None if validation is None else final(validation),
        test=final(test),
        class_names=tuple(class_names) if class_names is not None else tuple(map(str, range(num_classes))),
        origin=origin,
    ).with_notes()


def _largest(part: ImageSet) -> int:
    return int(part.labels.max(initial=0))


def stratified_sample(labels: np.ndarray, num_examples: int, rng: np.random.Generator) -> np.ndarray:
    """Draw examples so that every class is drawn in proportion to its size (largest remainder).

    A class with two examples or more gives at least one and keeps at least one, a class with a single example keeps it,
    as far as `num_examples` allows.

    Args:
        labels: [N], any integers.
        num_examples: How many to draw, 0..N.
        rng: Draws which examples of a class are taken.

    Returns:
        Sorted positions into `labels`, int64 [num_examples].
    """
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    quotas = _stratified_quotas(sizes, num_examples)
    order = np.lexsort((rng.permutation(len(labels)), classes))
    starts = np.cumsum(sizes) - sizes
    taken = [order[start : start + quota] for start, quota in zip(starts, quotas, strict=True)]
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *taken]))


def _stratified_quotas(sizes: np.ndarray, total: int) -> np.ndarray:
    """How many examples each class gives: next to its share of `total`, within 1..size-1 where that can be had."""
    shares = sizes * (total / max(sizes.sum(), 1))
    several = sizes >= 2
    quotas: np.ndarray = np.maximum(np.floor(shares), several).astype(np.int64)
    while (missing := total - quotas.sum()) != 0:
        if missing > 0:
            free = quotas < np.where(several, sizes - 1, 0)
            chosen = np.argmax(np.where(free if free.any() else quotas < sizes, shares - quotas, -np.inf))
            quotas[chosen] += 1
        else:
            free = quotas > several
            chosen = np.argmax(np.where(free if free.any() else quotas > 0, quotas - shares, -np.inf))
            quotas[chosen] -= 1
    return quotas


def listing(values: Iterable[Any], limit: int = 10) -> str:
    """The values as text for a message, the first `limit` of them and how many more there are."""
    texts = [str(value) for value in values]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


def file_size(path: Path) -> str:
    """Name and size of a file, for the manifest and for messages."""
    return f"{path.name} ({path.stat().st_size} bytes)"
