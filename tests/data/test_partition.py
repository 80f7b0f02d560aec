import json
import os
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.data.partition import Partition, PartitionSettings, make_partition
from raysim.errors import ConfigError

SORTED = np.repeat(np.arange(10), 60)
"""600 labels, sorted by class, as medical data often are."""

alphas = st.sampled_from([0.01, 0.1, 0.5, 1.0, 100.0, 1e6]) | st.floats(0.01, 1e6)


def dirichlet(num_clients: int, alpha: float, min_examples: int = 0, **kwargs) -> PartitionSettings:
    return PartitionSettings(clients=num_clients, alpha=alpha, min_examples=min_examples, **kwargs)


def everything(labels: np.ndarray) -> np.ndarray:
    return np.arange(len(labels))


def assert_covers(partition: Partition, labels: np.ndarray, available: np.ndarray) -> None:
    """Every available example exactly once, no other; hence the totals of all classes."""
    np.testing.assert_array_equal(np.sort(partition.indices), available)
    parts = [partition.of(client_id) for client_id in range(partition.num_clients)]
    np.testing.assert_array_equal(np.concatenate(parts), partition.indices)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert partition.indices.dtype == partition.offsets.dtype == np.int64
    num_classes = int(labels.max()) + 1
    counts = partition.class_counts(labels, num_classes)
    np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(labels[available], minlength=num_classes))
    np.testing.assert_array_equal(counts.sum(axis=1), partition.sizes)


class TestDirichlet:
    @settings(max_examples=80, deadline=None)
    @given(
        st.integers(1, 601), st.integers(1, 40), alphas, st.integers(0, 3), st.integers(1, 11), st.integers(0, 2**32)
    )
    def test_every_example_once_every_client_served(self, num_examples, num_clients, alpha, minimum, num_classes, seed):
        labels = np.random.default_rng(seed).integers(0, num_classes, num_examples + 5)
        available = np.sort(np.random.default_rng(seed).permutation(num_examples + 5)[:num_examples])
        minimum = min(minimum, num_examples // num_clients)
        setting = dirichlet(num_clients, alpha, minimum)
        partition = make_partition(setting, labels, available, seed)
        assert_covers(partition, labels, available)
        assert partition.num_clients == num_clients
        assert partition.sizes.min() >= minimum
        assert 1 <= partition.tries <= setting.max_tries
        assert partition.repaired == 0 or partition.tries == setting.max_tries
        again = make_partition(setting, labels, available[::-1], seed)
        assert again.content_hash == partition.content_hash

    @pytest.mark.parametrize("alpha", [0.01, 0.1, 1, 1e6])
    @pytest.mark.parametrize("num_clients", [1, 7, 10])
    @pytest.mark.parametrize("num_examples", [600, 601])
    def test_fifty_seeds(self, num_examples, num_clients, alpha):
        labels = np.append(SORTED, 9)[:num_examples]
        for seed in range(50):
            partition = make_partition(dirichlet(num_clients, alpha), labels, everything(labels), seed)
            np.testing.assert_array_equal(np.sort(partition.indices), everything(labels))
            assert partition.tries == 1

    @pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-4, 1e300])
    def test_extreme_alpha_is_safe(self, alpha):
        partition = make_partition(dirichlet(50, alpha), SORTED, everything(SORTED), 0)
        assert_covers(partition, SORTED, everything(SORTED))

    def test_alpha_means_what_it_says(self):
        """With small alpha nearly every class lies with one client; with large alpha every client has its share."""
        labels = np.random.default_rng(0).permutation(np.repeat(np.arange(3), [300, 200, 100]))
        skewed = make_partition(dirichlet(10, 1e-5), labels, everything(labels), 0)
        assert (skewed.class_counts(labels, 3).max(axis=0) >= [299, 199, 99]).all()
        even = make_partition(dirichlet(10, 1e6), labels, everything(labels), 0)
        assert np.abs(even.class_counts(labels, 3) - [30, 20, 10]).max() <= 1

    def test_proportions_have_the_moments_of_the_distribution(self):
        """p ~ Beta(alpha, (N-1) alpha): mean 1/N, variance (N-1) / (N^2 (N alpha + 1)); 1/16 for N = 4, alpha = 0.5."""
        labels = np.repeat(np.arange(300), 100)
        partition = make_partition(dirichlet(4, 0.5), labels, everything(labels), 0)
        shares = partition.class_counts(labels, 300) / 100
        np.testing.assert_allclose(shares.mean(axis=1), 0.25, atol=0.05)
        np.testing.assert_allclose(shares.var(axis=1), 1 / 16, atol=0.015)

    def test_large_alpha_does_not_favour_clients(self):
        """60 examples of a class for 100 clients: who gets none must differ from class to class."""
        partition = make_partition(dirichlet(100, 1e6), SORTED, everything(SORTED), 0)
        assert partition.sizes.min() >= 1
        assert partition.sizes.max() <= 10

    def test_the_seed_changes_it(self):
        hashes = {make_partition(dirichlet(5, 0.5), SORTED, everything(SORTED), seed).content_hash for seed in range(5)}
        assert len(hashes) == 5

    def test_repair_after_the_last_try(self):
        start = time.monotonic()
        partition = make_partition(dirichlet(100, 0.1, 1), SORTED, everything(SORTED), 0)
        assert time.monotonic() - start < 5
        assert_covers(partition, SORTED, everything(SORTED))
        assert partition.sizes.min() == 1
        assert partition.tries == 100
        assert partition.repaired > 0

    def test_repair_by_hand(self, monkeypatch):
        """Three draws for 3 clients and 2 classes of 9 examples, none with 5 for each client; the second is the best.

        Its sizes are 9, 6, 3. Client 0 gives client 2 an example of class 1, of which it has most: 8, 6, 4. It has then
        four of each class and gives one of class 0, the first: 7, 6, 5.
        """
        draws = iter([[[9, 0, 0], [0, 9, 0]], [[4, 2, 3], [5, 4, 0]], [[9, 0, 0], [0, 8, 1]]])
        monkeypatch.setattr("raysim.data.partition._draw_counts", lambda *args: np.array(next(draws)))
        labels = np.arange(18) % 2
        partition = make_partition(dirichlet(3, 0.1, 5, max_tries=3), labels, everything(labels), 0)
        np.testing.assert_array_equal(partition.class_counts(labels, 2), [[3, 4], [2, 4], [4, 1]])
        assert (partition.tries, partition.repaired) == (3, 2)

    def test_repair_up_to_equal_sizes(self):
        partition = make_partition(dirichlet(60, 0.1, 10, max_tries=1), SORTED, everything(SORTED), 0)
        np.testing.assert_array_equal(partition.sizes, 10)

    def test_stops_at_the_first_good_draw(self):
        partition = make_partition(dirichlet(10, 1.0, 20), SORTED, everything(SORTED), 3)
        assert partition.repaired == 0
        assert 1 <= partition.tries < 100

    @pytest.mark.parametrize("scheme", ["dirichlet", "iid"])
    def test_impossible_minimum(self, scheme):
        setting = PartitionSettings(scheme=scheme, clients=100, min_examples=40)
        start = time.monotonic()
        with pytest.raises(ConfigError, match="100 clients with min_examples 40 need 4000 examples, but only 600"):
            make_partition(setting, SORTED, everything(SORTED), 0)
        assert time.monotonic() - start < 1

    def test_large(self):
        labels = np.repeat(np.arange(10), 6000)
        start = time.monotonic()
        partition = make_partition(dirichlet(1000, 0.1, 10), labels, everything(labels), 0)
        assert time.monotonic() - start < 5
        assert partition.sizes.min() >= 10


class TestIid:
    def test_sorted_data(self):
        partition = make_partition(PartitionSettings(scheme="iid", clients=2), SORTED, everything(SORTED), 0)
        np.testing.assert_array_equal(partition.class_counts(SORTED, 10), 30)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 30), st.integers(0, 1000))
    def test_sizes_and_classes_differ_by_one_at_most(self, labels, num_clients, seed):
        labels = np.array(labels)
        setting = PartitionSettings(scheme="iid", clients=num_clients, min_examples=0)
        partition = make_partition(setting, labels, everything(labels), seed)
        assert_covers(partition, labels, everything(labels))
        assert np.ptp(partition.sizes) <= 1
        assert (np.ptp(partition.class_counts(labels, 6), axis=0) <= 1).all()

    def test_the_seed_changes_it_and_nothing_else(self):
        setting = PartitionSettings(scheme="iid", clients=7)
        hashes = [make_partition(setting, SORTED, everything(SORTED), seed).content_hash for seed in (0, 0, 1)]
        assert hashes[0] == hashes[1] != hashes[2]


class TestSettings:
    def test_path_and_scheme_go_together(self, tmp_path):
        with pytest.raises(ValueError, match=r"partition\.path is required with partition\.scheme file"):
            PartitionSettings(scheme="file")
        with pytest.raises(ValueError, match=r"partition\.path is only used with .* the scheme is iid"):
            PartitionSettings(scheme="iid", path=tmp_path)


class TestParquet:
    def partition(self) -> Partition:
        return Partition.from_lists([np.array([4, 0]), np.empty(0, int), np.array([2**40]), np.empty(0, int)], "iid")

    def test_round_trip_with_empty_clients(self, tmp_path):
        path = tmp_path / "partition \u00e9t\u00e9.parquet"
        original = make_partition(dirichlet(40, 0.01, max_tries=3), SORTED, everything(SORTED), 0)
        assert original.sizes.min() == 0
        for partition in (original, self.partition(), Partition.from_lists([np.empty(0, int)] * 3, "file")):
            partition.write(path)
            read = Partition.read(path)
            np.testing.assert_array_equal(read.indices, partition.indices)
            np.testing.assert_array_equal(read.offsets, partition.offsets)
            assert (read.scheme, read.tries, read.repaired) == (partition.scheme, partition.tries, partition.repaired)
            assert read.content_hash == partition.content_hash
        assert os.listdir(tmp_path) == [path.name]

    def test_schema(self, tmp_path):
        path = tmp_path / "partition.parquet"
        self.partition().write(path)
        table = pq.read_table(path)
        assert table.to_pydict() == {"client": [0, 0, 2], "example": [0, 4, 2**40]}
        assert table.schema.types == [pa.int32(), pa.int64()]
        assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
        assert table.schema.metadata[b"num_clients"] == b"4"
        assert table.schema.metadata[b"scheme"] == b"iid"
        assert table.schema.metadata[b"content_hash"].decode() == self.partition().content_hash

    def test_hash_is_of_content_only(self):
        parts = [np.array([0, 1]), np.array([2])]
        first = Partition.from_lists(parts, "iid")
        assert first.content_hash == Partition.from_lists(parts, "dirichlet", tries=5, repaired=2).content_hash
        assert first.content_hash != Partition.from_lists([np.array([0]), np.array([1, 2])], "iid").content_hash
        assert first.content_hash != Partition.from_lists([*parts, np.empty(0, int)], "iid").content_hash

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "partition.parquet"
        self.partition().write(path)
        before = path.read_bytes()

        def disk_full(table, file, **kwargs):
            file.write(b"half")
            raise OSError("No space left on device")

        monkeypatch.setattr(pq, "write_table", disk_full)
        with pytest.raises(OSError, match="No space"):
            self.partition().write(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == [path.name]

    def test_changed_content(self, tmp_path):
        path = tmp_path / "partition.parquet"
        self.partition().write(path)
        table = pq.read_table(path)
        changed = pa.table([table["client"], pa.array([0, 4, 5])], schema=table.schema)
        pq.write_table(changed, path)
        with pytest.raises(ConfigError, match="is damaged or was changed: its content has hash"):
            Partition.read(path)

    def test_broken_files(self, tmp_path):
        path = tmp_path / "partition.parquet"
        with pytest.raises(ConfigError, match="cannot be read as a partition"):
            Partition.read(path)
        self.partition().write(path)
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(ConfigError, match=r"partition\.parquet \(200 bytes\) cannot be read"):
            Partition.read(path)
        pq.write_table(pa.table({"client": [0], "example": [0]}), path)
        with pytest.raises(ConfigError, match="it has no 'num_clients'"):
            Partition.read(path)
        metadata = {"num_clients": "1", "scheme": "iid", "tries": "0", "repaired": "0", "content_hash": "00"}
        for columns in ({"client": [0, None], "example": [0, 1]}, {"client": [-1], "example": [0]}, {"client": [0]}):
            pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
            with pytest.raises(ConfigError, match=r"partition\.parquet"):
                Partition.read(path)


class TestFile:
    labels = np.arange(12) % 3
    available = np.setdiff1d(np.arange(12), [3, 7])

    def make(self, path, num_clients=3):
        setting = PartitionSettings(scheme="file", path=path, clients=num_clients)
        return make_partition(setting, self.labels, self.available, 0)

    @pytest.fixture
    def write(self, tmp_path):
        def to_json(content):
            path = tmp_path / "clients \u00e9.json"
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
            return path

        return to_json

    def test_json(self, write):
        partition = self.make(write([[5, 0], [], [11, 1, 2]]))
        np.testing.assert_array_equal(partition.indices, [0, 5, 1, 2, 11])
        np.testing.assert_array_equal(partition.sizes, [2, 0, 3])
        assert partition.scheme == "file"

    def test_parquet(self, tmp_path):
        path = tmp_path / "mine"
        original = make_partition(PartitionSettings(clients=3, scheme="iid"), self.labels, self.available, 0)
        original.write(path)
        assert self.make(path).content_hash == original.content_hash

    def test_wrong_number_of_clients(self, write):
        with pytest.raises(ConfigError, match=r"partition\.clients: 4 given, but .*\.json has 3 clients"):
            self.make(write([[0], [1], [2]]), num_clients=4)

    def test_all_faults_are_listed_together(self, write):
        with pytest.raises(ConfigError) as info:
            self.make(write([[0, 1, 1], [0, 12, -1], [7, 2]]))
        text = str(info.value)
        assert "lists examples more than once: 0, 1" in text
        assert "outside the training data, 0..11: -1, 12" in text
        assert "gives 1 examples of the validation set to clients (client 2): 7" in text
        assert len(info.value.problems) == 3

    @pytest.mark.parametrize(
        "content",
        ["[[0], [1], [2]", "", {"0": [1]}, [[0], [1], 2], [[0], [1], ["2"]], [[0], [1.0], []], [[True], [], []]],
    )
    def test_other_content(self, write, content):
        with pytest.raises(ConfigError, match=r"\.json .* (neither Parquet nor JSON|not a JSON list)"):
            self.make(write(content))

    def test_other_bytes(self, tmp_path):
        path = tmp_path / "x"
        path.write_bytes(b"\xff\xfe\x00garbage")
        with pytest.raises(ConfigError, match="neither Parquet nor JSON"):
            self.make(path)

    def test_absent(self, tmp_path):
        with pytest.raises(ConfigError, match="absent does not exist"):
            self.make(tmp_path / "absent")
        with pytest.raises(ConfigError, match="is a folder"):
            self.make(tmp_path)
