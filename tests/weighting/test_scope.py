"""FedVG on the last layers only: nothing is computed of the others, and the numbers are those of the whole gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raysim.data.arrays import ImageSet
from raysim.models import build_model
from raysim.models.base import InputSpec, ModelSettings
from raysim.objective import ModelObjective
from raysim.seeding import Purpose, rng_for
from raysim.vector import VectorLayout
from raysim.weighting.base import Probe, Report, Scored
from raysim.weighting.direction import Direction
from raysim.weighting.fedvg import FedVG
from raysim.weighting.guarded import Guarded
from raysim.weighting.loss import Loss
from raysim.weighting.mix import Mix

LAYOUT = VectorLayout(
    ("layer1.a.weight", "layer1.a.bias", "layer2.b.weight", "fc.0.weight", "fc.0.bias", "fc.2.weight"),
    ((2,), (1,), (2,), (3,), (1,), (2,)),
)


def lenet() -> ModelObjective:
    rng = np.random.default_rng(0)
    images = ImageSet(rng.integers(0, 256, (30, 1, 28, 28), dtype=np.uint8), np.arange(30) % 10)
    model = build_model(ModelSettings("lenet5"), InputSpec(1, 28, 28, 10), rng_for(0, Purpose.INIT))
    return ModelObjective(model, images)


def probed(objective: ModelObjective, weighting: FedVG) -> tuple[dict, Probe]:
    with objective.scoring("running"):
        sums = weighting.accumulate(objective, [objective.take(np.arange(15)), objective.take(np.arange(15, 30))])
    return dict(sums), weighting.finish(sums, Scored(objective.params, objective.params, objective.layout))


def names(weighting: FedVG, layout: VectorLayout = LAYOUT) -> list[str]:
    return [unit.name for unit in weighting.scored_units(layout)]


def test_which_units_are_in_scope():
    assert names(FedVG(scope="last_block")) == ["fc.0.weight", "fc.0.bias", "fc.2.weight"]
    assert names(FedVG(scope="last_block", units="module")) == ["fc.0", "fc.2"]
    assert names(FedVG(scope="last_block", granularity="block")) == ["classifier"]
    assert names(FedVG(scope="last_module")) == ["fc.2.weight"]
    assert names(FedVG(scope="last_module", granularity="module")) == ["fc.2"]
    assert names(FedVG(scope="last_block", units="model")) == ["classifier"]
    assert names(FedVG()) == list(LAYOUT.names)


@pytest.mark.parametrize("scope", ["last_block", "last_module"])
@pytest.mark.parametrize("norm", ["l1", "l2", "spectral"])
def test_norms_are_those_of_the_whole_gradient(scope, norm):
    objective = lenet()
    whole, narrow = FedVG(norm=norm), FedVG(norm=norm, scope=scope)
    all_sums, all_probe = probed(objective, whole)
    sums, probe = probed(objective, narrow)
    inside = [objective.layout.names.index(name) for name in names(narrow, objective.layout)]
    assert 0 < len(inside) < len(objective.layout.names)
    np.testing.assert_allclose(probe.values, all_probe.values[inside], rtol=1e-6)
    assert probe.score == pytest.approx(np.mean(all_probe.values[inside]), rel=1e-6)
    assert (probe.loss, probe.correct) == (all_probe.loss, all_probe.correct)
    parts = [objective.layout.slices[u] for u in inside]
    outside = np.ones(objective.layout.size, dtype=bool)
    for part in parts:
        outside[part] = False
    assert not sums["gradient"][outside].any()
    assert all_sums["gradient"][outside].any()


def test_the_backward_pass_stops_where_the_scope_begins():
    """No module in front of the last one is differentiated: their outputs belong to no graph."""
    objective, seen = lenet(), {}
    hooks = [
        module.register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: output.requires_grad})
        )
        for name, module in objective.module.named_modules()
        if name and not list(module.children())
    ]
    probed(objective, FedVG(scope="last_module"))
    differentiated = [name for name, value in seen.items() if value]
    assert differentiated == [objective.layout.names[-1].rpartition(".")[0]]
    probed(objective, FedVG())
    assert all(seen.values())
    for hook in hooks:
        hook.remove()


def test_all_parameters_are_trained_afterwards_also_after_an_error():
    objective = lenet()
    units = objective.layout.units("module")[-1:]
    trained = []

    def fail() -> None:
        with objective.limited_to(units):
            trained.append(sum(param.requires_grad for param in objective.module.parameters()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert trained == [2]
    assert all(param.requires_grad for param in objective.module.parameters())
    probed(objective, FedVG(scope="last_block"))
    objective.gradient(objective.take(np.arange(8)))
    assert all(objective.grad[part].any() for part in objective.layout.slices[:2])


def test_parameters_frozen_from_the_start_stay_frozen():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 5), torch.nn.Linear(5, 10))
    model[1].weight.requires_grad_(False)
    objective = ModelObjective(model, lenet().examples)
    with objective.limited_to(objective.layout.units("module")[-1:]):
        pass
    assert [param.requires_grad for param in model.parameters()] == [False, True, True, True]


@pytest.mark.parametrize("granularity", ["tensor", "module"])
def test_units_outside_take_the_client_weights(granularity):
    weighting = FedVG(scope="last_block", granularity=granularity, eps=0.0)
    inside = len(names(weighting))
    norms = np.array([[1.0, 4.0, 1.0], [3.0, 1.0, 2.0]])[:, :inside]
    reports = [Report(k, 1, 1, 0.0, Probe(row)) for k, row in enumerate(norms)]
    found = weighting.weights(reports, None, LAYOUT)
    means = norms.mean(axis=1)
    np.testing.assert_allclose(found.client, (1 / means) / (1 / means).sum())
    total = len(LAYOUT.units(granularity))
    assert found.unit.shape == (2, total)
    np.testing.assert_array_equal(found.unit[:, : total - inside], np.repeat(found.client[:, None], total - inside, 1))
    np.testing.assert_allclose(found.unit[:, total - inside :], (1 / norms) / (1 / norms).sum(axis=0))


def test_smoothing_reaches_across_the_border_of_the_scope():
    weighting = FedVG(scope="last_module", granularity="module", smoothing="moving_average", eps=0.0)
    reports = [Report(k, 1, 1, 0.0, Probe(np.array([norm]))) for k, norm in enumerate((1.0, 3.0))]
    found = weighting.weights(reports, None, LAYOUT)
    np.testing.assert_allclose(found.unit, np.repeat([[0.75], [0.25]], 4, axis=1))


def test_a_mixture_takes_what_its_parts_look_at():
    narrow, other = FedVG(scope="last_module"), FedVG(scope="last_block")
    assert Mix(first=narrow, second=Loss()).gradient_units(LAYOUT) == narrow.gradient_units(LAYOUT)
    assert Guarded(of=narrow, cap=2.0).gradient_units(LAYOUT) == narrow.gradient_units(LAYOUT)
    assert Mix(first=narrow, second=FedVG()).gradient_units(LAYOUT) is None
    both = Mix(first=narrow, second=other).gradient_units(LAYOUT)
    assert {unit.name for unit in both} == {"fc.2", "classifier"}
    assert Mix(first=Direction(), second=Loss()).gradient_units(LAYOUT) is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"scope": "last_block", "norm": "delta"}, "scope: last_block is about gradients; norm: delta has none"),
        ({"scope": "last_module", "granularity": "block"}, "scope: last_module contradicts units of a block"),
        ({"scope": "last_module", "units": "block"}, "scope: last_module contradicts units of a block"),
    ],
)
def test_contradictions_are_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        FedVG(**fields)
