"""Which images a subset has, and what its bounds and its estimate of the error promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysim.config import resolve
from raysim.errors import ConfigError
from raysim.preparation import prepare
from raysim.subset import (
    SubsetSettings,
    aggregate_error_bound,
    gradient_error_bound,
    images_for,
    subset_shards,
    total_variation,
    weight_error,
    weight_ratio_bounds,
)
from raysim.vector import VectorLayout
from raysim.weighting.base import Probe, Report
from raysim.weighting.fedvg import FedVG

SCORES = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12)


def inverse(scores) -> np.ndarray:
    reports = [Report(k, 1, 1, 0.0, Probe(np.array([score]))) for k, score in enumerate(scores)]
    return FedVG(eps=0.0).weights(reports, None, VectorLayout(("w",), ((1,),))).client


# ---- bounds ----


def test_a_tenth_of_error_by_hand():
    assert weight_ratio_bounds(0.1) == pytest.approx((9 / 11, 11 / 9))
    assert weight_ratio_bounds(0.0) == (1, 1)
    with pytest.raises(ValueError, match=r"rho should be in \[0, 1\), got 1"):
        weight_ratio_bounds(1)


@given(SCORES, st.floats(0, 0.9), st.integers(0, 2**32))
def test_scores_within_rho_keep_the_ratios_of_weights_inside(scores, rho, seed):
    off = 1 + rho * np.random.default_rng(seed).choice([-1, 1, 0.3], len(scores))
    exact, found = inverse(scores), inverse(np.array(scores) * off)
    low, high = weight_ratio_bounds(rho)
    assert (found / exact >= low - 1e-9).all()
    assert (found / exact <= high + 1e-9).all()
    lengths = np.random.default_rng(seed).uniform(0, 1, len(scores))
    moved = (np.abs(found - exact) * lengths).sum()  # If no two deltas cancel.
    assert moved <= aggregate_error_bound(rho, exact, lengths) + 1e-9


def test_both_bounds_are_met_by_two_clients():
    """One score too large and one too small by a tenth, the second of vanishing weight or of all of it."""
    low, high = weight_ratio_bounds(0.1)
    big = 1e9
    found = inverse([0.9, 1.1 * big]) / inverse([1, big]), inverse([1.1, 0.9 * big]) / inverse([1, big])
    assert found[0][1] == pytest.approx(low, rel=1e-6)
    assert found[1][1] == pytest.approx(high, rel=1e-6)


@given(st.floats(0.1, 100), st.floats(0.01, 0.9), st.floats(0.01, 10), st.integers(1, 100), st.floats(0.001, 0.5))
def test_so_many_images_are_enough_and_half_of_them_are_not(bound, rho, norm, clients, delta):
    images = images_for(bound, rho, norm, clients, delta)
    assert gradient_error_bound(bound, images, delta / clients) <= rho * norm * (1 + 1e-9)
    if images > 1:
        assert gradient_error_bound(bound, images - 1, delta / clients) > rho * norm * (1 - 1e-9)


def test_images_by_hand():
    """(1 / (0.1 x 1))^2 (1 + sqrt(2 ln(e^2 / 1)))^2 = 100 x 9."""
    assert images_for(1.0, 0.1, 1.0, 1, float(np.exp(-2))) in (900, 901)


def test_gradients_of_a_subset_stay_within_their_bound():
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(200, 5))
    gradients /= np.linalg.norm(gradients, axis=1).max()
    errors = [
        np.linalg.norm(gradients[rng.choice(200, 20, replace=False)].mean(axis=0) - gradients.mean(axis=0))
        for _ in range(300)
    ]
    assert np.mean(np.array(errors) > gradient_error_bound(1.0, 20, 0.1)) <= 0.1


# ---- the estimate ----


def test_the_estimate_by_hand():
    first, second = np.array([0.5, 0.5]), np.array([0.7, 0.3])
    assert total_variation(first, second) == pytest.approx(0.2)
    assert weight_error(first, second, (2, 2), 16) == pytest.approx(0.5 * 0.2 * np.sqrt(0.75))
    assert weight_error(first, second, (4, 12), 16) == 0.0
    assert weight_error(first, second, (3, 1), 16) == pytest.approx(np.sqrt(3) / 4 * 0.2 * np.sqrt(0.75))
    units = np.stack([first, second], axis=1), np.stack([second, second], axis=1)
    assert total_variation(*units) == pytest.approx(0.1), "the mean over two units, of which one agrees"
    assert total_variation(units[0], second) == total_variation(second, units[0]) == pytest.approx(0.1)


@pytest.mark.parametrize(("a", "b"), [(10, 10), (20, 10), (24, 25)])
def test_parts_without_replacement_predict_the_error_of_a_mean(a, b):
    """For a mean its square is right on average: E(mean of m - mean of N)^2 from (mean of a - mean of b)^2."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=50)
    real, predicted = [], []
    for _ in range(4000):
        chosen = rng.permutation(values)[: a + b]
        real.append((chosen.mean() - values.mean()) ** 2)
        pair = [np.array([part.mean(), 0.0]) for part in (chosen[:a], chosen[a:])]
        predicted.append((2 * weight_error(*pair, (a, b), 50)) ** 2)
    assert np.mean(predicted) == pytest.approx(np.mean(real), rel=0.06)


# ---- images ----


@pytest.mark.parametrize(
    ("images", "settle", "size", "totals"),
    [
        (10, None, 100, [10]),
        (10, 0.1, 100, [10, 20, 40, 80, 100]),
        (10, 0.1, 40, [10, 20, 40]),
        (10, 0.1, 41, [10, 20, 41]),
        (10, 0.1, 11, [10]),
        (10, 0.1, 10, [10]),
    ],
)
def test_totals(images, settle, size, totals):
    assert SubsetSettings(images, settle).totals(size) == totals


@given(st.integers(4, 60), st.integers(0, 100), st.integers(0, 2**32))
def test_levels_are_disjoint_and_none_is_a_single_image(images, more, seed):
    settings, size = SubsetSettings(images, 0.01), images + more
    labels = np.random.default_rng(seed).integers(0, 5, size)
    totals = settings.totals(size)
    assert totals[-1] >= size - 1
    seen = []
    for level, total in enumerate(totals):
        shards = subset_shards(labels, settings, 8, level, np.random.default_rng(seed))
        sizes = [sum(map(len, shard)) for shard in shards]
        assert sizes == list(settings.parts(size, 0)) if level == 0 else sizes == [settings.parts(size, level)[1]]
        assert all(len(batch) > 1 for shard in shards for batch in shard)
        seen += [batch for shard in shards for batch in shard]
        flat = np.concatenate(seen)
        assert len(set(flat.tolist())) == len(flat) == total


def test_halves_have_the_class_mix_of_the_whole():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    first, second = subset_shards(labels, SubsetSettings(100), 16, 0, np.random.default_rng(0))
    for half in (first, second):
        assert np.abs(np.bincount(labels[np.concatenate(half)]) - [30, 15, 5]).max() <= 1
        assert all(np.abs(np.bincount(labels[batch])[0] - 9.6) < 2 for batch in half[:-1])


# ---- configuration ----


def config(**scoring):
    return resolve(
        {
            "model": {"name": "mlp"},
            "client": {"per_round": 4},
            "partition": {"clients": 8, "alpha": 0.5},
            "weighting": {"name": "fedvg"},
            "execution": {"backend": "serial"},
            "scoring": scoring,
        }
    )


@pytest.mark.parametrize(
    ("scoring", "text"),
    [
        ({"subset": {"image": 8}}, r"scoring\.subset\.image: unknown key; did you mean scoring\.subset\.images\?"),
        ({"subset": {"images": 3}}, r"scoring\.subset\.images: .*greater than or equal to 4, got 3"),
        ({"subset": {"images": 8, "settle": 1.5}}, r"scoring\.subset\.settle: .*less than 1, got 1\.5"),
        ({"subset": {"images": 8}, "shards": 2}, r"scoring\.shards: 2 should be 1 with scoring\.subset"),
        ({"subset": {"images": 8, "settle": 0.1}, "rescore_every": 2}, r"scoring\.rescore_every: 2 should be 1"),
        ({"rescore_every": 0}, r"scoring\.rescore_every: .*greater than or equal to 1, got 0"),
        ({"subset": 8}, r"scoring\.subset: .*got 8"),
    ],
)
def test_what_cannot_be(scoring, text):
    with pytest.raises(ConfigError, match=text):
        config(**scoring)


def test_more_images_than_there_are():
    with pytest.raises(
        ConfigError, match=r"scoring\.subset\.images: 145, but the validation set has 144; give 4 to 144"
    ):
        prepare(config(subset={"images": 145}))
    assert prepare(config(subset={"images": 144}))


def test_old_lengths_of_updates_clip_nothing():
    values = config(rescore_every=2).as_dict() | {"weighting": {"name": "guarded", "clip": 2.0}}
    with pytest.raises(ConfigError, match=r"scoring\.rescore_every: 2 keeps lengths of earlier updates"):
        resolve(values)


def test_the_demand_knows_what_is_cheaper():
    exact = prepare(config()).demand.scoring_ratio
    assert prepare(config(subset={"images": 36})).demand.scoring_ratio == pytest.approx(exact * 36 / 144)
    # Half of the clients take part: scored once, then one of two rounds kept.
    assert prepare(config(rescore_every=3)).demand.scoring_ratio == pytest.approx(exact / 2)
    for scope in ("last_block", "last_module"):
        narrow = resolve(config().as_dict() | {"weighting": {"name": "fedvg", "scope": scope}})
        assert prepare(narrow).demand.scoring_ratio == pytest.approx(exact / 3)


def test_a_subset_reads_back():
    given = config(subset={"images": 36, "settle": 0.02}, batch_size=32)
    assert resolve(given.as_dict()) == given
