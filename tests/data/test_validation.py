import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.data.arrays import ImageSet, ValidationSettings, checked_dataset, stratified_sample
from raysim.data.validation import split_validation, stratified_batches
from raysim.errors import ConfigError

label_lists = st.lists(st.integers(0, 6), min_size=1, max_size=150)


def dataset(labels: np.ndarray, *, with_validation: bool = False):
    """Examples that know who they are: the pixel of training example i is i."""
    images = np.arange(len(labels), dtype=np.uint16).reshape(-1, 1, 1, 1)
    train = ImageSet(images, labels)
    other = ImageSet(images[:2] + 5000, labels[:2])
    return checked_dataset(
        train=train,
        test=other,
        validation=other if with_validation else None,
        class_names=None,
        origin="made",
        where="data",
    )


class TestStratifiedSample:
    @settings(max_examples=60, deadline=None)
    @given(label_lists, st.floats(0, 1), st.integers(0, 10))
    def test_exact_total_and_proportional_classes(self, labels, share, seed):
        labels = np.array(labels)
        num_examples = round(share * len(labels))
        drawn = stratified_sample(labels, num_examples, np.random.default_rng(seed))
        assert len(drawn) == num_examples
        assert (np.diff(drawn) > 0).all()
        sizes = np.bincount(labels, minlength=7)
        counts = np.bincount(labels[drawn], minlength=7)
        several = sizes >= 2
        if several.sum() <= num_examples <= (sizes - 1)[several].sum():
            assert (counts[several] >= 1).all()
            assert (counts[several] < sizes[several]).all()
            assert (counts[~several] == 0).all()

    def test_largest_remainder(self):
        """Shares of 10 out of (50, 30, 25): 4.76, 2.86, 2.38; the two left over go to the largest remainders."""
        labels = np.repeat([0, 1, 2], [50, 30, 25])
        drawn = stratified_sample(labels, 10, np.random.default_rng(0))
        np.testing.assert_array_equal(np.bincount(labels[drawn]), [5, 3, 2])

    def test_a_small_class_gives_one_at_the_cost_of_the_largest(self):
        """Shares of 10 out of (96, 2, 2): 9.6, 0.2, 0.2."""
        labels = np.repeat([0, 1, 2], [96, 2, 2])
        drawn = stratified_sample(labels, 10, np.random.default_rng(0))
        np.testing.assert_array_equal(np.bincount(labels[drawn]), [8, 1, 1])

    def test_examples_of_a_class_are_equally_likely(self):
        labels = np.zeros(10, dtype=int)
        draws = [stratified_sample(labels, 3, np.random.default_rng(seed)) for seed in range(400)]
        assert (np.abs(np.bincount(np.concatenate(draws)) - 120) < 45).all()


class TestHoldout:
    @settings(max_examples=40, deadline=None)
    @given(st.integers(20, 300), st.floats(0.05, 0.9), st.integers(0, 5))
    def test_clients_and_server_share_nothing(self, num_examples, fraction, seed):
        labels = np.random.default_rng(seed).integers(0, 5, num_examples)
        validation, left = split_validation(dataset(labels), ValidationSettings(fraction=fraction), seed)
        held_out = validation.images.reshape(-1)
        assert len(validation) == round(fraction * num_examples)
        np.testing.assert_array_equal(np.sort(np.concatenate([held_out, left])), np.arange(num_examples))
        np.testing.assert_array_equal(validation.labels, labels[held_out])
        assert (np.diff(left) > 0).all()

    def test_depends_on_the_seed_only(self):
        labels = np.arange(200) % 4
        splits = [split_validation(dataset(labels), ValidationSettings(), seed)[1] for seed in (0, 0, 1)]
        np.testing.assert_array_equal(splits[0], splits[1])
        assert not np.array_equal(splits[0], splits[2])

    @pytest.mark.parametrize(("num_examples", "fraction"), [(20, 0.01), (3, 0.99)])
    def test_neither_side_may_be_empty(self, num_examples, fraction):
        labels = np.zeros(num_examples, dtype=int)
        with pytest.raises(ConfigError, match=rf"data\.validation\.fraction: {fraction} of {num_examples}"):
            split_validation(dataset(labels), ValidationSettings(fraction=fraction), 0)


class TestSplit:
    def test_takes_the_part_of_the_data_set(self):
        whole = dataset(np.arange(20) % 4, with_validation=True)
        validation, left = split_validation(whole, ValidationSettings(source="split"), 0)
        assert validation is whole.validation
        np.testing.assert_array_equal(left, np.arange(20))

    def test_needs_one(self):
        with pytest.raises(ConfigError, match=r"data\.validation\.source: split needs .* use holdout"):
            split_validation(dataset(np.arange(20) % 4), ValidationSettings(source="split"), 0)


class TestBatches:
    @settings(max_examples=150, deadline=None)
    @given(label_lists, st.integers(1, 40), st.integers(0, 10))
    def test_each_example_once_and_every_batch_like_the_whole(self, labels, batch_size, seed):
        labels = np.array(labels)
        batches = stratified_batches(labels, batch_size, np.random.default_rng(seed))
        np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(len(labels)))
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert len(batches[-1]) <= batch_size + 1
        assert len(batches[-1]) > 1 or batch_size == 1 or len(labels) == 1
        sizes = np.bincount(labels)
        for batch in batches:
            counts = np.bincount(labels[batch], minlength=len(sizes))
            assert (np.abs(counts - sizes * len(batch) / len(labels)) < 1).all()

    def test_one_big_class_and_many_of_one_example(self):
        """The mix that an order by relative rank gets wrong: it puts all single examples into the middle batches."""
        labels = np.concatenate([np.zeros(100, dtype=int), np.arange(1, 101)])
        for batch in stratified_batches(labels, 20, np.random.default_rng(0)):
            assert (labels[batch] == 0).sum() == 10

    def test_a_single_example_left_over_joins_the_batch_before(self):
        sizes = [len(batch) for batch in stratified_batches(np.arange(9) % 2, 4, np.random.default_rng(0))]
        assert sizes == [4, 5]

    def test_few_examples(self):
        assert stratified_batches(np.empty(0, dtype=int), 4, np.random.default_rng(0)) == []
        np.testing.assert_array_equal(stratified_batches(np.zeros(3, int), 4, np.random.default_rng(0))[0], [0, 1, 2])

    def test_depends_on_the_generator(self):
        labels = np.arange(100) % 3
        first, same, other = (stratified_batches(labels, 10, np.random.default_rng(seed)) for seed in (0, 0, 1))
        assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
