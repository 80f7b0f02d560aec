"""Handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels in 10 classes, part of the package.

The package has no test set. This reader takes 20 % of every class out as one, by a generator with a fixed seed, so the
test set is the same in every run, whatever the run's seed. The pixels, 0..16 in the package, become
`round(value * 255 / 16)`.
"""

from __future__ import annotations

import functools

import numpy as np

from raysim.data.arrays import Dataset, DataSettings, ImageSet, checked_dataset, stratified_sample

TEST_FRACTION = 0.2
_TEST_SEED = 0


@functools.cache
def _everything() -> ImageSet:
    """All images. The package holds them as text, which takes 50 ms to read: a sweep's points share them."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    images.flags.writeable = labels.flags.writeable = False
    return ImageSet(images, labels)


def read_digits(settings: DataSettings) -> Dataset:
    """The digits data set; needs no file."""
    import sklearn

    everything = _everything()
    labels = everything.labels
    rng = np.random.default_rng(_TEST_SEED)
    test = stratified_sample(labels, round(TEST_FRACTION * len(labels)), rng)
    return checked_dataset(
        train=everything.take(np.setdiff1d(np.arange(len(labels)), test)),
        test=everything.take(test),
        class_names=[str(digit) for digit in range(10)],
        origin=f"scikit-learn {sklearn.__version__}, load_digits",
        where=f"data.name {settings.name}",
    )
