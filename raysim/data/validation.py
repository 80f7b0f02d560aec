"""The server's validation set, and the fixed batches that it is scored in.

Shapes: N examples, K classes, B full batches.
"""

from __future__ import annotations

import numpy as np

from raysim.data.arrays import Dataset, ImageSet, ValidationSettings, stratified_sample
from raysim.errors import ConfigError
from raysim.seeding import Purpose, rng_for


def split_validation(dataset: Dataset, settings: ValidationSettings, seed: int) -> tuple[ImageSet, np.ndarray]:
    """The validation set, and which training examples are left for the clients.

    `holdout` takes `round(fraction * N)` training examples, each class in proportion to its size: a class with two
    examples or more is in the validation set and also left for the clients, as far as the numbers allow. `split` takes
    the data set's own validation part and leaves all training examples.

    Args:
        dataset: The data set.
        settings: Which of the two.
        seed: The run's seed; decides which examples are held out.

    Returns:
        The validation set, not empty, and the sorted positions in `dataset.train` that clients may hold, int64.

    Raises:
        ConfigError: The data set has no validation part, or nothing would be left on one side.
    """
    num_examples = len(dataset.train)
    if settings.source == "split":
        if dataset.validation is None:
            raise ConfigError(
                "data.validation.source: split needs a data set with a validation part, and this one has none "
                f"({dataset.origin}); use holdout"
            )
        return dataset.validation, np.arange(num_examples)
    num_held_out = round(settings.fraction * num_examples)
    if not 0 < num_held_out < num_examples:
        raise ConfigError(
            f"data.validation.fraction: {settings.fraction} of {num_examples} training examples is {num_held_out}; the "
            "validation set and the clients need at least one example each"
        )
    held_out = stratified_sample(dataset.train.labels, num_held_out, rng_for(seed, Purpose.SPLIT))
    return dataset.train.take(held_out), np.setdiff1d(np.arange(num_examples), held_out)


def stratified_batches(labels: np.ndarray, batch_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal all examples into batches that have the class mix of the whole.

    Examples are laid out class by class, shuffled inside a class. Evenly spaced ones go to the last, smaller batch; the
    others go to the B full batches in turn. So in a batch of b, the number of examples of a class of n_c differs from
    its share `n_c * b / N` by less than one.

    Args:
        labels: [N].
        batch_size: Examples per batch, at least 1.
        rng: Which examples of a class go together.

    Returns:
        Positions into `labels`, sorted inside a batch, each exactly once. The last batch holds the rest; a rest of one
        example, for which BatchNorm has no statistics, joins the batch before it.
    """
    num_examples = len(labels)
    num_full, rest = divmod(num_examples, batch_size)
    if num_full == 0:
        return [np.arange(num_examples)] if num_examples else []
    if rest == 1:
        rest = 0
    order = np.lexsort((rng.permutation(num_examples), labels))
    # Position i goes to the last batch when the line (i * rest + phase) / N passes a whole number: `rest` times in all.
    phase = rng.integers(num_examples)
    is_rest = np.diff((np.arange(num_examples + 1) * rest + phase) // num_examples) == 1
    batch_of = np.full(num_examples, num_full)
    # Backwards, so that a single example too many goes to the last full batch.
    batch_of[~is_rest] = num_full - 1 - np.arange(num_examples - rest) % num_full
    return [np.sort(order[batch_of == batch]) for batch in range(num_full + (rest > 0))]
