"""Guards: hand-checked numbers, and what each of them stops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quadratic import LAYOUT, Federation, Quadratic, assert_example, clients, validation
from raysim.algorithms import ALGORITHMS
from raysim.algorithms.fedavg import FedAvg
from raysim.local import LocalTraining, OptimizerSettings
from raysim.state import record_checksum
from raysim.vector import VectorLayout
from raysim.weighting.base import Probe, Report, Scored
from raysim.weighting.fedvg import FedVG
from raysim.weighting.guarded import Guarded, clip_factors, water_filled
from raysim.weighting.mix import Mix
from raysim.weighting.size import Size

ONE = VectorLayout(("w",), ((1,),))


def reports(scores, losses=None, lengths=None) -> list[Report]:
    found = []
    for k, score in enumerate(scores):
        inner = Probe(np.atleast_1d(np.array(score, float)), np.mean(score), losses[k] if losses else 1.0, 5, 10)
        parts = (inner,) if lengths is None else (inner, Probe(np.array([lengths[k]], float)))
        probe = Probe(inner.values, inner.score, inner.loss, 5, 10, parts)
        found.append(Report(k, 10 + k, 1, 0.0, probe, np.array([5, 5])))
    return found


def test_all_guards_off_change_nothing():
    weights, plain = Guarded().weights(reports([2, 4, 4]), None, ONE), FedVG().weights(reports([2, 4, 4]), None, ONE)
    np.testing.assert_array_equal(weights.client, plain.client)
    assert weights.factors is None
    assert weights.rejected == {}
    assert Guarded(of=Size()).needs_probe is False


def test_cap_by_hand():
    assert_example(water_filled(np.array([0.9, 0.07, 0.03]), 1.5), "guard.cap(0.5) of [.9,.07,.03]")
    weights = Guarded(cap=1.5).weights(reports([1 / 0.9, 1 / 0.07, 1 / 0.03]), None, ONE)
    np.testing.assert_allclose(weights.client, [0.5, 0.35, 0.15], rtol=1e-7)


def test_a_cap_gives_nothing_to_clients_without_weight():
    """Direction gives an update that points uphill weight 0, and so does the cap."""
    np.testing.assert_array_equal(water_filled(np.array([0.9, 0.1, 0, 0]), 1.5), [0.75, 0.25, 0, 0])
    np.testing.assert_array_equal(water_filled(np.array([1.0, 0.0]), 1.5), [1, 0])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(1, 5))
def test_cap_keeps_the_simplex_and_the_order(values, cap):
    weights = np.array(values)
    weights = weights / weights.sum() if weights.sum() > 1e-9 else np.full(len(values), 1 / len(values))
    limit = cap / (weights > 0).sum()
    capped = water_filled(weights, cap)
    assert capped.sum() == pytest.approx(1, abs=1e-9)
    assert (capped >= 0).all()
    assert (capped <= limit * (1 + 1e-9)).all()
    below = capped < limit * (1 - 1e-9)
    assert (capped[below] >= weights[below] * (1 - 1e-9)).all(), "nobody below the cap loses"


def test_units_are_capped_column_by_column():
    inner = FedVG(granularity="tensor", eps=0.0)
    layout = VectorLayout(("a", "b"), ((1,), (1,)))
    weights = Guarded(of=inner, cap=1.5).weights(reports([[1, 9], [9, 9], [9, 1]]), None, layout)
    np.testing.assert_allclose(weights.unit, [[0.5, 0.25], [0.25, 0.25], [0.25, 0.5]], rtol=1e-12)


def test_loss_gate_against_the_global_model():
    reference = {"loss": np.array(20.0), "correct": np.array(1), "count": np.array(10)}
    guarded = Guarded(loss_margin=0.5)
    weights = guarded.weights(reports([1, 1, 0.1], losses=[1.9, 2.5, 2.6]), reference, ONE)
    np.testing.assert_allclose(weights.client, [0.5, 0.5, 0], rtol=1e-12)
    assert weights.rejected == {2: "validation loss 2.6 above the gate's 2.5"}
    assert (guarded.reference_needs, Guarded(chance_margin=0.1).reference_needs) == ("losses", "nothing")
    kept = weights.of([0, 1])
    np.testing.assert_array_equal(kept.client, [0.5, 0.5])


def test_loss_gate_against_chance():
    """A dead model predicts nothing: its loss is log 2 with two classes, its gradient almost 0."""
    dead = np.log(2)
    given_ = reports([1e-9, 1, 1], losses=[dead, 0.5, 0.6])
    assert (
        FedVG().weights([Report(r.client_id, 1, 1, 0.0, r.probe.parts[0]) for r in given_], None, ONE).client[0] > 0.9
    )
    weights = Guarded(chance_margin=0.05).weights(given_, None, ONE)
    np.testing.assert_allclose(weights.client, [0, 0.5, 0.5], rtol=1e-7)


def test_both_gates_are_the_stricter_of_the_two():
    reference = {"loss": np.array(20.0), "correct": np.array(1), "count": np.array(10)}
    weights = Guarded(loss_margin=0.5, chance_margin=0.05).weights(reports([1, 1], losses=[0.5, 1.0]), reference, ONE)
    assert weights.rejected == {1: "validation loss 1 above the gate's 0.6585"}


def test_who_is_rejected_does_not_shape_the_weights_of_the_others():
    """eps: 0 gives a vanishing norm everything, a relative eps follows the median: both are taken among those that pass."""
    losses = [0.0, 0.0, 9.0, 9.0, 9.0]
    reference = {"loss": np.array(10.0), "correct": np.array(1), "count": np.array(10)}
    for inner, others in ((FedVG(eps=0.0), [0, 0, 0]), (FedVG(relative_eps=0.1), [1e6] * 3)):
        weights = Guarded(of=inner, loss_margin=1.0).weights(reports([1, 3, *others], losses=losses), reference, ONE)
        alone = inner.weights([Report(k, 1, 1, 0.0, Probe(np.array([s]))) for k, s in enumerate((1.0, 3.0))], None, ONE)
        np.testing.assert_allclose(weights.client, [*alone.client, 0, 0, 0], rtol=1e-12)
        assert weights.notes == ()


def test_everybody_stopped_is_size_and_said():
    reference = {"loss": np.array(1.0), "correct": np.array(1), "count": np.array(10)}
    weights = Guarded(loss_margin=0.0, cap=2.0).weights(reports([1, 2], losses=[3.0, 4.0]), reference, ONE)
    np.testing.assert_allclose(weights.client, [10 / 21, 11 / 21], rtol=1e-12)
    assert weights.notes[-1].endswith("the gate stops every client: weights by size")
    assert weights.rejected == {}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_stopped_attacker_moves_no_algorithm(name):
    """The model, the server's state and every later round are those of a federation without it."""
    guard = Guarded(of=Size(), loss_margin=5.0)
    honest = clients()
    attacker = Quadratic([1e4, 1e4, 1e4], [9, 9, 9], 50)
    training = LocalTraining(local_epochs=2, batch_size=None, optimizer=OptimizerSettings(lr=0.01))
    with_it = Federation(ALGORITHMS[name](), guard, [*honest, attacker], validation(), training)
    without = Federation(ALGORITHMS[name](), guard, honest, validation(), training, num_clients=3)
    without.population = with_it.population
    without.server = with_it.server
    for _ in range(3):
        with_it.round()
        without.round([0, 1])
        assert record_checksum(with_it.server) == record_checksum(without.server)
        assert 2 not in with_it.states


def test_clip_shortens_long_updates_only_and_says_so():
    np.testing.assert_allclose(clip_factors(np.array([1, 2, 10, 0.0]), 2.0), [1, 1, 0.3, 1])
    np.testing.assert_array_equal(clip_factors(np.array([0, 0, 5.0]), 2.0), [1, 1, 1])
    weights = Guarded(of=Size(), clip=2.0).weights(reports([1, 1, 1], lengths=[1, 2, 40]), None, ONE)
    np.testing.assert_allclose(weights.deltas, weights.client * [1, 1, 0.1], rtol=1e-12)
    assert weights.client.sum() == pytest.approx(1), "buffers are averaged with whole weights"
    assert weights.notes == ("updates shortened: client 2 to 0.1 of their length",)


def test_an_outer_guard_keeps_what_an_inner_one_clipped():
    inner = Guarded(of=Size(), clip=1.0)
    given_ = [replace(r, probe=Probe(parts=(r.probe,))) for r in reports([1, 1, 1], lengths=[1, 1, 100])]
    weights = Guarded(of=inner, cap=3.0).weights(given_, None, ONE)
    np.testing.assert_allclose(weights.factors, [1, 1, 0.01])
    given_ = [replace(r, probe=Probe(parts=(r.probe.parts[0], None))) for r in given_]
    mixed = Mix(first=inner, second=Size(), share=0.5).weights(given_, None, ONE)
    np.testing.assert_allclose(mixed.deltas, mixed.client * [1, 1, 0.505], rtol=1e-12)


def test_a_clipped_average_by_hand():
    """Deltas of the shared problem: lengths 1.1064 and 0.4190 have median 0.7627; client 0 is shortened to 0.3814."""
    plain = Federation(FedAvg(), Size(), clients(), validation())
    deltas = [update.delta.numpy() for update in plain.train()[0].values()]
    run = Federation(FedAvg(), Guarded(of=Size(), clip=0.5), clients(), validation())
    lengths = np.array([np.linalg.norm(delta) for delta in deltas])
    factors = np.minimum(1, 0.5 * np.median(lengths) / lengths)
    expected = np.array([1, -2, 0.5]) + 0.75 * factors[0] * deltas[0] + 0.25 * factors[1] * deltas[1]
    np.testing.assert_allclose(run.round(), expected, rtol=1e-12)


def test_guards_and_mixes_nest():
    inner = Mix(first=FedVG(), second=Size())
    guarded = Guarded(of=inner, cap=1.2, clip=1.0, chance_margin=0.1)
    assert guarded.needs == "gradient"
    model = Scored(torch.tensor([3.0, 4.0, 0.0]), torch.zeros(3), LAYOUT)
    sums = {"gradient": np.ones(3), "loss": np.array(1.0), "correct": np.array(1), "count": np.array(2)}
    probe = guarded.finish(sums, model)
    assert probe.parts[-1].values[0] == 5
    assert probe.parts[0].parts[0].values.tolist() == [1.0, 0.5]
    weights = guarded.weights(
        [Report(k, n, 1, 0.0, probe, np.array([1, 1])) for k, n in enumerate((9, 1))], None, LAYOUT
    )
    np.testing.assert_allclose(weights.client, [0.6, 0.4], rtol=1e-12)
