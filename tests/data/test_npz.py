from typing import Any

import numpy as np
import pytest

from raysim.data import load_dataset
from raysim.data.arrays import DataSettings
from raysim.errors import ConfigError

SIZES = {"train": 30, "val": 12, "test": 20}


def arrays(shape=(28, 28), num_classes=3, dtype="uint8", parts=("train", "val", "test")) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    result = {}
    for part in parts:
        result[f"{part}_images"] = rng.integers(0, np.iinfo(dtype).max, (SIZES[part], *shape), dtype=dtype)
        result[f"{part}_labels"] = (np.arange(SIZES[part]) % num_classes).astype(np.uint8)[:, np.newaxis]
    return result


@pytest.fixture
def load(tmp_path):
    def write_and_load(content: dict[str, Any], name: str = "organ.npz"):
        path = tmp_path / name
        np.savez(path, **content)
        return load_dataset(DataSettings(name="npz", path=path))

    return write_and_load


def test_layout_of_medmnist(load):
    content = arrays()
    dataset = load(content, "donn\u00e9es.npz")
    np.testing.assert_array_equal(dataset.train.images[:, 0], content["train_images"])
    assert dataset.validation is not None
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (30, 12, 20)
    assert dataset.class_names == ("0", "1", "2")
    assert dataset.train.labels.shape == (30,)
    assert dataset.train.labels.dtype == np.int64
    assert dataset.notes == ()


def test_flat_labels_are_the_same_as_columns(load):
    content = arrays()
    columns = load(content)
    flat = load({name: array.ravel() if "labels" in name else array for name, array in content.items()})
    np.testing.assert_array_equal(columns.train.labels, flat.train.labels)


def test_validation_part_may_be_absent(load):
    assert load(arrays(parts=("train", "test"))).validation is None


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ((28, 28), (1, 28, 28)),
        ((28, 28, 1), (1, 28, 28)),
        ((28, 30, 3), (3, 28, 30)),
        ((3, 28, 30), (3, 28, 30)),
        ((1, 28, 28), (1, 28, 28)),
    ],
)
def test_channels(load, stored, read):
    content = arrays(stored)
    dataset = load(content)
    assert dataset.train.images.shape == (30, *read)
    assert dataset.train.images.flags.c_contiguous
    if stored[-1] == 3:
        np.testing.assert_array_equal(dataset.train.images[:, 2], content["train_images"][..., 2])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 28, 3), "cannot be told apart"),
        ((28, 28, 4), r"shape \(30, 28, 28, 4\); expected \(N, H, W\) or \(N, H, W, C\)"),
        ((28, 28, 28), "volumes"),
        ((28,), r"shape \(30, 28\)"),
        ((28, 28, 28, 1), r"shape \(30, 28, 28, 28, 1\)"),
    ],
)
def test_other_shapes_are_refused(load, shape, message):
    with pytest.raises(ConfigError, match=f"data.path: .*organ.npz: train_images have .*{message}"):
        load(arrays(shape))


def test_parts_of_different_shape_are_refused(load):
    content = arrays() | {"test_images": np.zeros((20, 32, 32), dtype=np.uint8)}
    with pytest.raises(ConfigError, match="test images are uint8 of shape"):
        load(content)


def test_16_bits_are_kept_whatever_their_byte_order(load):
    content = arrays(dtype="uint16")
    dataset = load(content)
    assert dataset.train.images.dtype == np.uint16
    swapped = load({name: array.astype(">u2") if "images" in name else array for name, array in content.items()})
    assert swapped.train.images.dtype == np.dtype("=u2")
    np.testing.assert_array_equal(swapped.train.images, dataset.train.images)


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint32", "bool"])
def test_other_pixel_types_are_refused(load, dtype):
    content = arrays()
    with pytest.raises(ConfigError, match=f"of type {dtype}; accepted are uint8 and uint16"):
        load(content | {"train_images": content["train_images"].astype(dtype)})


def test_multi_label_and_one_hot_are_refused(load):
    content = arrays()
    multi = np.random.default_rng(0).integers(0, 2, (30, 14))
    multi[0, :2] = 1
    with pytest.raises(ConfigError, match=r"train_labels have shape \(30, 14\), which looks multi-label"):
        load(content | {"train_labels": multi})
    with pytest.raises(ConfigError, match=r"train_labels have shape \(30, 11\), which looks one-hot.*argmax"):
        load(content | {"train_labels": np.eye(11, dtype=np.uint8)[np.arange(30) % 11]})


@pytest.mark.parametrize(
    "labels", [np.zeros(30), np.zeros(30, dtype=bool), np.zeros((30, 1, 1), int), np.zeros((30, 0), int)]
)
def test_labels_of_other_types_and_shapes_are_refused(load, labels):
    with pytest.raises(ConfigError, match=r"data\.path: .*train_labels"):
        load(arrays() | {"train_labels": labels})


def test_negative_labels_are_refused(load):
    labels = (np.arange(30) % 3).astype(int)
    labels[4] = -7
    with pytest.raises(ConfigError, match=r"train part has labels outside 0\.\.2: -7"):
        load(arrays() | {"train_labels": labels})


def test_the_largest_label_of_all_parts_decides(load):
    content = arrays()
    content["test_labels"][0] = 5
    dataset = load(content)
    assert dataset.num_classes == 6
    assert dataset.notes == ("classes 3, 4, 5 have no training example",)


class TestMedmnistNames:
    @pytest.mark.parametrize("name", ["dermamnist.npz", "dermamnist_64.npz", "dermamnist_224.npz"])
    def test_class_names(self, load, name):
        dataset = load(arrays((28, 28, 3), 7), name)
        assert dataset.num_classes == 7
        assert dataset.class_names[5] == "melanocytic nevi"

    def test_a_class_may_be_absent(self, load):
        assert load(arrays((28, 28, 3), 6), "dermamnist.npz").notes == ("class 6 has no training example",)

    def test_labels_beyond_the_names_are_refused(self, load):
        content = arrays((28, 28, 3), 7)
        content["val_labels"] += 1
        with pytest.raises(ConfigError, match=r"validation part has labels outside 0\.\.6: 7 \(7 classes"):
            load(content, "dermamnist.npz")

    def test_other_suffixes_are_other_data(self, load):
        assert load(arrays((28, 28, 3), 7), "dermamnist_32.npz").class_names[5] == "5"

    def test_a_missing_file_can_be_fetched_from(self, tmp_path):
        with pytest.raises(
            ConfigError, match=r"dermamnist_64\.npz does not exist; .* https://\S+dermamnist_64\.npz\S* \(MD5 "
        ):
            load_dataset(DataSettings(name="npz", path=tmp_path / "dermamnist_64.npz"))


class TestBadFiles:
    def load(self, path):
        return load_dataset(DataSettings(name="npz", path=path))

    def test_no_path(self):
        with pytest.raises(ConfigError, match=r"data\.path: missing"):
            self.load(None)

    def test_absent_or_a_folder(self, tmp_path):
        with pytest.raises(ConfigError, match=r"absent\.npz does not exist"):
            self.load(tmp_path / "absent.npz")
        with pytest.raises(ConfigError, match="is a folder"):
            self.load(tmp_path)

    @pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
    def test_truncated(self, tmp_path, share):
        path = tmp_path / "organ.npz"
        np.savez_compressed(path, **arrays())
        content = path.read_bytes()
        kept = int(len(content) * share)
        path.write_bytes(content[:kept])
        with pytest.raises(ConfigError, match=rf"organ\.npz \({kept} bytes\) cannot be read as an npz file") as info:
            self.load(path)
        assert str(path) in str(info.value)

    def test_damaged_inside(self, tmp_path):
        path = tmp_path / "organ.npz"
        np.savez(path, **arrays())
        content = bytearray(path.read_bytes())
        content[2000] ^= 255
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="CRC"):
            self.load(path)

    def test_objects_are_never_loaded(self, tmp_path):
        path = tmp_path / "organ.npz"
        np.savez(path, **(arrays() | {"train_labels": np.array([{}] * 30, dtype=object)}))
        with pytest.raises(ConfigError, match="allow_pickle"):
            self.load(path)

    def test_missing_arrays(self, tmp_path):
        path = tmp_path / "organ.npz"
        content = arrays()
        del content["test_labels"], content["val_images"]
        np.savez(path, **content)
        with pytest.raises(ConfigError, match=r"lacks test_labels, val_images; it has test_images, train_images"):
            self.load(path)

    def test_other_formats(self, tmp_path):
        path = tmp_path / "single.npy"
        np.save(path, np.zeros(3))
        with pytest.raises(ConfigError, match="single array"):
            self.load(path)
        path.write_text("not an archive at all")
        with pytest.raises(ConfigError, match="cannot be read"):
            self.load(path)

    def test_an_empty_part(self, tmp_path):
        path = tmp_path / "organ.npz"
        empty = {"test_images": np.zeros((0, 28, 28), np.uint8), "test_labels": np.zeros((0, 1), np.uint8)}
        np.savez(path, **(arrays() | empty))
        with pytest.raises(ConfigError, match="test part is empty"):
            self.load(path)
