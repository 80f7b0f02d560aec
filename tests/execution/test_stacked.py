"""Scoring several clients' models in one call, against the loop over models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from raysim.config import resolve
from raysim.data.arrays import ImageSet
from raysim.errors import ConfigError, RunError
from raysim.execution import work
from raysim.execution.base import Broadcast, Packed
from raysim.models import build_model
from raysim.models.base import InputSpec, ModelSettings
from raysim.objective import ModelObjective, stacked_sums
from raysim.preparation import Prepared, prepare
from raysim.seeding import torch_seeded_from
from raysim.state import Arrays, Buffers
from raysim.weighting import WEIGHTINGS
from raysim.weighting.base import Weighting
from raysim.weighting.fedvg import FedVG

GRAY = InputSpec(channels=1, height=28, width=28, num_classes=10)


class Residual(nn.Module):
    """Two residual blocks with BatchNorm, and dropout before the head.

    Smooth, because an input of ReLU that is next to zero may change its sign by rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(24, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def lenet5(rng: np.random.Generator) -> nn.Module:
    return build_model(ModelSettings("lenet5"), GRAY, rng)


def frozen(rng: np.random.Generator) -> nn.Module:
    """Its first convolution and the BatchNorm after it are not trained."""
    model = lenet5(rng)
    for parameter in (*model.conv1.parameters(), *model.bn1.parameters()):
        parameter.requires_grad_(False)
    return model


def residual(rng: np.random.Generator) -> nn.Module:
    with torch_seeded_from(rng):
        return Residual()


MODELS = {"lenet5": lenet5, "frozen": frozen, "residual": residual}


@pytest.fixture(params=MODELS)
def prepared(request, monkeypatch) -> Prepared:
    """180 validation images in batches of 50, two shards."""

    def build(model, spec, rng):
        return MODELS[request.param](rng)

    monkeypatch.setattr("raysim.preparation.build_model", build)
    monkeypatch.setattr(work, "build_model", build)
    return prepare(configured())


def configured(**sections):
    values = {
        "data": {"image_size": 28},
        "partition": {"clients": 6},
        "scoring": {"batch_size": 50, "shards": 2},
        "weighting": {"name": "fedvg"},
    }
    return resolve(values | sections)


def updates_of(prepared: Prepared, count: int) -> list[Arrays]:
    """Updates and statistics that differ from client to client."""
    rng, state = np.random.default_rng(5), prepared.initial
    floats, ints = state.buffers.floats.numpy(), state.buffers.ints.numpy()
    return [
        {
            "delta": rng.normal(0, 0.02, len(state.server.params)).astype(np.float32),
            work.BUFFER_FLOATS: floats + rng.uniform(0, 0.3, len(floats)).astype(np.float32),
            work.BUFFER_INTS: ints + client_id,
        }
        for client_id in range(count)
    ]


@pytest.mark.parametrize("weighting", ["fedvg", "loss"])
@pytest.mark.parametrize("mode", ["batch", "running", "recalibrate"])
def test_probes_are_those_of_the_loop(prepared, mode, weighting):
    setup = replace(
        prepared.setup,
        scoring=replace(prepared.setup.scoring, batch_norm=mode),
        weighting=WEIGHTINGS[weighting](),
    )
    objective, state = work.build_objective(setup), prepared.initial
    broadcast = Broadcast.of(1, state.server, state.buffers)
    updates = updates_of(prepared, 3)
    one_by_one = [
        work.probe_client(setup, objective, broadcast, arrays, None, client_id=i)[0] for i, arrays in enumerate(updates)
    ]
    before = {name: tensor.clone() for name, tensor in objective.module.state_dict().items()}
    found = work.probe_clients(setup, objective, broadcast, updates, None, range(3))
    for name, tensor in objective.module.state_dict().items():
        assert mode == "recalibrate" or torch.equal(tensor, before[name]), name
    for (probe, seconds), expected in zip(found, one_by_one, strict=True):
        # A bias before batch statistics has no gradient but rounding.
        noise = 1e-6 * expected.values.max(initial=0.0)
        np.testing.assert_allclose(probe.values, expected.values, rtol=1e-5, atol=noise)
        assert probe.loss == pytest.approx(expected.loss, rel=1e-5)
        assert probe.score == pytest.approx(expected.score, rel=1e-5)
        assert (probe.correct, probe.count) == (expected.correct, expected.count)
        assert seconds > 0
    assert len({probe.loss for probe, _ in found}) == 3, "the check can tell one client from another"


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_gradients_are_those_of_the_loop(prepared, mode):
    objective, state = work.build_objective(prepared.setup), prepared.initial
    updates = updates_of(prepared, 3)
    params = torch.stack([state.server.params + torch.from_numpy(arrays["delta"]) for arrays in updates])
    floats, ints = (
        torch.stack([torch.from_numpy(a[name]) for a in updates]) for name in (work.BUFFER_FLOATS, work.BUFFER_INTS)
    )
    batches = [objective.take(np.arange(60)), objective.take(np.arange(60, 100))]
    with objective.scoring(mode):
        grads, sums = stacked_sums(objective, params, Buffers(floats, ints), batches, gradient=True)
        _, losses = stacked_sums(objective, params, Buffers(floats, ints), batches, gradient=False)
    assert (sums.loss.dtype, sums.correct.dtype, sums.count) == (torch.float64, torch.int64, 100)
    torch.testing.assert_close(losses.loss, sums.loss, rtol=1e-6, atol=0)
    for i in range(3):
        objective.load(params[i], Buffers(floats[i], ints[i]))
        objective.grad.zero_()
        with objective.scoring(mode):
            loss = sum(objective.add_gradient(batch).loss.item() for batch in batches)
        assert sums.loss[i].item() == pytest.approx(loss, rel=1e-5)
        off = (grads[i] - objective.grad).norm() / objective.grad.norm()
        assert off < 1e-5


@pytest.mark.filterwarnings("ignore:There is a performance drop because")
def test_a_vision_transformer_agrees_too():
    spec = InputSpec(3, 160, 160, 10)
    rng = np.random.default_rng(0)
    model = build_model(ModelSettings("timm:test_vit"), spec, rng)
    images = rng.integers(0, 256, (4, 3, 160, 160), dtype=np.uint8)
    objective = ModelObjective(model, ImageSet(images, rng.integers(0, 10, 4)))
    params = torch.stack([objective.params + 0.01 * i for i in range(2)])
    buffers = Buffers(objective.buffers.floats.repeat(2, 1), objective.buffers.ints.repeat(2, 1))
    with objective.scoring("batch"):
        batch = objective.take(np.arange(4))
        grads, _ = stacked_sums(objective, params, buffers, [batch], gradient=True)
        for i in range(2):
            objective.params.copy_(params[i])
            objective.grad.zero_()
            objective.add_gradient(batch)
            assert (grads[i] - objective.grad).norm() / objective.grad.norm() < 1e-5


def test_a_parameter_that_is_not_used_has_a_gradient_of_zero(images):
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(784, 10), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x.flatten(1))

    objective = ModelObjective(Unused(), images)
    grads = stack_twice(objective)
    used = 784 * 10 + 10
    assert grads[:, :used].abs().sum() > 0
    assert (grads[:, used:] == 0).all()
    assert grads.shape == (2, objective.layout.size)


def stack_twice(objective: ModelObjective) -> torch.Tensor:
    buffers = Buffers(objective.buffers.floats.repeat(2, 1), objective.buffers.ints.repeat(2, 1))
    with objective.scoring("batch"):
        batches = [objective.take(np.arange(8))]
        grads, _ = stacked_sums(objective, objective.params.repeat(2, 1), buffers, batches, gradient=True)
    return grads


class Deciding(nn.Module):
    """What it computes depends on what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(784, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x.flatten(1))
        return logits if logits.sum() > 0 else -logits


def test_a_network_that_cannot_be_vectorised_is_refused(images, monkeypatch):
    refusal = (
        r"execution.clients_per_call: the network cannot compute several models in one call, use 1: vmap: .*control"
    )
    with pytest.raises(RunError, match=refusal):
        stack_twice(ModelObjective(Deciding(), images))
    monkeypatch.setattr("raysim.preparation.build_model", lambda model, spec, rng: Deciding())
    with pytest.raises(ConfigError, match=refusal):
        prepare(configured(execution={"clients_per_call": 4}))
    prepare(configured())


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"execution": {"clients_per_call": 4}}, "results repeat to about 1e-5 only"),
        ({"execution": {"clients_per_call": 4, "backend": "serial"}}, "no effect with execution.backend: serial"),
        ({"execution": {"clients_per_call": 4}, "weighting": {"name": "size"}}, "no effect with weighting.name: size"),
        ({}, None),
    ],
)
def test_what_it_means_is_noted(sections, said):
    notes = [note for note in prepare(configured(model={"name": "mlp"}, **sections)).notes if "per_call" in note]
    assert len(notes) == (said is not None)
    assert all(said in note for note in notes)


def test_a_model_that_is_not_finite_harms_no_other(prepared):
    setup, state = prepared.setup, prepared.initial
    objective, broadcast = work.build_objective(setup), Broadcast.of(1, state.server, state.buffers)
    updates = updates_of(prepared, 3)
    alone = work.probe_clients(setup, objective, broadcast, updates[:2], None, range(2))
    updates[2]["delta"][:] = np.nan
    *others, (broken, _) = work.probe_clients(setup, objective, broadcast, updates, None, range(3))
    assert not broken.finite
    for (probe, _), (expected, _) in zip(others, alone, strict=True):
        assert probe.score == pytest.approx(expected.score, rel=1e-5)


@dataclass(frozen=True)
class Counting(Weighting):
    """Gathers a sum of its own."""

    name: Literal["counting"] = "counting"

    @property
    def needs(self):
        return "losses"

    def accumulate(self, objective, shard):
        batches = list(shard)
        with torch.no_grad():
            loss = float(sum(objective.losses(batch).loss for batch in batches))
        return {"loss": np.array(loss), "correct": np.array(0), "count": np.array(sum(len(b.labels) for b in batches))}

    def weights(self, reports, reference, layout):
        raise NotImplementedError


def test_what_is_scored_one_by_one_has_the_bits_of_the_loop(monkeypatch):
    """A weighting with sums of its own, one that looks at vectors only, and a model that is alone."""
    prepared = prepare(configured(model={"name": "mlp"}))
    monkeypatch.setattr(work, "stacked_sums", lambda *args, **kwargs: pytest.fail("stacked"))
    broadcast = Broadcast(1, Packed.of(prepared.initial.server), Packed.of(prepared.initial.buffers))
    updates = updates_of(prepared, 2)
    for weighting, count in ((Counting(), 2), (FedVG(norm="delta"), 2), (FedVG(), 1)):
        setup = replace(prepared.setup, weighting=weighting)
        objective = work.build_objective(setup)
        found = work.probe_clients(setup, objective, broadcast, updates[:count], None, range(count))
        for client_id, (probe, _) in enumerate(found):
            own, *_ = work.probe_client(setup, objective, broadcast, updates[client_id], None, client_id=client_id)
            assert (probe.loss, probe.values.tolist()) == (own.loss, own.values.tolist())


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_scorer_scores_several_at_once():
    import ray

    from raysim.execution.ray_actors import WorkActor

    prepared = prepare(configured(model={"name": "mlp"}))
    setup, state = prepared.setup, prepared.initial
    broadcast = Broadcast.of(1, state.server, state.buffers)
    updates = updates_of(prepared, 3)
    actor = WorkActor.options(num_cpus=0.1).remote(setup, "scorer-0")
    found = ray.get(
        actor.score_many.remote((0, 1, 2), 1, ray.put(broadcast), None, *map(ray.put, updates)), timeout=120
    )
    ray.kill(actor)
    objective = work.build_objective(setup)
    for client_id, (probe, seconds) in enumerate(found):
        own, *_ = work.probe_client(setup, objective, broadcast, updates[client_id], None, client_id=client_id)
        np.testing.assert_allclose(probe.values, own.values, rtol=1e-5)
        assert seconds > 0
