from __future__ import annotations

import pytest

from raysim.report import comparison


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
