from __future__ import annotations

import pytest

from raysim.report import comparison
from raysim.report.statistics import smallest_p


def values(*differences: float, conditions: int = 1) -> dict[str, dict[tuple[str, int], float]]:
    places = [(f"c{i % conditions}", i // conditions) for i in range(len(differences))]
    return {"a": {p: 0.5 + d for p, d in zip(places, differences, strict=True)}, "b": dict.fromkeys(places, 0.5)}


def test_a_comparison_by_hand():
    """Differences 1, 2, 3, 4, 5, -6 hundredths: W+ = 15, W- = 6, r = 9 / 21; 14 of 64 sums of ranks are at most 6."""
    found = comparison.compare("a", "b", values(0.01, 0.02, 0.03, 0.04, 0.05, -0.06))
    assert (found.wins, found.losses, len(found.pairs)) == (5, 1, 6)
    assert found.mean.value == pytest.approx(0.015)
    assert found.test.effect == pytest.approx(9 / 21)
    assert found.p == pytest.approx(2 * 14 / 64)


def test_pairs_are_those_that_both_have():
    given = values(0.1, 0.1, 0.1)
    del given["a"]["c0", 1]
    assert comparison.compare("a", "b", given).pairs == (("c0", 0), ("c0", 2))
    assert comparison.compare("a", "b", {"a": {}, "b": {}}).refused == "no pair of the same condition and seed"


@pytest.mark.parametrize(("n", "refused"), [(5, True), (6, False)])
def test_no_p_where_none_could_be_small(n, refused):
    found = comparison.compare("a", "b", values(*[0.1 + i / 100 for i in range(n)]))
    assert (found.p is None) is refused
    assert found.test.p == smallest_p(n)


def test_power_in_words():
    def words(n: int, conditions: int = 1, m: int = 1) -> str:
        return " ".join(
            comparison.power_words([comparison.compare("a", "b", values(*[0.1] * n, conditions=conditions))] * m)
        )

    assert "Too few pairs for a test: with 5 pairs" in words(5)
    assert "2^(1-5) = 0.0625" in words(5)
    # Seven pairs and six comparisons: 6 / 64 = 0.094.
    assert "No p can survive the correction: with 7 pairs" in words(7, m=6)
    assert "times 6 comparisons 0.0938" in words(7, m=6)
    assert "at least 8 pairs" in words(7, m=6)
    assert "can survive the correction if all" in words(8, m=6)
    assert "not independent" not in words(8)
    assert "4 seeds under 2 conditions" in words(8, conditions=2)
    assert "not independent" in words(8, conditions=2)
