import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from raysim.data import load_dataset
from raysim.data.arrays import DataSettings
from raysim.data.idx import FILES, read_idx
from raysim.errors import ConfigError


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"train": 20, "t10k": 10}
    return {
        name: rng.integers(0, 256, (sizes[name.split("-")[0]], 28, 28), dtype=np.uint8)
        if "images" in name
        else np.arange(sizes[name.split("-")[0]], dtype=np.uint8) % 10
        for name in FILES
    }


def write_files(folder: Path, *, packed: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays().items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        else:
            (folder / name).write_bytes(idx_bytes(array))


def load(root: Path):
    return load_dataset(DataSettings(name="fashion_mnist", root=root))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["", "fashion_mnist", "fashion-mnist", "FashionMNIST/raw"])
def test_reads_plain_and_gzipped_files_in_all_usual_folders(tmp_path, packed, folder):
    root = tmp_path / "donn\u00e9es \u00e9t\u00e9"
    write_files(root / folder, packed=packed)
    dataset = load(root)
    np.testing.assert_array_equal(dataset.train.images[:, 0], arrays()["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(dataset.test.images[:, 0], arrays()["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(dataset.train.labels, np.arange(20) % 10)
    assert dataset.train.images.shape == (20, 1, 28, 28)
    assert dataset.train.images.flags.c_contiguous
    assert dataset.train.labels.dtype == np.int64
    assert dataset.class_names[9] == "Ankle boot"
    assert "train-images-idx3-ubyte" in dataset.origin
    assert dataset.validation is None


def test_no_files(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data\.root: .* has no Fashion-MNIST files; expected train-images-idx3-ubyte"
    ):
        load(tmp_path)
    with pytest.raises(ConfigError, match="absent is not a folder"):
        load(tmp_path / "absent")


def test_one_file_missing(tmp_path):
    write_files(tmp_path, packed=True)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ConfigError, match="lacks t10k-labels-idx1-ubyte"):
        load(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_file(tmp_path, packed, share):
    write_files(tmp_path, packed=packed)
    path = tmp_path / ("train-images-idx3-ubyte" + (".gz" if packed else ""))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match=r"data\.root: .*train-images-idx3-ubyte") as info:
        load(tmp_path)
    assert "bytes" in str(info.value)


def test_sizes_are_named(tmp_path):
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(idx_bytes(np.zeros(5, dtype=np.uint8)) + b"!")
    with pytest.raises(ConfigError, match=r"has 14 bytes unpacked, but its header announces 13"):
        read_idx(path, 1)


def test_wrong_number_of_axes(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(idx_bytes(np.zeros((2, 2, 2), dtype=np.uint8)))
    with pytest.raises(ConfigError, match=r"begins with '00 00 08 03'; expected .* '00 00 08 01'"):
        read_idx(path, 1)


def test_gz_name_on_a_plain_file(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(idx_bytes(np.zeros(2, dtype=np.uint8)))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_idx(path, 1)


def test_labels_out_of_range(tmp_path):
    write_files(tmp_path, packed=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(20, dtype=np.uint8)))
    with pytest.raises(ConfigError, match=r"train part has labels outside 0\.\.9: 10, 11, .* \(10 classes"):
        load(tmp_path)


def test_images_and_labels_differ_in_number(tmp_path):
    write_files(tmp_path, packed=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(19, dtype=np.uint8)))
    with pytest.raises(ConfigError, match="train part has 20 images, but 19 labels"):
        load(tmp_path)
