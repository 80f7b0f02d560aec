"""The cost model against lines drawn by hand."""

from __future__ import annotations

import pytest

from raysim.execution.cost import CostModel


def model(*seen: tuple[float, float]) -> CostModel:
    cost = CostModel()
    for examples, seconds in seen:
        cost.add(examples, seconds)
    return cost


def test_before_anything_is_measured_more_examples_cost_more():
    assert model().costs([3, 1, 2]) == [3.0, 1.0, 2.0]
    assert model((5, 1.0), (5, 3.0)).costs([3, 1]) == [3.0, 1.0], "no line through one size"


@pytest.mark.parametrize(
    ("seen", "line"),
    [
        ([(10, 3.0), (20, 5.0)], (1.0, 0.2)),
        ([(0, 1.0), (10, 1.0), (20, 4.0)], (0.5, 0.15)),  # Means 10 and 2; 30 / 200.
        ([(10, 1.0), (20, 3.0)], (0.0, 2.0 / 15.0)),  # The line would begin at -1.
    ],
)
def test_the_line_is_that_of_least_squares_and_never_below_zero(seen, line):
    cost = model(*seen)
    assert cost.line == pytest.approx(line)
    assert cost.costs([0, 100]) == pytest.approx([line[0], line[0] + 100 * line[1]])


def test_a_slope_below_zero_is_noise():
    assert model((10, 2.0), (20, 1.0)).costs([5, 7]) == [5.0, 7.0]


def test_old_measurements_are_forgotten():
    cost = CostModel(memory=2)
    for examples, seconds in [(1, 100.0), (10, 3.0), (20, 5.0)]:
        cost.add(examples, seconds)
    assert cost.line == pytest.approx((1.0, 0.2))
