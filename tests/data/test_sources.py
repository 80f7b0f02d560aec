import dataclasses

import numpy as np
import pytest

from raysim.data import SOURCES, load_dataset
from raysim.data.arrays import DataSettings, ImageSet, checked_dataset, listing
from raysim.data.resizing import resize
from raysim.errors import ConfigError


def images_of(num_examples: int, shape: tuple[int, ...] = (1, 4, 4), dtype: str = "uint8") -> np.ndarray:
    return np.arange(num_examples * np.prod(shape)).astype(dtype).reshape(num_examples, *shape)


def image_set(labels: list[int], **kwargs) -> ImageSet:
    return ImageSet(images_of(len(labels), **kwargs), np.array(labels, dtype=np.uint8))


def checked(train: ImageSet, test: ImageSet, validation: ImageSet | None = None, class_names=None):
    return checked_dataset(
        train=train, test=test, validation=validation, class_names=class_names, origin="made", where="data.path x"
    )


def test_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(
        ConfigError, match=r"data\.name: unknown data set 'fashionmnist' \(did you mean fashion_mnist\?\)"
    ) as info:
        load_dataset(DataSettings(name="fashionmnist"))
    assert all(name in str(info.value) for name in SOURCES)


def test_the_number_of_classes_counts_every_part():
    dataset = checked(image_set([0, 1]), image_set([3]), image_set([2]))
    assert dataset.num_classes == 4
    assert dataset.class_names == ("0", "1", "2", "3")
    assert dataset.notes == ("classes 2, 3 have no training example",)
    assert dataset.train.labels.dtype == np.int64


def test_a_class_without_training_examples_is_a_note():
    assert checked(image_set([0, 2]), image_set([0])).notes == ("class 1 has no training example",)
    assert checked(image_set([0, 1]), image_set([0])).notes == ()


def test_all_faults_of_the_parts_are_listed_together():
    train = ImageSet(images_of(3), np.array([0, 12, -1]))
    test = ImageSet(images_of(2, (1, 5, 5)), np.array([11]))
    with pytest.raises(ConfigError) as info:
        checked(train, test, image_set([]), class_names=list("abcdefghijk"))
    text = str(info.value)
    assert "train part has labels outside 0..10: -1, 12" in text
    assert "test part has labels outside 0..10: 11" in text
    assert "the test part has 2 images, but 1 labels" in text
    assert "test images are uint8 of shape (channels, height, width) (1, 5, 5)" in text
    assert "the validation part is empty" in text
    assert len(info.value.problems) == 5


def test_parts_must_have_one_type():
    with pytest.raises(ConfigError, match="test images are uint16"):
        checked(image_set([0, 1]), image_set([0, 1], dtype="uint16"))


def test_an_absurd_label_is_not_a_class():
    with pytest.raises(ConfigError, match="largest label is 1099511627776"):
        checked(ImageSet(images_of(2), np.array([0, 2**40])), image_set([0]))


def test_listing_is_cut():
    assert listing(range(3)) == "0, 1, 2"
    assert listing(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_digits():
    dataset = load_dataset(DataSettings(name="digits"))
    assert len(dataset.train) + len(dataset.test) == 1797
    assert len(dataset.test) == 359
    assert dataset.validation is None
    assert dataset.train.images.shape[1:] == (1, 8, 8)
    assert dataset.train.images.dtype == np.uint8
    assert dataset.train.images.flags.c_contiguous
    # Values 0..16 times 255/16; 8 becomes 127.5, which rounds to even.
    assert set(np.unique(dataset.train.images)) == {round(value * 255 / 16) for value in range(17)}
    assert dataset.class_names == tuple("0123456789")
    whole = np.bincount(np.concatenate([dataset.train.labels, dataset.test.labels]))
    assert (np.abs(np.bincount(dataset.test.labels) - whole * 0.2) < 1).all()
    again = load_dataset(DataSettings(name="digits"))
    np.testing.assert_array_equal(dataset.test.images, again.test.images)


class TestResize:
    def dataset(self, shape: tuple[int, ...], dtype: str):
        part = ImageSet(images_of(3, shape, dtype), np.array([0, 1, 0]))
        return checked(part, part, part)

    def test_identity(self):
        dataset = self.dataset((1, 8, 8), "uint8")
        assert resize(dataset, 8) is dataset

    @pytest.mark.parametrize("dtype", ["uint8", "uint16"])
    @pytest.mark.parametrize("side", [5, 28])
    def test_all_parts_keep_type_channels_and_labels(self, dtype, side):
        dataset = resize(self.dataset((3, 8, 9), dtype), side)
        for part in (dataset.train, dataset.validation, dataset.test):
            assert part.images.shape == (3, 3, side, side)
            assert part.images.dtype == dtype
            assert part.images.flags.c_contiguous
            np.testing.assert_array_equal(part.labels, [0, 1, 0])

    @pytest.mark.parametrize(("dtype", "value"), [("uint8", 255), ("uint16", 65535), ("uint16", 40001)])
    def test_a_flat_image_stays_flat(self, dtype, value):
        images = np.full((2, 1, 8, 8), value, dtype=dtype)
        part = ImageSet(images, np.array([0, 0]))
        for side in (3, 28):
            assert (resize(checked(part, part), side).train.images == value).all()

    def test_shrinking_is_antialiased(self):
        """A checkerboard of 0 and 200 has the mean 100 everywhere; taking single pixels would give 0 or 200."""
        board = (np.indices((16, 16)).sum(axis=0) % 2 * 200).astype(np.uint8)
        part = ImageSet(board[np.newaxis, np.newaxis], np.array([0]))
        shrunk = resize(checked(part, part), 4).train.images
        assert (np.abs(shrunk.astype(int) - 100) <= 15).all()

    def test_channels_do_not_mix(self):
        images = np.zeros((1, 3, 8, 8), dtype=np.uint8)
        images[:, 1] = 90
        part = ImageSet(images, np.array([0]))
        resized = resize(checked(part, part), 12).train.images
        assert [int(plane.max()) for plane in resized[0]] == [0, 90, 0]
        assert [int(plane.min()) for plane in resized[0]] == [0, 90, 0]


def test_taking_examples_copies():
    part = image_set([0, 1, 2])
    taken = part.take(np.array([2, 0]))
    np.testing.assert_array_equal(taken.labels, [2, 0])
    assert not np.shares_memory(taken.images, part.images)
    assert dataclasses.is_dataclass(taken)


def test_a_name_is_whole_or_unknown():
    """CIFAR-100 is not CIFAR-10 with something behind it."""
    with pytest.raises(ConfigError, match=r"data\.name: unknown data set 'cifar100' \(did you mean cifar10\?\)"):
        load_dataset(DataSettings(name="cifar100"))
