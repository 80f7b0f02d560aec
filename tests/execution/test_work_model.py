"""The units of work on a real network, against loops written out by hand."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raysim.config import load_config
from raysim.errors import RunError
from raysim.execution import work
from raysim.execution.base import Broadcast, Outcome, Packed, TrainReport, WorkItem
from raysim.execution.serial import SerialExecutor
from raysim.fusion.finetune import Finetune, FinetuneTraining
from raysim.local import OptimizerSettings, Schedule, local_sgd
from raysim.preparation import prepare
from raysim.recording.progress import Silent
from raysim.seeding import Purpose, rng_for, torch_seeded_from
from raysim.simulation import run_round
from raysim.state import ServerState
from raysim.verdict import check_enough
from raysim.weighting.base import Probe
from raysim.weighting.direction import Direction
from raysim.weighting.fedvg import FedVG
from runs import QUICKSTART, SIX_CLIENTS, settings


class Dropped(nn.Module):
    """BatchNorm and dropout, small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 5, stride=3)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """The quickstart with six clients and a model with BatchNorm and dropout, scored with running statistics."""

    def build(model, spec, rng):
        with work.torch_seeded_from(rng):
            return Dropped()

    monkeypatch.setattr("raysim.preparation.build_model", build)
    monkeypatch.setattr(work, "build_model", build)
    overrides = settings(
        tmp_path, "h", *SIX_CLIENTS, "scoring.batch_norm=running", "scoring.batch_size=64", backend="serial"
    )
    return prepare(load_config(QUICKSTART, overrides))


class Keeping(SerialExecutor):
    """Keeps what the clients sent."""

    def run_cohort(self, *args):
        outcomes, *others = super().run_cohort(*args)
        self.updates = {outcome.client_id: outcome.update for outcome in outcomes}
        return outcomes, *others


def test_one_round_is_what_it_says(prepared):
    """Own statistics of each client in its score, buffers by the client weights, counters by the maximum; and it repeats."""
    setup, state = prepared.setup, prepared.initial
    executor = Keeping(setup)
    result = run_round(prepared, state, executor, Silent())
    assert all(outcome.update is None for outcome in result.outcomes), "nothing of a round outlives it"
    weights, expected_floats, counters, deltas = result.weights.client, 0, [], 0
    objective = work.build_objective(setup)
    broadcast = Broadcast.of(1, state.server, state.buffers)
    for k, outcome in enumerate(result.outcomes):
        item = WorkItem(k, k, None, prepared.population.num_examples[k])
        arrays, _, _ = work.train_client(setup, objective, broadcast, item, Packed(None, {}))
        assert arrays["delta"].tobytes() == executor.updates[k]["delta"].tobytes(), (
            "dropout draws the same numbers again"
        )
        floats, ints = arrays[work.BUFFER_FLOATS], arrays[work.BUFFER_INTS]
        expected_floats = expected_floats + weights[k] * floats.astype(np.float64)
        deltas = deltas + weights[k] * arrays["delta"].astype(np.float64)
        counters.append(int(ints[0]))
        model = Dropped().eval()
        objective.load(
            state.server.params + torch.from_numpy(arrays["delta"]),
            work.Buffers(torch.from_numpy(floats), torch.from_numpy(ints)),
        )
        model.load_state_dict(objective.module.state_dict())
        images = torch.from_numpy(setup.validation.images).float() / 255
        loss = F.cross_entropy(model(images), torch.from_numpy(setup.validation.labels))
        loss.backward()
        assert outcome.probe.loss == pytest.approx(loss.item(), rel=1e-5)
        norms = [p.grad.abs().double().sum().item() for p in model.parameters()]
        np.testing.assert_allclose(outcome.probe.values, norms, rtol=1e-3)
    np.testing.assert_allclose(result.state.buffers.floats, expected_floats, rtol=1e-6)
    assert result.state.buffers.ints.tolist() == [max(counters)]
    assert len(set(counters)) > 1
    np.testing.assert_allclose(
        result.state.server.params, state.server.params.double() + torch.from_numpy(deltas), rtol=1e-5, atol=1e-7
    )
    uniform = np.mean([update[work.BUFFER_FLOATS] for update in executor.updates.values()], axis=0)
    assert np.abs(uniform - result.state.buffers.floats.numpy()).max() > 1e-5, (
        "the check can tell weights from their absence"
    )


def test_scoring_mode_is_the_one_asked_for(prepared):
    result = run_round(prepared, prepared.initial, SerialExecutor(prepared.setup), Silent())
    other = replace(
        prepared, setup=replace(prepared.setup, scoring=replace(prepared.setup.scoring, batch_norm="batch"))
    )
    batch = run_round(other, prepared.initial, SerialExecutor(other.setup), Silent())
    assert result.outcomes[0].probe.score != batch.outcomes[0].probe.score


def report(**fields) -> TrainReport:
    given = {
        "scalars": {"num_examples": 5, "num_steps": 3, "loss": 0.5},
        "buffer_ints": np.zeros(1, np.int64),
        **fields,
    }
    return TrainReport(**{"nonfinite": None, "state_checksum": None, "seconds": 0.1, **given})


def test_outcomes_are_taken_out_for_the_right_reasons():
    def checked(**fields):
        outcome = Outcome(3, 0, update="u", train=report(**fields))
        outcome.check_update()
        return outcome.status, outcome.reason, outcome.update

    assert checked() == ("ok", None, "u")
    assert checked(nonfinite="fc.bias") == ("excluded", "non-finite update (fc.bias)", None)
    steps = {"num_examples": 1, "num_steps": 0, "loss": 0.0}
    assert checked(scalars=steps) == ("skipped", "took no step: too few examples for a batch", None)
    for norms, loss in (([np.nan], 1.0), ([np.inf], 1.0), ([1.0], np.inf)):
        outcome = Outcome(3, 0, train=report(), probe=Probe(np.array(norms), loss=loss, correct=1, count=2))
        outcome.check_probe()
        assert (outcome.status, outcome.reason) == ("excluded", "non-finite validation gradient or loss")
    inside = Outcome(3, 0, train=report(), probe=Probe(loss=1.0, parts=(None, Probe(np.array([np.nan])))))
    inside.check_probe()
    assert inside.status == "excluded", "a part of a combination counts as well"


def test_a_client_draws_anew_in_every_round(prepared):
    setup, state = prepared.setup, prepared.initial
    objective, item = work.build_objective(setup), WorkItem(0, 0, None, prepared.population.num_examples[0])
    deltas = [
        work.train_client(setup, objective, Broadcast.of(number, state.server, state.buffers), item, Packed(None, {}))[
            0
        ]
        for number in (1, 2)
    ]
    assert deltas[0]["delta"].tobytes() != deltas[1]["delta"].tobytes()


def moved(prepared) -> Broadcast:
    """A later global model: other parameters, other statistics."""
    state = prepared.initial
    floats = state.buffers.floats + 0.3
    return Broadcast.of(2, ServerState(state.server.params * 1.1), work.Buffers(floats, state.buffers.ints))


@pytest.mark.parametrize("mode", ["batch", "running", "recalibrate"])
def test_reference_and_probe_are_taken_at_their_own_models(prepared, mode):
    """The reference at the round's global model, the probe at the client's, each with its own statistics."""
    setup = replace(prepared.setup, weighting=Direction(), scoring=replace(prepared.setup.scoring, batch_norm=mode))
    objective, broadcast = work.build_objective(setup), moved(prepared)

    def by_hand(params, buffers) -> np.ndarray:
        own = work.build_objective(setup)
        own.load(params, buffers)
        batches = [own.take(indices) for shard in setup.scoring_shards for indices in shard]
        if mode == "recalibrate":
            with work.torch_settings(setup, own.device):
                own.recalibrate(batches)
        own.grad.zero_()
        with work.torch_settings(setup, own.device), own.scoring(mode):
            for batch in batches:
                own.add_gradient(batch)
        return own.grad.double().numpy()

    server, buffers = broadcast.server.unpack(), broadcast.buffers.unpack()
    found = work.reference_at(setup, objective, broadcast)
    np.testing.assert_array_equal(found.total["gradient"], by_hand(server.params, buffers))
    arrays = {"delta": 0.01 * np.ones(objective.layout.size, np.float32)}
    arrays |= {work.BUFFER_FLOATS: buffers.floats.numpy() + np.float32(0.2), work.BUFFER_INTS: buffers.ints.numpy()}
    probe, *_ = work.probe_client(setup, objective, broadcast, arrays, found, client_id=0)
    downhill = -found.total["gradient"]
    cosine = downhill.sum() / np.sqrt(np.square(downhill).sum() * len(downhill))
    assert probe.values[0] == pytest.approx(cosine, rel=1e-3), "the angle with the reference that was handed over"
    setup = replace(setup, weighting=FedVG())
    probe, *_ = work.probe_client(setup, objective, broadcast, arrays, None, client_id=0)
    own = work.Buffers(torch.from_numpy(arrays[work.BUFFER_FLOATS]), buffers.ints)
    gradient = by_hand(server.params + torch.from_numpy(arrays["delta"]), own) / len(setup.validation)
    norms = [np.abs(gradient[part]).sum() for part in objective.layout.slices]
    np.testing.assert_allclose(probe.values, norms, rtol=1e-6)


def test_the_global_model_is_tested_with_its_own_statistics(prepared):
    setup, state = prepared.setup, prepared.initial
    packed = Packed.of(state.server), Packed.of(state.buffers)
    fresh = work.evaluate_shard(setup, work.build_objective(setup), *packed, 0)
    used = work.build_objective(setup)
    used.load(state.server.params + 1, work.Buffers(state.buffers.floats + 5, state.buffers.ints + 5))
    again = work.evaluate_shard(setup, used, *packed, 0)
    for a, b in zip(dataclasses.astuple(fresh), dataclasses.astuple(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_fusion_trains_the_merged_model_on_the_validation_set(prepared):
    """Against the same training by hand: merged parameters and averaged statistics, training mode, the round's rate."""
    schedule = Schedule(name="step", factor=0.5)
    training = FinetuneTraining(batch_size=32, optimizer=OptimizerSettings(lr=0.1, schedule=schedule))
    setup = replace(prepared.setup, fusion=Finetune(training=training))
    broadcast, state = moved(prepared), prepared.initial
    merged, buffers = (
        ServerState(state.server.params * 0.9),
        work.Buffers(state.buffers.floats + 0.1, state.buffers.ints + 4),
    )
    used = work.build_objective(setup)
    fused = work.fuse_models(setup, used, broadcast, Packed.of(merged), Packed.of(buffers), np.ones(1), ())
    own = work.build_objective(setup).on(setup.validation)
    own.load(merged.params, buffers)
    rng = rng_for(setup.seed, Purpose.FUSION, round_num=2)
    halved = replace(training, optimizer=OptimizerSettings(lr=0.05))
    with work.torch_settings(setup, own.device), torch_seeded_from(rng), own.training():
        local = local_sgd(own, merged.params, halved, rng)
    np.testing.assert_array_equal(fused.params, local.params.numpy())
    np.testing.assert_array_equal(fused.buffers.arrays["floats"], own.buffers.floats.numpy())
    assert int(fused.buffers.arrays["ints"][0]) > int(buffers.ints[0]), "statistics were refreshed"


@pytest.mark.parametrize(
    ("update", "state", "scalars", "found"),
    [
        ({"delta": [0, 0, 0]}, {}, {"loss": 1.0}, None),
        ({"delta": [0, 0, np.inf]}, {}, {}, "B"),
        ({"delta": [0, 0, 0], "buffers.floats": [np.nan]}, {}, {}, "buffers.floats"),
        ({"delta": [0, 0, 0]}, {"control": [np.nan]}, {}, "client state control"),
        ({"delta": [0, 0, 0]}, {}, {"num_steps": 3, "loss": np.inf}, "loss"),
    ],
)
def test_everything_that_comes_back_is_checked(update, state, scalars, found):
    from quadratic import LAYOUT

    arrays = [{name: np.array(values, dtype=np.float64) for name, values in part.items()} for part in (update, state)]
    assert work._first_nonfinite(*arrays, scalars, LAYOUT) == found


def test_too_few_usable_clients_end_the_run(tmp_path):
    config = load_config(QUICKSTART, settings(tmp_path, "m", "execution.min_clients=3"))
    prepared = type("P", (), {"config": config})()
    ok = [Outcome(k, k) for k in range(2)]
    bad = Outcome(2, 2)
    bad.drop("failed", "train: boom")
    with pytest.raises(
        RunError, match=r"round 4: 2 usable updates, execution.min_clients is 3; failed: 1 x train: boom"
    ):
        check_enough(prepared, 4, [*ok, bad])
    check_enough(prepared, 4, [*ok, Outcome(3, 3), bad])
    check_enough(prepared, 4, ok)
    assert json.dumps(bad.reason)


def test_each_part_of_a_round_computes_in_its_precision(prepared):
    """Against float32: local training, scoring and the reference in bfloat16 are close; fusion and tests are untouched."""
    broadcast, state = moved(prepared), prepared.initial
    item = WorkItem(0, 0, None, prepared.population.num_examples[0])

    def parts(client: str, scoring: str):
        setup = replace(
            prepared.setup,
            client_precision=client,
            scoring=replace(prepared.setup.scoring, precision=scoring),
            weighting=FedVG(),
            fusion=Finetune(training=FinetuneTraining(batch_size=32)),
        )
        objective = work.build_objective(setup)
        arrays, _, report = work.train_client(setup, objective, broadcast, item, Packed(None, {}))
        assert {array.dtype for name, array in arrays.items() if name != work.BUFFER_INTS} == {np.dtype(np.float32)}
        assert report.gpu_memory is None
        fixed = {
            "delta": np.full(objective.layout.size, 0.01, np.float32),
            work.BUFFER_FLOATS: state.buffers.floats.numpy(),
            work.BUFFER_INTS: state.buffers.ints.numpy(),
        }
        probe, *_ = work.probe_client(setup, objective, broadcast, fixed, None, client_id=0)
        ((both, _), _) = work.probe_clients(setup, objective, broadcast, [fixed, fixed], None, (0, 1))
        merged = Packed.of(state.server), Packed.of(state.buffers)
        fused = work.fuse_models(setup, objective, broadcast, *merged, np.ones(1), ())
        tested = work.evaluate_shard(setup, objective, *merged, 0)
        reference = work.reference_at(replace(setup, weighting=Direction()), objective, broadcast).total["gradient"]
        return arrays["delta"], probe.values, both.values, reference, fused.params, tested.loss

    plain = parts("float32", "float32")
    for changed, precisions in (({0}, ("bfloat16", "float32")), ({1, 2, 3}, ("float32", "bfloat16"))):
        found = parts(*precisions)
        for i, (one, other) in enumerate(zip(plain, found, strict=True)):
            assert np.array_equal(one, other) == (i not in changed)
            assert np.linalg.norm(other - one) <= 0.05 * np.linalg.norm(one)


@pytest.mark.parametrize(("precision", "tf32"), [("float32", False), ("tf32", True), ("bfloat16", False)])
def test_tf32_is_on_inside_only_and_only_if_asked_for(prepared, precision, tf32):
    """The switches exist without a GPU."""
    setup = replace(prepared.setup, deterministic=False)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    with work.torch_settings(setup, torch.device("cuda"), precision):
        assert (matmul.allow_tf32, cudnn.allow_tf32) == (tf32, tf32)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before
    with work.torch_settings(setup, torch.device("cpu"), precision):
        assert (matmul.allow_tf32, cudnn.allow_tf32) == before
