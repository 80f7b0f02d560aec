import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from raysim.data import load_dataset
from raysim.data.arrays import DataSettings
from raysim.data.cifar import TRAIN_FILES
from raysim.errors import ConfigError

NAMES = [b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck"]


def batch(seed: int) -> dict[bytes, object]:
    rng = np.random.default_rng(seed)
    return {
        b"batch_label": b"testing batch",
        b"labels": [int(label) for label in rng.permutation(10)],
        b"data": rng.integers(0, 256, (10, 3072), dtype=np.uint8),
        b"filenames": [f"image_{number}.png".encode() for number in range(10)],
    }


def write_files(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate((*TRAIN_FILES, "test_batch")):
        (folder / name).write_bytes(pickle.dumps(batch(number), protocol=2))
    meta = {b"num_cases_per_batch": 10, b"label_names": NAMES, b"num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))


def load(root: Path):
    return load_dataset(DataSettings(name="cifar10", root=root))


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-py"])
def test_reads_all_batches_in_order(tmp_path, folder):
    root = tmp_path / "\u00e9t\u00e9"
    write_files(root / folder)
    dataset = load(root)
    assert dataset.train.images.shape == (50, 3, 32, 32)
    assert dataset.test.images.shape == (10, 3, 32, 32)
    assert dataset.class_names == tuple(name.decode() for name in NAMES)
    # Row 7 of the second batch; its green pixel in row 2, column 5.
    assert dataset.train.images[17, 1, 2, 5] == batch(1)[b"data"][7, 1024 + 2 * 32 + 5]
    np.testing.assert_array_equal(dataset.train.labels[10:20], batch(1)[b"labels"])
    np.testing.assert_array_equal(dataset.test.images.reshape(10, -1), batch(5)[b"data"])


def test_reads_what_python_2_wrote(tmp_path):
    """A pickle as Python 2 and its numpy make it: text as byte strings, numpy under its old module names."""
    write_files(tmp_path)
    pixels = bytes(range(256)) * 12
    python_2 = (
        b"\x80\x02}(U\x06labelsK\x03aU\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b"
        b"\x87R(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff"
        b"\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + pixels + b"tbu."
    ).replace(b"K\x03a", b"]K\x03a", 1)
    (tmp_path / "test_batch").write_bytes(python_2)
    dataset = load(tmp_path)
    np.testing.assert_array_equal(dataset.test.images.reshape(-1), np.frombuffer(pixels, dtype=np.uint8))
    np.testing.assert_array_equal(dataset.test.labels, [3])


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_a_pickle_cannot_run_code(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"labels": Malicious()}, protocol=2))
    with pytest.raises(ConfigError, match=r"data_batch_3 .* refers to posix\.mkdir"):
        load(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_missing_files(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data\.root: .* has no CIFAR-10 files; expected data_batch_1.*batches\.meta"
    ):
        load(tmp_path)
    with pytest.raises(ConfigError, match="absent is not a folder"):
        load(tmp_path / "absent")
    write_files(tmp_path)
    (tmp_path / "data_batch_4").unlink()
    (tmp_path / "batches.meta").unlink()
    with pytest.raises(ConfigError, match=r"lacks data_batch_4, batches\.meta"):
        load(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_truncated_file(tmp_path, share):
    write_files(tmp_path)
    content = (tmp_path / "data_batch_2").read_bytes()
    kept = int(len(content) * share)
    (tmp_path / "data_batch_2").write_bytes(content[:kept])
    with pytest.raises(ConfigError, match=rf"data_batch_2 \({kept} bytes\) cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test_batch", [1, 2], "holds a list"),
        ("test_batch", {b"labels": [0]}, "'data' is a NoneType, expected a uint8 array"),
        ("test_batch", {b"labels": [0], b"data": np.zeros((1, 3073), dtype=np.uint8)}, r"shape \(1, 3073\)"),
        ("test_batch", {b"labels": [0], b"data": np.zeros((1, 3072))}, "float64"),
        ("test_batch", {b"data": np.zeros((1, 3072), dtype=np.uint8)}, "'labels' is a NoneType"),
        ("test_batch", {b"labels": [0, 1], b"data": np.zeros((1, 3072), dtype=np.uint8)}, "1 images, but 2 labels"),
        ("test_batch", {b"labels": [10], b"data": np.zeros((1, 3072), dtype=np.uint8)}, r"outside 0\.\.9: 10"),
        ("batches.meta", {b"num_vis": 3072}, "'label_names' is missing"),
    ],
)
def test_unexpected_content(tmp_path, name, content, message):
    write_files(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
