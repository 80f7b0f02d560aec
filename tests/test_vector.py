from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysim.vector import VectorLayout, add_scaled, checksum, first_nonfinite

RESNET = VectorLayout(
    (
        "conv1.weight",
        "bn1.weight",
        "layer1.0.conv1.weight",
        "layer1.1.conv1.weight",
        "layer2.0.conv1.weight",
        "fc.weight",
        "fc.bias",
    ),
    ((2, 1), (2,), (3,), (4,), (5,), (2, 3), (2,)),
)


def test_slices_follow_the_order_and_cover_everything():
    assert [(s.start, s.stop) for s in RESNET.slices] == [(0, 2), (2, 4), (4, 7), (7, 11), (11, 16), (16, 22), (22, 24)]
    assert RESNET.size == 24
    vector = torch.arange(24.0)
    assert RESNET.view(vector, "fc.weight").tolist() == [[16, 17, 18], [19, 20, 21]]
    assert RESNET.tensor_at(6) == "layer1.0.conv1.weight"
    assert RESNET.tensor_at(7) == "layer1.1.conv1.weight"
    assert VectorLayout((), ()).size == 0


@pytest.mark.parametrize(
    ("granularity", "names"),
    [
        ("tensor", list(RESNET.names)),
        ("module", ["conv1", "bn1", "layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1", "fc"]),
        ("block", ["base", "layer1", "layer2", "classifier"]),
    ],
)
def test_units_of_a_resnet(granularity, names):
    units = RESNET.units(granularity)
    assert [unit.name for unit in units] == names
    covered = sorted(i for unit in units for part in unit.slices for i in range(part.start, part.stop))
    assert covered == list(range(24)), "every scalar is in exactly one unit"


def test_units_of_other_families():
    def blocks(*names):
        return [unit.name for unit in VectorLayout(names, ((1,),) * len(names)).units("block")]

    assert blocks("conv1.weight", "conv1.bias", "fc1.weight", "classifier.bias") == ["conv1", "fc1", "classifier"]
    assert blocks(
        "cls_token", "patch_embed.proj.weight", "blocks.0.a.weight", "blocks.10.a.weight", "norm.weight", "head.weight"
    ) == [
        "base",
        "blocks.0",
        "blocks.10",
        "classifier",
    ]
    assert blocks("class_token", "encoder.layers.encoder_layer_3.mlp.0.weight", "heads.head.weight") == [
        "base",
        "encoder.layers.encoder_layer_3",
        "classifier",
    ]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), st.floats(-10, 10), st.integers(1, 7))
def test_add_scaled_is_plain_float64_whatever_the_chunk(values, factor, chunk):
    vector = np.array(values, dtype=np.float32)
    total = np.linspace(-1, 1, len(values))
    expected = (total + vector.astype(np.float64) * factor) + vector[::-1].astype(np.float64) * 0.5
    add_scaled(total, [vector, vector[::-1]], [factor, 0.5], chunk=chunk)
    assert np.array_equal(total, expected)


def test_first_nonfinite():
    vector = np.zeros(100, dtype=np.float32)
    assert first_nonfinite(vector) is None
    vector[40] = np.inf
    vector[41] = -np.inf
    assert first_nonfinite(vector) == 40
    vector[7] = np.nan
    assert first_nonfinite(vector) == 7
    assert first_nonfinite(np.full(10, 3e38, dtype=np.float32)) is None, "a large sum is no infinity"
    assert first_nonfinite(np.full(10, 1.7e308)) is None, "an overflowing sum is no infinity"


def test_checksum_sees_bits_types_and_shapes():
    zeros = np.zeros(4, dtype=np.float32)
    others = [np.zeros(5, dtype=np.float32), np.zeros(2, dtype=np.float64), zeros.reshape(2, 2), -zeros]
    assert checksum(zeros) == checksum(zeros.copy())
    assert len({checksum(zeros), *(checksum(other) for other in others)}) == 5
