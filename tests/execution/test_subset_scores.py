"""Scores on part of the validation set, more images until the weights settle, and scores that are kept: whole rounds."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from raysim import verdict
from raysim.config import resolve
from raysim.errors import RunError
from raysim.execution import work
from raysim.execution.base import Broadcast, Packed, WorkItem
from raysim.execution.serial import SerialExecutor
from raysim.objective import ModelObjective
from raysim.preparation import prepare
from raysim.recording.progress import Silent
from raysim.simulation import run, run_round
from raysim.state import record_checksum
from raysim.subset import SubsetSettings, total_variation
from raysim.weighting.base import KeptProbe, Probe, ScoringSettings
from raysim.weighting.direction import Direction
from raysim.weighting.fedvg import FedVG
from raysim.weighting.guarded import Guarded
from raysim.weighting.loss import Loss
from raysim.weighting.mix import Mix

SIZE = 144
"""Validation images of the digits."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six clients that train a little on digits with a network without BatchNorm, scored exactly."""
    return prepare(
        resolve(
            {
                "model": {"name": "mlp"},
                "rounds": 4,
                "client": {"per_round": 6, "local_epochs": 1, "batch_size": 100, "optimizer": {"lr": 0.3}},
                "partition": {"clients": 6, "alpha": 0.3},
                "weighting": {"name": "fedvg"},
                "scoring": {"batch_size": 72},
                "execution": {"backend": "serial"},
                "output": {"dir": str(tmp_path_factory.mktemp("runs")), "tensorboard": False},
            }
        )
    )


def scored(prepared, weighting=None, **scoring):
    setup = prepared.setup
    setup = replace(setup, scoring=replace(setup.scoring, **scoring), weighting=weighting or setup.weighting)
    return replace(prepared, setup=setup)


def rounds_of(prepared, count=1, state=None):
    """The results of some rounds, one after the other."""
    executor, state, results = SerialExecutor(prepared.setup), state or prepared.initial, []
    for _ in range(count):
        results.append(run_round(prepared, state, executor, Silent()))
        state = results[-1].state
    return results


def weights(result) -> np.ndarray:
    return result.weights.parameters


def subset(images, settle=None) -> SubsetSettings:
    return SubsetSettings(images, settle)


WEIGHTINGS = {
    "fedvg": FedVG(),
    "tensors": FedVG(granularity="tensor", norm="l2"),
    "last block": FedVG(scope="last_block"),
    "loss": Loss(),
    "direction": Direction(),
    "mix": Mix(first=FedVG(), second=Loss()),
    "guarded": Guarded(of=Mix(first=Loss(), second=FedVG(norm="l2")), loss_margin=5.0, clip=1.0),
}


@pytest.mark.parametrize("weighting", WEIGHTINGS.values(), ids=WEIGHTINGS.keys())
def test_all_images_give_the_exact_weights(whole, weighting):
    (exact,) = rounds_of(scored(whole, weighting))
    (found,) = rounds_of(scored(whole, weighting, subset=subset(SIZE)))
    np.testing.assert_allclose(weights(found), weights(exact), rtol=1e-4)
    assert (exact.weight_error, exact.scored_images) == (None, SIZE)
    assert (found.weight_error, found.scored_images) == (0.0, SIZE)


@pytest.mark.parametrize("weighting", WEIGHTINGS.values(), ids=WEIGHTINGS.keys())
def test_the_estimate_is_that_of_the_two_halves(whole, weighting):
    """Each half scored alone, as if it were all there is."""
    prepared = scored(whole, weighting, subset=subset(48))
    (found,) = rounds_of(prepared)
    assert found.scored_images == 48
    halves = work.scoring_shards(prepared.setup, 1)
    alone = []
    for half in halves:
        assert sum(map(len, half)) == 24
        (result,) = rounds_of(replace(prepared, setup=replace(scored(whole, weighting).setup, scoring_shards=(half,))))
        alone.append(weights(result))
    expected = 0.5 * total_variation(*alone) * np.sqrt(1 - 48 / SIZE)
    assert expected > 0
    assert found.weight_error == pytest.approx(expected, rel=1e-4)


def test_both_the_error_and_its_estimate_fall_with_the_images(whole):
    exact = [weights(result) for result in rounds_of(whole, 4)]
    real, predicted = [], []
    for images in (8, 32, 128):
        prepared, states = scored(whole, subset=subset(images)), [whole.initial]
        states += [result.state for result in rounds_of(whole, 3)]
        found = [rounds_of(prepared, 1, state)[0] for state in states]  # The same models, scored on less.
        real.append(np.mean([total_variation(weights(f), e) for f, e in zip(found, exact, strict=True)]))
        predicted.append(np.mean([f.weight_error for f in found]))
    assert real[0] > real[1] > real[2]
    assert predicted[0] > predicted[1] > predicted[2]
    assert 1 / 3 < predicted[1] / real[1] < 3


def test_the_images_are_the_same_for_all_clients_and_others_in_the_next_round(whole):
    setup = scored(whole, subset=subset(20)).setup

    def images(round_num: int, level: int = 0) -> set[int]:
        return {i for shard in work.scoring_shards(setup, round_num, level) for batch in shard for i in batch.tolist()}

    assert images(1) == images(1) != images(2)
    assert images(1) != {
        i for shard in work.scoring_shards(replace(setup, seed=1), 1) for b in shard for i in b.tolist()
    }
    assert len(images(1)) == 20
    assert work.scoring_shards(whole.setup, 1) is whole.setup.scoring_shards
    growing = replace(setup, scoring=replace(setup.scoring, subset=subset(20, 0.1)))
    assert {i for b in work.scoring_shards(growing, 1)[0] for i in b.tolist()} <= images(1), (
        "settling changes no first level"
    )


def test_a_round_repeats_and_clients_permute(whole):
    """Serial twice; and the estimate is one of the cohort as a set."""
    prepared = scored(whole, subset=subset(32))
    first, again = rounds_of(prepared)[0], rounds_of(prepared)[0]
    assert record_checksum(first.state.server) == record_checksum(again.state.server)
    assert first.weight_error == again.weight_error
    order = [3, 0, 5, 1, 4, 2]
    reports = [o.report(prepared.class_counts[o.client_id]) for o in first.outcomes]
    layout = prepared.population.layout
    for half in (0, 1):
        straight, mixed = (
            prepared.setup.weighting.weights([reports[i].of_half(half) for i in rows], None, layout).client
            for rows in (range(6), order)
        )
        np.testing.assert_allclose(mixed, straight[order], rtol=1e-12)


def test_weightings_without_images_have_no_error(whole):
    (result,) = rounds_of(scored(whole, FedVG(norm="delta"), subset=subset(8)))
    assert (result.weight_error, result.scored_images) == (None, None)


# ---- until the weights settle ----


def probed(prepared, state, client, **given):
    setup, objective = prepared.setup, work.build_objective(prepared.setup)
    broadcast = Broadcast.of(1, state.server, state.buffers)
    item = WorkItem(client, client, None, prepared.population.num_examples[client])
    arrays, _, _ = work.train_client(setup, objective, broadcast, item, Packed(None, {}))
    return arrays, work.probe_client(setup, objective, broadcast, arrays, None, client_id=client, **given)


def test_levels_add_up_to_scoring_all_of_their_images_at_once(whole):
    prepared = scored(whole, subset=subset(20, 0.01))
    arrays, (_, _, sums) = probed(prepared, whole.initial, 2)
    for level in (1, 2):
        _, (probe, _, sums) = probed(prepared, whole.initial, 2, level=level, sums=sums)
    assert sums["count"] == probe.count == 80
    assert [half.count for half in probe.halves] == [40, 40]
    _, (again, _, same) = probed(prepared, whole.initial, 2, level=2)
    assert np.array_equal(same["gradient"], sums["gradient"]), "with the kept sums or without, the same bits"
    assert np.array_equal(again.halves[1].values, probe.halves[1].values)
    images = np.concatenate(
        [b for level in range(3) for shard in work.scoring_shards(prepared.setup, 1, level) for b in shard]
    )
    assert len(set(images.tolist())) == 80
    objective: ModelObjective = work.build_objective(prepared.setup)
    objective.load(
        whole.initial.server.params + torch.from_numpy(arrays["delta"]),
        work.Buffers(torch.from_numpy(arrays[work.BUFFER_FLOATS]), torch.from_numpy(arrays[work.BUFFER_INTS])),
    )
    objective.grad.zero_()
    with objective.scoring("batch"):
        objective.add_gradient(objective.take(images))
    np.testing.assert_allclose(sums["gradient"], objective.grad.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("weighting", [FedVG(), Direction()], ids=["fedvg", "direction"])
def test_doubling_stops_when_the_weights_have_settled(whole, weighting):
    (exact,) = rounds_of(scored(whole, weighting))
    (fixed,) = rounds_of(scored(whole, weighting, subset=subset(16)))
    (easy,) = rounds_of(scored(whole, weighting, subset=subset(16, 0.9)))
    assert easy.scored_images == 16
    np.testing.assert_array_equal(weights(easy), weights(fixed))
    (never,) = rounds_of(scored(whole, weighting, subset=subset(16, 1e-9)))
    assert (never.scored_images, never.weight_error) == (SIZE, 0.0)
    np.testing.assert_allclose(weights(never), weights(exact), rtol=1e-4)
    assert all(outcome.sums is None for outcome in never.outcomes), "released with the verdict"


def test_it_stops_at_the_first_level_that_moved_the_weights_by_less(whole, monkeypatch):
    verdicts = []
    weigh = verdict.weigh
    monkeypatch.setattr(verdict, "weigh", lambda *given: verdicts.append(weigh(*given)) or verdicts[-1])
    rounds_of(scored(whole, subset=subset(16, 1e-9)))
    totals, moved = [v.scored_images for v in verdicts], [v.movement for v in verdicts]
    assert totals == [16, 32, 64, 128, SIZE]
    for level in range(1, 5):
        one, other = (verdicts[i].weights.client for i in (level - 1, level))
        assert moved[level] == pytest.approx(total_variation(one, other), rel=1e-9)
    for settle in sorted(moved)[1:]:
        expected = next(total for total, movement in zip(totals, moved, strict=True) if movement < settle)
        (found,) = rounds_of(scored(whole, subset=subset(16, settle)))
        assert found.scored_images == expected


def test_a_probe_that_is_not_finite_any_more_excludes_the_client(whole, monkeypatch):
    prepared = scored(whole, subset=subset(16, 1e-9))
    original = work.probe_client

    def probe(setup, objective, broadcast, arrays, reference, *, client_id, level=0, **given):
        found, *rest = original(
            setup, objective, broadcast, arrays, reference, client_id=client_id, level=level, **given
        )
        return replace(found, loss=np.nan) if (client_id, level) == (3, 1) else found, *rest

    monkeypatch.setattr("raysim.execution.serial.probe_client", probe)
    (result,) = rounds_of(prepared)
    assert [o.status for o in result.outcomes] == ["ok"] * 3 + ["excluded"] + ["ok"] * 2
    assert len(weights(result)) == 5
    execution = replace(prepared.config.execution, on_nonfinite="abort")
    with pytest.raises(RunError, match="round 1: client 3: non-finite validation gradient or loss"):
        rounds_of(replace(prepared, config=replace(prepared.config, execution=execution)))


def test_recalibrated_statistics_are_those_of_the_first_images(whole, monkeypatch):
    """Sums of all levels are taken at one and the same model."""
    seen = []

    def recalibrate(self, batches):
        seen.append(sorted(i for batch in batches for i in batch.labels.tolist()))

    monkeypatch.setattr(ModelObjective, "recalibrate", recalibrate)
    prepared = scored(whole, subset=subset(16, 1e-9), batch_norm="recalibrate")
    rounds_of(prepared)
    assert len(seen) == 6 * 5
    assert all(labels == seen[0] for labels in seen)
    assert len(seen[0]) == 16


# ---- kept scores ----


def ages(result) -> list[int | None]:
    return [outcome.score_age for outcome in result.outcomes]


def test_scores_are_kept_until_they_are_old(whole):
    first, second, third, fourth = rounds_of(scored(whole, rescore_every=3), 4)
    assert [set(ages(r)) for r in (first, second, third, fourth)] == [{0}, {1}, {2}, {0}]
    np.testing.assert_array_equal(weights(first), weights(third))
    assert not np.array_equal(weights(first), weights(fourth))
    assert [r.scored_images for r in (first, second, fourth)] == [SIZE, None, SIZE]
    assert second.outcomes[0].score_seconds is None
    assert {kept.round_num for kept in third.state.probes.values()} == {1}
    assert {kept.round_num for kept in fourth.state.probes.values()} == {4}


def test_scoring_every_round_keeps_nothing(whole):
    assert all(not r.state.probes and set(ages(r)) == {0} for r in rounds_of(whole, 2))


def test_weightings_without_probes_have_none_to_keep(whole):
    from raysim.weighting.size import Size

    plain, kept = (rounds_of(scored(whole, Size(), rescore_every=r), 2)[-1] for r in (1, 3))
    assert record_checksum(plain.state.server) == record_checksum(kept.state.server)
    assert not kept.state.probes
    assert set(ages(kept)) == {None}


def test_a_client_without_a_part_in_a_round_keeps_its_probe_and_an_excluded_one_gives_none(whole, monkeypatch):
    monkeypatch.setattr(
        "raysim.simulation.sample_cohort", lambda seed, round_num, *_: [0, 1] if round_num == 1 else [1, 2]
    )
    faults = work.strike
    monkeypatch.setattr(
        work,
        "strike",
        lambda f, stage, client, *rest: (
            {"nan"} if client == 2 and stage == "train" else faults(f, stage, client, *rest)
        ),
    )
    first, second = rounds_of(scored(whole, rescore_every=5), 2)
    assert set(first.state.probes) == set(second.state.probes) == {0, 1}
    assert ages(second) == [1, None]


def plain_probes(probes):
    return {str(client): kept.as_plain() for client, kept in probes.items()}


def probes_from(plain):
    return {int(client): KeptProbe.from_plain(kept) for client, kept in plain.items()}


def test_kept_probes_go_through_json_bit_for_bit(whole):
    weighting = WEIGHTINGS["mix"]
    prepared = scored(whole, weighting, subset=subset(16), rescore_every=3)
    first, second, third = rounds_of(prepared, 3)
    text = json.dumps(plain_probes(first.state.probes))
    probes = probes_from(json.loads(text))
    assert json.dumps(plain_probes(probes)) == text
    assert (
        probes[2].probe.halves[1].parts[0].values.tobytes()
        == first.state.probes[2].probe.halves[1].parts[0].values.tobytes()
    )
    resumed = rounds_of(prepared, 2, replace(first.state, probes=probes))
    for one, other in zip((second, third), resumed, strict=True):
        assert record_checksum(one.state.server) == record_checksum(other.state.server)
        assert one.weight_error == other.weight_error
    sparse = {7: KeptProbe(3, Probe(parts=(None, Probe(score=0.1)), count=2**40))}
    assert probes_from(json.loads(json.dumps(plain_probes(sparse))))[7].probe.parts[0] is None


# ---- whole runs ----


def test_the_tables_say_what_was_scored_and_how_wrong_it_may_be(whole):
    config = whole.config
    scoring = ScoringSettings(batch_size=32, subset=subset(24), rescore_every=2)
    record = run(replace(config, name="subset", rounds=3, scoring=scoring))
    assert record.rounds["scored_images"].to_pylist() == [24, None, 24]
    errors = record.rounds["weight_error"].to_pylist()
    assert errors[1] == errors[0], "of the weights, whose scores are kept"
    assert all(0 < error < 0.5 for error in errors)
    rows = record.clients.to_pylist()
    assert [row["score_age"] for row in rows] == [0] * 6 + [1] * 6 + [0] * 6
    assert all(row["score"] > 0 for row in rows), "a kept score is shown too"
    from raysim.recording.checkpoint import read_latest

    found = probes_from(read_latest(record.folder).info["probes"])
    assert {k: kept.round_num for k, kept in found.items()} == dict.fromkeys(range(6), 3)
    assert found[0].probe.score == rows[12]["score"]

    exact = run(replace(config, name="exact", rounds=1))
    assert exact.rounds["scored_images"].to_pylist() == [SIZE]
    assert exact.rounds["weight_error"].to_pylist() == [None]
    settled = run(replace(config, name="settled", rounds=1, scoring=ScoringSettings(subset=subset(8, 1e-9))))
    assert settled.rounds["scored_images"].to_pylist() == [SIZE]
    assert settled.rounds["score_tail_s"].to_pylist()[0] > 0
