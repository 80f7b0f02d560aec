"""FedVG's weights: hand-checked numbers, edges, and the authors' own numbers for trained networks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quadratic import EXAMPLES, LAYOUT, REFERENCE, START, Federation, assert_example, clients, validation
from raysim.algorithms.fedavg import FedAvg
from raysim.data.arrays import ImageSet
from raysim.models import build_model
from raysim.models.base import InputSpec, ModelSettings
from raysim.objective import ModelObjective
from raysim.seeding import Purpose, rng_for
from raysim.vector import VectorLayout, checksum
from raysim.weighting.base import Probe, Report, Scored
from raysim.weighting.fedvg import FedVG
from raysim.weighting.mix import Mix
from raysim.weighting.size import Size

TWO = VectorLayout(("a", "b"), ((1,), (1,)))


def reports(norms_CU) -> list[Report]:
    return [
        Report(k, 10, 1, 0.0, Probe(np.atleast_1d(np.array(n, float)), np.mean(n), 1.0, 1, 2))
        for k, n in enumerate(norms_CU)
    ]


def client_weights(scores, **fields) -> np.ndarray:
    layout = VectorLayout(("w",), ((1,),))
    return FedVG(**fields).weights(reports(scores), None, layout).client


@pytest.mark.parametrize(("norm", "key"), [("l1", "L1"), ("l2", "L2")])
def test_validation_gradients_and_norms(norm, key):
    """At the models of FedAvg's clients after local training from the start."""
    weighting = FedVG(norm=norm)
    updates, _ = Federation(FedAvg(), weighting, clients(), validation()).train()
    probes = []
    for k, update in updates.items():
        objective = validation()
        params = torch.tensor(START, dtype=torch.float64) + update.delta
        assert_example(params, f"local.theta{k + 1}")
        objective.params.copy_(params)
        sums = weighting.accumulate(objective, [objective.everything(), objective.everything()])
        assert sums["count"] == 2
        assert_example(sums["gradient"] / 2, f"fedvg.val_grad{k + 1}")
        probes.append(weighting.finish(sums, Scored(params, params, LAYOUT)))
    assert_example([probe.values for probe in probes], f"fedvg.{key}.tensor_norms")
    assert_example([probe.score for probe in probes], f"fedvg.{key}.Gbar(mean over tensors)")


@pytest.mark.parametrize(
    ("scores", "weights", "tolerance"),
    [
        ([2, 4, 4], [0.5, 0.25, 0.25], 1e-8),
        ([0, 1, 1], [0.99999998, 1e-8, 1e-8], 1e-15),
        ([0, 0, 0], [1 / 3, 1 / 3, 1 / 3], 1e-15),
    ],
)
def test_edges_by_hand(scores, weights, tolerance):
    np.testing.assert_allclose(client_weights(scores), weights, rtol=1e-7, atol=tolerance)


def test_reference_edges():
    assert_example(client_weights([5, 5]), "edge.equal")
    assert_example(client_weights([7]), "edge.single_client")
    assert_example(client_weights([0, 100, 100]), "edge.dead_model s for G=[0,100,100]")


def test_relative_eps():
    key = "edge.relative_eps (0.1*median) for G=[0,100,100]"
    assert_example(client_weights([0, 100, 100], relative_eps=0.1), key)
    norms = np.array([[1.0, 40.0], [2.0, 50.0], [9.0, 60.0]])
    unit = FedVG(granularity="tensor", relative_eps=0.5).weights(reports(norms), None, TWO).unit
    inverse = 1 / (norms + np.array([1.0, 25.0]))
    np.testing.assert_allclose(unit, inverse / inverse.sum(axis=0), rtol=1e-12)


@pytest.mark.parametrize(
    ("exponent", "weights"), [(0.0, [1 / 3] * 3), (0.5, [0.5, 0.25, 0.25]), (1.0, [8 / 9, 1 / 18, 1 / 18])]
)
def test_exponent_between_uniform_and_inverse(exponent, weights):
    scores = [1, 4, 4] if exponent == 0.5 else [1, 16, 16]
    np.testing.assert_allclose(client_weights(scores, exponent=exponent, eps=0.0), weights, rtol=1e-12)


@pytest.mark.parametrize("key", ["L1", "L2"])
def test_layerwise_weights_and_the_published_sum(key):
    norms = EXAMPLES[f"fedvg.{key}.tensor_norms"]
    layerwise = FedVG(norm=key.lower(), granularity="tensor").weights(reports(norms), None, LAYOUT)
    assert_example(layerwise.unit, f"fedvg.{key}.layerwise.s[k][tensor]")
    assert_example(layerwise.client, f"fedvg.{key}.s")
    summed = client_weights([sum(row) for row in norms])
    assert_example(summed, f"fedvg.{key}.s(sum instead of mean)")


def finished(weighting: FedVG, gradient, params=(0, 0, 0), start=(0, 0, 0), layout=LAYOUT) -> Probe:
    sums = {
        "gradient": 2 * np.array(gradient, float),
        "loss": np.array(1.0),
        "correct": np.array(1),
        "count": np.array(2),
    }
    sums = sums if weighting.needs == "gradient" else {}
    return weighting.finish(sums, Scored(*(torch.tensor(v, dtype=torch.float64) for v in (params, start)), layout))


def test_the_norm_of_the_whole_gradient_is_another_score():
    weighting = FedVG(norm="l2", units="model")
    probes = [finished(weighting, EXAMPLES[f"fedvg.val_grad{k}"]) for k in (1, 2)]
    assert_example([probe.score for probe in probes], "fedvg.global_L2.G")
    given = [Report(k, 1, 1, 0.0, probe) for k, probe in enumerate(probes)]
    assert_example(weighting.weights(given, None, LAYOUT).client, "fedvg.global_L2.s")


def test_units_of_several_tensors_have_the_norm_of_their_whole_gradient():
    layout = VectorLayout(("a.weight", "b.weight", "a.bias"), ((2,), (1,), (1,)))
    gradient = [3.0, -4.0, 7.0, 12.0]
    four = {"params": [1.0] * 4, "start": [0.0] * 4, "layout": layout}
    np.testing.assert_allclose(finished(FedVG(units="module"), gradient, **four).values, [19, 7])
    np.testing.assert_allclose(finished(FedVG(norm="l2", units="module"), gradient, **four).values, [13, 7])
    np.testing.assert_allclose(finished(FedVG(norm="l2", granularity="module"), gradient, **four).values, [13, 7])
    np.testing.assert_allclose(finished(FedVG(norm="l2", units="block"), gradient, **four).values, [13, 7])
    np.testing.assert_allclose(finished(FedVG(norm="l2"), gradient, **four).values, [5, 7, 12])


def test_spectral_norms():
    layout = VectorLayout(("w",), ((2, 2),))
    sigma = finished(FedVG(norm="spectral"), [3, 0, 4, 5], [0] * 4, [0] * 4, layout).values[0]
    assert_example(sigma, "fedvg.spectral sigma1 of [[3,0],[4,5]]")
    rng = np.random.default_rng(0)
    layout = VectorLayout(("conv.weight", "conv.bias", "norm.weight"), ((4, 3, 5, 5), (4,), (7,)))
    gradient = rng.normal(size=311)
    singular = np.linalg.svd(gradient[:300].reshape(4, 75), compute_uv=False)[0]
    others = [np.linalg.norm(gradient[300:304]), np.linalg.norm(gradient[304:])]
    zeros = np.zeros(311)
    found = finished(FedVG(norm="spectral"), gradient, zeros, zeros, layout).values
    np.testing.assert_allclose(found, [singular, *others], rtol=1e-12)
    found = finished(FedVG(norm="spectral", units="module"), gradient, zeros, zeros, layout).values
    np.testing.assert_allclose(found, [np.hypot(singular, others[0]), others[1]], rtol=1e-12)


def test_the_norm_of_the_update_needs_no_data():
    weighting = FedVG(norm="delta")
    probe = finished(weighting, [0, 0, 0], params=(4, 6, 1), start=(1, 2, 3))
    np.testing.assert_array_equal(probe.values, [5, 2])
    assert (weighting.needs, probe.loss, probe.accuracy, probe.score) == ("vectors", None, None, 3.5)


@pytest.mark.parametrize("norm", ["l1", "l2", "spectral"])
def test_scale_free_scores_survive_rescaling_a_unit(norm):
    """Parameters of a unit times c, its gradient over c: the same function in front of a BatchNorm."""
    rng = np.random.default_rng(0)
    gradient, params = rng.normal(size=(2, 3))
    scale = np.array([1e4, 1e4, 1e-3])
    plain, free = FedVG(norm=norm), FedVG(norm=norm, scale_free=True)
    before = finished(free, gradient, params).values
    np.testing.assert_allclose(finished(free, gradient / scale, params * scale).values, before, rtol=1e-12)
    assert (
        finished(plain, gradient / scale, params * scale).values[0] < 1e-3 * finished(plain, gradient, params).values[0]
    )
    order = 1 if norm == "l1" else 2  # Both tensors have one dimension.
    by_hand = [np.linalg.norm(gradient[part], order) * np.linalg.norm(params[part], order) for part in LAYOUT.slices]
    np.testing.assert_allclose(before, by_hand, rtol=1e-12)


THREE = VectorLayout(("a", "b", "c"), ((1,), (1,), (1,)))
SMOOTHED = {
    "moving_average": "smooth.moving_average(window 3, edge padding)",
    "graph": "smooth.graph(path 0-1-2)",
}


@pytest.mark.parametrize("smoothing", SMOOTHED)
@pytest.mark.parametrize("edges", [(), (("a", "b"), ("b", "c"))])
def test_smoothing(smoothing, edges):
    """Unit weights [[.8, .2], [.5, .5], [.2, .8]] (rows: units) from norms that are their inverses."""
    norms = 1 / np.array([[0.8, 0.5, 0.2], [0.2, 0.5, 0.8]])
    weighting = FedVG(granularity="tensor", smoothing=smoothing, eps=0.0)
    weights = weighting.weights(reports(norms), None, VectorLayout(THREE.names, THREE.shapes, edges))
    assert_example(weights.unit.T, SMOOTHED[smoothing])
    assert weighting.needs_edges == (smoothing == "graph")


def test_smoothing_follows_the_edges():
    """A skip connection a -> c, and b apart: b keeps its weights, a and c share theirs."""
    norms = 1 / np.array([[0.8, 0.5, 0.2], [0.2, 0.5, 0.8]])
    layout = VectorLayout(THREE.names, THREE.shapes, (("a", "c"),))
    unit = FedVG(granularity="module", smoothing="graph", eps=0.0).weights(reports(norms), None, layout).unit
    np.testing.assert_allclose(unit, np.full((2, 3), 0.5), rtol=1e-12)
    wide = FedVG(granularity="tensor", smoothing="moving_average", window=5, eps=0.0)
    np.testing.assert_allclose(wide.weights(reports(norms), None, THREE).unit[0], [0.62, 0.5, 0.38], rtol=1e-12)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"granularity": "block", "units": "tensor"}, "units: tensor contradicts granularity: block"),
        ({"smoothing": "graph"}, "smoothing needs one weight per unit"),
        ({"window": 2}, "window should be odd"),
        ({"norm": "delta", "scale_free": True}, "scale_free is about gradients"),
        ({"relative_eps": 0.1, "eps": 1e-3}, "eps: 0.001 has no effect beside relative_eps"),
        ({"window": 5}, "window: 5 has no effect without smoothing"),
        ({"noise_floor": 0.0}, "noise_floor: 0.0 has no effect under granularity: model"),
    ],
)
def test_contradictions_are_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        FedVG(**fields)


def test_a_client_that_takes_all_of_a_unit_is_news():
    """Two units are dead in client 0, whose score is like the others'."""
    norms = [[0, 0, 3], [1, 1, 1], [1, 1, 1]]
    weights = FedVG(granularity="tensor").weights(reports(norms), None, THREE)
    np.testing.assert_allclose(weights.client, 1 / 3, rtol=1e-6)
    assert "2 tensors give one client over 0.99 of their weight" in weights.notes[0]


def test_a_high_power_neither_overflows_nor_vanishes():
    np.testing.assert_allclose(client_weights([1e3, 1e3, 2e3], exponent=120.0), [0.5, 0.5, 0], atol=1e-12)
    np.testing.assert_allclose(client_weights([0, 1, 1], exponent=120.0), [1, 0, 0], atol=1e-12)


@pytest.mark.parametrize("norm", ["l1", "l2", "spectral"])
def test_a_gradient_that_is_not_finite_has_no_finite_score(norm):
    layout = VectorLayout(("w",), ((6, 25),))
    zeros = np.zeros(150)
    for bad in (np.nan, np.inf):
        probe = finished(FedVG(norm=norm), np.where(np.arange(150) == 7, bad, 1.0), zeros, zeros, layout)
        assert not probe.finite


def test_a_client_that_takes_all_the_weight_is_named():
    weights = FedVG().weights(reports([100, 0, 100]), None, VectorLayout(("w",), ((1,),)))
    assert "client 1 takes" in weights.notes[0]
    assert FedVG().weights(reports([3]), None, VectorLayout(("w",), ((1,),))).notes == (), "a lone client is no news"


def test_without_eps_vanishing_gradients_share_the_weight_and_scale_cancels():
    np.testing.assert_array_equal(client_weights([0, 2, 0], eps=0.0), [0.5, 0, 0.5])
    scores = np.array([0.3, 1.7, 9.0])
    np.testing.assert_allclose(client_weights(scores, eps=0.0), client_weights(1e6 * scores, eps=0.0), rtol=1e-12)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20))
def test_simplex_and_order(scores):
    weights = client_weights(scores)
    assert weights.sum() == pytest.approx(1, abs=1e-9)
    assert (weights >= 0).all()
    order = np.argsort(scores, kind="stable")
    assert (np.diff(weights[order]) <= 1e-15).all(), "a flatter model never counts less"


def test_noise_takes_the_client_weights():
    """Tensor 0 of client 1 is rounding noise: 1e-9 per element against a median of 1."""
    layout = VectorLayout(("a", "b", "c"), ((10,), (10,), (5,)))
    norms = [[10.0, 20.0, 5.0], [1e-8, 10.0, 10.0]]
    result = FedVG(granularity="tensor").weights(reports(norms), None, layout)
    np.testing.assert_array_equal(result.unit[:, 0], result.client)
    np.testing.assert_allclose(result.unit[:, 1], [1 / 3, 2 / 3], rtol=1e-8)
    np.testing.assert_allclose(result.unit.sum(axis=0), 1)
    assert "1 tensors take the client weights: rounding noise" in result.notes[0]
    off = FedVG(granularity="tensor", noise_floor=0.0).weights(reports(norms), None, layout)
    assert off.unit[1, 0] > 0.99


@pytest.mark.parametrize(("norm", "power"), [("l1", 1.0), ("l2", 0.5), ("spectral", 0.5)])
@pytest.mark.parametrize("scale_free", [False, True])
@pytest.mark.parametrize("counts", [(10_000, 10_000, 1), (4_000_000, 1, 1)])
def test_noise_is_judged_per_element(norm, power, scale_free, counts):
    """Tensors alike per element and far apart as norms are all genuine; a thousandth of that is noise."""
    layout = VectorLayout(("a", "b", "c"), tuple((count,) for count in counts))
    sizes = np.array(counts, dtype=float) ** (2 * power if scale_free else power)
    weighting = FedVG(norm=norm, granularity="tensor", scale_free=scale_free)
    genuine = weighting.weights(reports([1.0 * sizes, 2.0 * sizes]), None, layout)
    assert genuine.notes == ()
    noise = np.array([1.0, 1e-4, 1.0])
    noisy = weighting.weights(reports([noise * sizes, 2.0 * sizes]), None, layout)
    np.testing.assert_array_equal(noisy.unit[:, 1], noisy.client)
    assert "1 tensors take the client weights" in noisy.notes[0]


def test_scoring_twice_gives_the_same_sums():
    objective = validation()
    objective.params.copy_(torch.tensor(START))
    first, second = (FedVG().accumulate(objective, [objective.everything()]) for _ in range(2))
    np.testing.assert_array_equal(first["gradient"], second["gradient"])


class TestAuthorsNumbers:
    """Three LeNet-5 clients against the numbers of the authors' scoring code (float32): rtol 1e-4, in float32 and float64.

    Without oneDNN's convolutions, whose rounding depends on the processor and the number of threads: on an AVX2 machine with
    one thread they move the norm of bn1.bias, a sum that nearly cancels, by 7e-4, while PyTorch's own float32 kernels and
    float64 agree with the stored numbers to 7e-6.
    """

    RTOL = 1e-4
    NOISE = ("conv1.bias", "conv2.bias")  # In front of a BatchNorm: rounding noise under batch statistics.

    @pytest.fixture(autouse=True)
    def plain_convolutions(self, monkeypatch):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)

    @pytest.fixture
    def arrays(self):
        with np.load(REFERENCE / "lenet_a.npz") as file:
            return dict(file)

    @pytest.fixture
    def expected(self):
        return json.loads((REFERENCE / "lenet_a.json").read_text())

    def objective(self, arrays, who, dtype=torch.float32) -> ModelObjective:
        model = build_model(ModelSettings("lenet5"), InputSpec(1, 28, 28, 10), rng_for(0, Purpose.INIT))
        state = {key.split("/")[1]: torch.from_numpy(arrays[key]) for key in arrays if key.startswith(f"{who}/")}
        model.load_state_dict(state, strict=True)
        return ModelObjective(model.to(dtype), ImageSet(arrays["val_images"][:, None], arrays["val_labels"]))

    def probes(self, arrays, weighting, mode, dtype=torch.float32) -> list[Probe]:
        probes = []
        for k in range(3):
            objective = self.objective(arrays, f"client{k}", dtype)
            before = checksum(
                objective.params.numpy(), objective.buffers.floats.numpy(), objective.buffers.ints.numpy()
            )
            with objective.scoring(mode):
                batches = [objective.take(np.arange(start, start + 32)) for start in (0, 32, 64)]
                sums = weighting.accumulate(objective, batches)
            probes.append(weighting.finish(sums, Scored(objective.params, objective.params, objective.layout)))
            after = checksum(objective.params.numpy(), objective.buffers.floats.numpy(), objective.buffers.ints.numpy())
            assert before == after
        return probes

    @pytest.mark.parametrize("statistics", ["batch_stats", "running_stats"])
    @pytest.mark.parametrize("norm", ["l1", "l2"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_norms_and_weights(self, arrays, expected, statistics, norm, dtype):
        wanted = expected[statistics][norm]
        weighting = FedVG(norm=norm, granularity="tensor", noise_floor=0.0)
        probes = self.probes(arrays, weighting, statistics.removesuffix("_stats"), dtype)
        layout = self.objective(arrays, "init").layout
        weights = weighting.weights([Report(k, 1, 1, 0.0, probe) for k, probe in enumerate(probes)], None, layout)
        np.testing.assert_allclose(weights.client, wanted["model_weights"], rtol=self.RTOL)
        skipped = self.NOISE if statistics == "batch_stats" else ()
        for u, name in enumerate(layout.names):
            if name in skipped:
                continue
            norms = [client[name] for client in wanted["norm_of_mean_gradient_per_tensor"]]
            np.testing.assert_allclose([p.values[u] for p in probes], norms, rtol=self.RTOL, err_msg=name)
            np.testing.assert_allclose(weights.unit[:, u], wanted["layer_weights"][name], rtol=self.RTOL, err_msg=name)

    @pytest.mark.parametrize(("statistics", "noisy"), [("batch", list(NOISE)), ("running", [])])
    @pytest.mark.parametrize("norm", ["l1", "l2"])
    def test_the_noise_floor_separates_noise_from_gradients(self, arrays, statistics, noisy, norm):
        weighting = FedVG(norm=norm, granularity="tensor")
        probes = self.probes(arrays, weighting, statistics)
        layout = self.objective(arrays, "init").layout
        weights = weighting.weights([Report(k, 1, 1, 0.0, probe) for k, probe in enumerate(probes)], None, layout)
        taken = [name for u, name in enumerate(layout.names) if np.array_equal(weights.unit[:, u], weights.client)]
        assert taken == noisy

    @pytest.mark.parametrize("statistics", ["batch_stats", "running_stats"])
    def test_spectral_layer_weights(self, arrays, expected, statistics):
        weighting = FedVG(norm="spectral", granularity="tensor", noise_floor=0.0)
        probes = self.probes(arrays, weighting, statistics.removesuffix("_stats"))
        layout = self.objective(arrays, "init").layout
        weights = weighting.weights([Report(k, 1, 1, 0.0, probe) for k, probe in enumerate(probes)], None, layout)
        skipped = self.NOISE if statistics == "batch_stats" else ()
        for u, name in enumerate(layout.names):
            if name not in skipped:
                wanted = expected[statistics]["spectral_layer_weights"][name]
                np.testing.assert_allclose(weights.unit[:, u], wanted, rtol=self.RTOL, err_msg=name)

    @pytest.mark.parametrize(
        ("key", "weighting"), [("fedvg", FedVG()), ("fedvg_averaged_with_size", Mix()), ("fedavg", Size())]
    )
    def test_averages(self, arrays, expected, key, weighting):
        init = self.objective(arrays, "init")
        models = [self.objective(arrays, f"client{k}").params.double() for k in range(3)]
        probes = self.probes(arrays, weighting, "batch")
        given = [Report(k, n, 1, 0.0, probes[k]) for k, n in enumerate(expected["num_examples"])]
        weights = weighting.weights(given, None, init.layout).client
        start = init.params.double()
        average = start + sum(w * (model - start) for w, model in zip(weights, models, strict=True))
        for name, total in expected["aggregate_sum_per_tensor"][key].items():
            tensor = init.layout.view(average, name)
            # A sum over a tensor cancels; its error is relative to the sum of magnitudes.
            assert tensor.sum().item() == pytest.approx(total, rel=self.RTOL, abs=1e-5 * tensor.abs().sum().item()), (
                name
            )
