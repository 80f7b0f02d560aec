from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysim.algorithms.base import Coefficients
from raysim.errors import ConfigError
from raysim.execution.faults import Fault
from raysim.execution.settings import gpu_share
from raysim.execution.work import _first_nonfinite, sum_updates
from raysim.vector import Unit, VectorLayout


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40, unique=True), st.integers(0, 2**31))
def test_sums_are_grouped_by_position_and_match_a_plain_sum(positions, seed):
    positions = sorted(positions)
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(len(positions), 5)).astype(np.float32)
    factors = rng.uniform(0, 1, len(positions))
    loaded = []

    def load(i):
        loaded.append(i)
        return {"delta": vectors[i]}

    total = sum_updates(positions, load, {"delta": Coefficients(factors)})["delta"]
    assert loaded == list(range(len(positions))), "each update is read once, in order"
    assert total.dtype == np.float64
    np.testing.assert_allclose(total, factors @ vectors.astype(np.float64), rtol=1e-9, atol=1e-12)
    expected = None
    for group in range(0, 61, 16):
        members = [i for i, position in enumerate(positions) if group <= position < group + 16]
        if members:
            partial = np.zeros(5)
            for i in members:
                partial += vectors[i].astype(np.float64) * factors[i]
            expected = partial if expected is None else expected + partial
    assert np.array_equal(total, expected), "the exact bits of 16 positions at a time"


def test_skipped_members_do_not_move_the_others_to_another_group():
    """17 clients of which the first is excluded: 15 + 1, not 16."""
    vectors = np.random.default_rng(0).normal(size=(17, 1000)).astype(np.float32)
    factors = np.full(16, 1 / 3)
    total = sum_updates(range(1, 17), lambda i: {"d": vectors[i + 1]}, {"d": Coefficients(factors)})["d"]
    first = sum_updates(range(1, 16), lambda i: {"d": vectors[i + 1]}, {"d": Coefficients(factors)})["d"]
    assert np.array_equal(total, first + vectors[16].astype(np.float64) * (1 / 3))


def test_unit_coefficients_and_several_fields_in_one_pass():
    units = (Unit("a", (slice(0, 1), slice(2, 3))), Unit("b", (slice(1, 2),)))
    data = [{"x": np.array([1, 2, 3.0]), "y": np.array([10.0])}, {"x": np.array([4, 5, 6.0]), "y": np.array([20.0])}]
    sums = sum_updates(
        [0, 1],
        lambda i: data[i],
        {"x": Coefficients(np.array([[1, 0], [0, 2.0]]), units), "y": Coefficients(np.array([0.5, 0.5]))},
    )
    assert sums["x"].tolist() == [1, 10, 3]
    assert sums["y"].tolist() == [15]


@pytest.mark.parametrize(
    ("values", "found"), [((1.0, 2.0), None), ((1.0, np.nan), "sensitivity"), ((np.inf,), "sensitivity"), ((), None)]
)
def test_a_tuple_of_numbers_is_checked_too(values, found):
    assert _first_nonfinite({}, {}, {"loss": 1.0, "sensitivity": values}, VectorLayout((), ())) == found


@pytest.mark.parametrize(
    ("text", "share"), [("auto", None), (0, 0), (2, 2), (0.25, "1/4"), ("1/3", "1/3"), (0.3333, "1/3")]
)
def test_gpu_shares(text, share):
    assert str(gpu_share(text)) == str(share)


@pytest.mark.parametrize("value", [0.3, 0.667, 1.5, -1, "x", "1/0", 1e-9])
def test_impossible_gpu_shares(value):
    with pytest.raises(ValueError, match="auto, a whole number or 1/k"):
        gpu_share(value)


def test_faults_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=kill,client=3,round=2; kind=sleep,seconds=1.5,stage=score,attempt=1")
    assert Fault.from_environment() == (
        Fault("kill", 3, 2),
        Fault("sleep", None, None, "score", 1, 1.5),
    )
    for bad in ("kind=explode", "client=3", "kind=kill,client=x", "kill"):
        monkeypatch.setenv("RAYSIM_FAULT", bad)
        with pytest.raises(ConfigError, match="RAYSIM_FAULT"):
            Fault.from_environment()
