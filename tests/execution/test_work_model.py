"""The units of work on a real network, against loops written out by hand."""

from __future__ import annotations

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
from raysim.preparation import prepare
from raysim.recording.progress import Silent
from raysim.simulation import _check_enough, run_round
from raysim.weighting.base import Probe
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


def test_one_round_is_what_it_says(prepared):
    """Own statistics of each client in its score, buffers by the client weights, counters by the maximum; and it repeats."""
    setup, state = prepared.setup, prepared.initial
    result = run_round(prepared, state, SerialExecutor(setup), Silent())
    weights, expected_floats, counters, deltas = result.weights.client, 0, [], 0
    objective = work.build_objective(setup)
    broadcast = Broadcast.of(1, state.server, state.buffers)
    for k, outcome in enumerate(result.outcomes):
        item = WorkItem(k, k, None, prepared.population.num_examples[k])
        arrays, _, _ = work.train_client(setup, objective, broadcast, item, Packed(None, {}))
        assert arrays["delta"].tobytes() == outcome.update["delta"].tobytes(), "dropout draws the same numbers again"
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
    uniform = np.mean([o.update[work.BUFFER_FLOATS] for o in result.outcomes], axis=0)
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
        _check_enough(prepared, 4, [*ok, bad])
    _check_enough(prepared, 4, [*ok, Outcome(3, 3), bad])
    _check_enough(prepared, 4, ok)
    assert json.dumps(bad.reason)
