"""Laws that every algorithm keeps with every weighting. A new member of a registry is covered without a new test."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch

from quadratic import LAYOUT, Federation, Quadratic, clients, validation
from raysim.algorithms import ALGORITHMS
from raysim.state import record_checksum
from raysim.weighting import WEIGHTINGS
from raysim.weighting.base import Probe, Report

PAIRS = list(itertools.product(ALGORITHMS, WEIGHTINGS))


def federation(pair, objectives=None, **others) -> Federation:
    algorithm, weighting = pair
    return Federation(ALGORITHMS[algorithm](), WEIGHTINGS[weighting](), objectives or clients(), validation(), **others)


def reports_of(count: int, scores: list[float] | None = None) -> list[Report]:
    rng = np.random.default_rng(count)
    norms = rng.uniform(0.1, 2, (count, 2)) if scores is None else np.repeat(np.array(scores)[:, None], 2, axis=1)
    return [Report(k, 10 + 7 * k if scores is None else 10, 3, 0.5, Probe(norms[k], 1.0, 5, 10)) for k in range(count)]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_purity_inputs_are_not_changed_and_outputs_repeat(pair):
    run = federation(pair)
    for _ in range(3):
        before = record_checksum(run.server)
        updates, _ = run.train()
        again, _ = run.train()
        assert record_checksum(run.server) == before
        assert all(record_checksum(updates[k]) == record_checksum(again[k]) for k in updates)
        run.round()


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_schedule_any_order_of_the_clients_gives_the_same_bits(pair):
    first, second = federation(pair), federation(pair)
    for _ in range(3):
        assert first.round([0, 1]).tobytes() == second.round([1, 0]).tobytes()
    assert record_checksum(first.server) == record_checksum(second.server)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pickled_and_unpickled_it_goes_on_the_same(pair):
    run = federation(pair)
    run.round()
    other = pickle.loads(pickle.dumps(run))
    assert other.round().tobytes() == run.round().tobytes()


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_type_is_kept(pair, dtype):
    objectives = [Quadratic(c.a.tolist(), c.b.tolist(), c.num_examples, dtype) for c in clients()]
    run = federation(pair, objectives)
    run.validation = Quadratic([1, 1, 2], [1, 0, 1], dtype=dtype)
    run.round()
    assert run.server.params.dtype == dtype


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_finite_on_degenerate_input(pair):
    """Identical clients, a client with one example, validation gradients of exactly zero."""
    same = [Quadratic([1, 1, 1], [1, 0, 1], n) for n in (5, 5, 1)]
    run = federation(pair, same, start=(1.0, 0.0, 1.0))
    for _ in range(3):
        assert np.isfinite(run.round()).all()
    assert np.isfinite(run.weights.client).all()


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_the_first_round_stays_where_all_clients_stay(pair):
    run = federation(pair, [Quadratic([1, 1, 1], [2, 3, 4], n) for n in (3, 9)], start=(2.0, 3.0, 4.0))
    np.testing.assert_allclose(run.round(), [2, 3, 4], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_weights_are_a_simplex_and_follow_a_permutation(name, count):
    weighting = WEIGHTINGS[name]()
    reports = reports_of(count)
    weights = weighting.weights(reports, None, LAYOUT)
    assert weights.client.shape == (count,)
    assert (weights.client >= 0).all()
    assert weights.client.sum() == pytest.approx(1, abs=1e-12)
    order = np.random.default_rng(1).permutation(count)
    permuted = weighting.weights([reports[i] for i in order], None, LAYOUT)
    np.testing.assert_allclose(permuted.client, weights.client[order], rtol=1e-12)


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("score", [0.0, 1e-30, 1.0, 1e30])
def test_equal_reports_give_equal_weights(name, score):
    weights = WEIGHTINGS[name]().weights(reports_of(4, [score] * 4), None, LAYOUT)
    np.testing.assert_allclose(weights.client, 0.25, rtol=1e-12)
