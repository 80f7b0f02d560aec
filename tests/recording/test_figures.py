from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from raysim.recording.figures import draw_partition, draw_run
from raysim.recording.tables import TableWriter

NAMES = (
    "a/b",
    "_hidden",
    r"$\no math$",
    "Pneumonie \u00e0 virus",
    "\u80ba\u708e",
    *(f"class {label}" for label in range(5)),
)


def size_of(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(content) > 5000
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(
    ("num_clients", "num_classes"), [(1, 1), (20, 10), (40, 2), (41, 10), (100, 10), (100, 25), (600, 3)]
)
def test_partition(tmp_path, num_clients, num_classes):
    counts = np.random.default_rng(0).integers(0, 50, (num_clients, num_classes))
    names = (NAMES * 3)[:num_classes]
    draw_partition(counts, names, tmp_path / "partition.png")
    width, height = size_of(tmp_path / "partition.png")
    assert 600 <= width <= 3200
    assert 300 <= height <= 1800
    assert [path.name for path in tmp_path.iterdir()] == ["partition.png"]


def test_partition_without_examples(tmp_path):
    draw_partition(np.zeros((3, 2), dtype=int), ("a", "b"), tmp_path / "partition.png")
    assert size_of(tmp_path / "partition.png")


def test_names_must_fit(tmp_path):
    with pytest.raises(ValueError, match="1 class names for 2 classes"):
        draw_partition(np.ones((3, 2)), ("a",), tmp_path / "partition.png")


@pytest.mark.parametrize("with_counts", [False, True])
def test_run(tmp_path, make_round, make_client, with_counts):
    writer = TableWriter(tmp_path)
    writer.write_round(make_round(0, accuracy=0.1), [])
    for round_num in (1, 2, 3):
        used = [
            make_client(one, round_num, num_examples=10 * one + 1, weight=weight, validation_accuracy=0.5)
            for one, weight in ((0, 0.0), (2, 0.25), (5, 0.75))
        ]
        lost = make_client(3, round_num, status="failed", reason="timed out", num_examples=4)
        accuracy = 0.2 * round_num if round_num != 2 else None
        writer.write_round(make_round(round_num, accuracy=accuracy), [*used, lost])
    counts = np.random.default_rng(0).integers(0, 9, (8, 4)) if with_counts else None
    draw_run(tmp_path, tmp_path / "run.png", class_counts=counts)
    assert size_of(tmp_path / "run.png") == (2015, 559)


def test_run_of_which_no_update_was_usable(tmp_path, make_round, make_client):
    TableWriter(tmp_path).write_round(make_round(1), [make_client(0, status="excluded", reason="not finite")])
    draw_run(tmp_path, tmp_path / "run.png", class_counts=np.ones((2, 2)))
    assert size_of(tmp_path / "run.png")


def test_run_that_has_not_begun(tmp_path):
    with pytest.raises(ValueError, match="holds no round"):
        draw_run(tmp_path, tmp_path / "run.png")


def test_no_global_state(tmp_path):
    draw_partition(np.ones((3, 2)), ("a", "b"), tmp_path / "partition.png")
    assert "matplotlib.pyplot" not in sys.modules
