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
from raysim.weighting.base import Report, Scored, Weighting
from raysim.weighting.direction import Direction
from raysim.weighting.feddisco import FedDisco
from raysim.weighting.fedvg import FedVG
from raysim.weighting.guarded import Guarded
from raysim.weighting.mix import Mix

REFERENCE = {
    "gradient": np.array([-1.0, 2.0, 0.5]),
    "loss": np.array(20.0),
    "correct": np.array(3),
    "count": np.array(10),
}
PAIRS = list(itertools.product(ALGORITHMS, WEIGHTINGS))


def federation(pair, objectives=None, **others) -> Federation:
    algorithm, weighting = pair
    return Federation(ALGORITHMS[algorithm](), WEIGHTINGS[weighting](), objectives or clients(), validation(), **others)


def reports_of(weighting: Weighting, count: int, scale: float | None = None) -> list[Report]:
    """Reports of clients that are all different, or, with a scale, of clients that are all alike."""
    rng = np.random.default_rng(count)
    reports = []
    for k in range(count):
        gradient, params = rng.normal(size=3), torch.tensor(rng.normal(size=3))
        if scale is not None:
            gradient, params = scale * np.ones(3), scale * torch.ones(3, dtype=torch.float64)
        sums = {
            "gradient": gradient * 10,
            "loss": np.abs(gradient[0]) * 10,
            "correct": np.array(1 + k % 9),
            "count": np.array(10),
        }
        if scale is not None:
            sums["correct"] = np.array(4)
        model = Scored(params, torch.zeros(3, dtype=torch.float64), LAYOUT, REFERENCE)
        probe = weighting.finish(sums, model) if weighting.needs_probe else None
        counts = np.array([5, 5]) if scale is not None else np.array([10, 7 * k])
        reports.append(Report(k, counts.sum(), 3, 0.5, probe, counts))
    return reports


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_purity_inputs_are_not_changed_and_outputs_repeat(pair):
    run = federation(pair)
    for _ in range(3):
        server, before = run.server, record_checksum(run.server)
        updates, _ = run.train()
        again, _ = run.train()
        assert all(record_checksum(updates[k]) == record_checksum(again[k]) for k in updates)
        run.round()
        assert record_checksum(server) == before


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_has_as_many_vectors_as_the_plan_of_memory_believes(name):
    updates, _ = federation((name, "size")).train()
    vectors = [v for v in vars(updates[0]).values() if isinstance(v, torch.Tensor) and v.shape == (LAYOUT.size,)]
    assert len(vectors) == ALGORITHMS[name].update_vectors


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


def guarded(**fields) -> Weighting:
    return Guarded(of=FedVG(**fields), loss_margin=0.1, chance_margin=0.2, cap=1.5, clip=1.0)


KINDS: dict[str, Weighting] = {
    **{name: kind() for name, kind in WEIGHTINGS.items()},
    **{
        f"fedvg per {granularity}, {norm}, {smoothing}": FedVG(norm=norm, granularity=granularity, smoothing=smoothing)
        for granularity in ("tensor", "module", "block")
        for norm, smoothing in (("l1", "none"), ("l2", "moving_average"), ("spectral", "graph"), ("delta", "none"))
    },
    "fedvg with its options": FedVG(norm="l2", relative_eps=0.1, exponent=0.5, scale_free=True, units="model"),
    "fedvg per tensor with its options": FedVG(
        norm="l2", granularity="tensor", relative_eps=0.1, exponent=2.0, scale_free=True
    ),
    "guarded": guarded(),
    "guarded per tensor": guarded(granularity="tensor"),
    "mix per tensor": Mix(first=FedVG(granularity="tensor"), second=guarded(), share=0.3),
    "guarded mix": Guarded(of=Mix(first=FedVG(granularity="tensor"), second=Direction()), cap=1.1, clip=0.5),
    "feddisco cosine": FedDisco(discrepancy="cosine"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_weights_are_a_simplex_and_follow_a_permutation(kind, count):
    weighting = KINDS[kind]
    reports = reports_of(weighting, count)
    weights = weighting.weights(reports, REFERENCE, LAYOUT)
    assert weights.client.shape == (count,)
    for array in (weights.client, weights.parameters):
        assert (array >= 0).all()
        np.testing.assert_allclose(array.sum(axis=0), 1, atol=1e-12)
    assert (weights.deltas <= weights.parameters + 1e-15).all(), "guards take, they never give"
    order = np.random.default_rng(1).permutation(count)
    permuted = weighting.weights([reports[i] for i in order], REFERENCE, LAYOUT)
    for found, expected in zip(
        (permuted.client, permuted.parameters, permuted.deltas),
        (weights.client, weights.parameters, weights.deltas),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected[order], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_equal_reports_give_equal_weights(kind, scale):
    weighting = KINDS[kind]
    weights = weighting.weights(reports_of(weighting, 4, scale), REFERENCE, LAYOUT)
    np.testing.assert_allclose(weights.client, 0.25, rtol=1e-12)
    np.testing.assert_allclose(weights.parameters, 0.25, rtol=1e-12)
