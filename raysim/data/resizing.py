"""Other image sizes, once and before training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raysim.data.arrays import Dataset, ImageSet


def resize(dataset: Dataset, side: int) -> Dataset:
    """All parts of the data set with images of `side` x `side` pixels; the data set itself when they have that size.

    Bilinear, antialiased when shrinking; the type of the pixels stays. 8-bit images are computed in integers, so the
    result is the same on every machine. At most one image at a time is in floating point: a large set needs no more
    memory than its result.
    """
    if dataset.train.images.shape[2:] == (side, side):
        return dataset
    return replace(
        dataset,
        train=_resize_part(dataset.train, side),
        validation=None if dataset.validation is None else _resize_part(dataset.validation, side),
        test=_resize_part(dataset.test, side),
    )


def _resize_part(part: ImageSet, side: int) -> ImageSet:
    from PIL import Image

    num_examples, num_channels, height, width = part.images.shape
    planes = part.images.reshape(-1, height, width)
    resized = np.empty((len(planes), side, side), dtype=part.images.dtype)
    for target, plane in zip(resized, planes, strict=True):
        # Pillow has no resampling in 16-bit integers; float32 holds them exactly.
        image = Image.fromarray(plane if plane.dtype == np.uint8 else plane.astype(np.float32))
        pixels = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))
        target[...] = pixels if plane.dtype == np.uint8 else np.rint(pixels)
    return ImageSet(resized.reshape(num_examples, num_channels, side, side), part.labels)
