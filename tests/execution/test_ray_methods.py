"""Every method on Ray: the bits of `serial`, in pools that outlive a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import raysim
from raysim.algorithms import ALGORITHMS
from raysim.execution.ray_executor import RayExecutor
from raysim.execution.ray_pool import InputLost
from raysim.fusion import FUSIONS
from raysim.weighting import WEIGHTINGS
from runs import QUICKSTART, checksums, run, settings

pytestmark = pytest.mark.ray

METHODS = {
    **{name: [f"algorithm.name={name}", "weighting={name: fedvg}"] for name in ALGORITHMS},
    **{name: [f"weighting={{name: {name}}}"] for name in WEIGHTINGS},
    "direction behind guards": [
        "weighting={name: guarded, of: {name: direction}, loss_margin: 0.5, cap: 1.5, clip: 1}"
    ],
    "smoothed spectral": ["weighting={name: fedvg, norm: spectral, granularity: module, smoothing: graph}"],
    "sums in two groups on the scorers": [
        "client.per_round=20",
        "execution.sum_on_driver_mb=0",
        "weighting={name: fedvg, granularity: tensor}",
        "algorithm.name=scaffold",
    ],
    "recalibrated statistics": ["scoring.batch_norm=recalibrate"],
    **{name: [f"fusion={{name: {name}, training: {{local_epochs: 2}}}}"] for name in FUSIONS},
    "a subset": ["scoring.subset={images: 40}", "weighting={name: mix, second: {name: direction}}"],
    "until the weights settle": [
        "scoring={batch_norm: recalibrate, subset: {images: 16, settle: 1.0e-3}}",
        "weighting={name: guarded, of: {name: fedvg}, loss_margin: 5}",
    ],
    "kept scores": ["scoring={subset: {images: 40}, rescore_every: 2}", "client.per_round=15"],
    "last block": ["weighting={name: fedvg, granularity: module, scope: last_block}"],
    "evaluated on the validation set, too": ["evaluation={validation: true, batch_size: 8}"],
    "adam with a schedule": ["client.optimizer={name: adam, schedule: {name: cosine}}"],
}


@pytest.fixture(scope="module")
def session(local_ray) -> Iterator[raysim.Session]:
    with raysim.Session() as session:
        yield session


def test_sums_that_are_lost_are_made_again(tmp_path, session, monkeypatch):
    """All levels of all clients, with the same bits."""
    few = ["client.per_round=3", "client.local_epochs=1", "scoring.subset={images: 16, settle: 1.0e-9}"]
    reference = run(tmp_path, "serial", *few, rounds=1, backend="serial")
    on_scorers, seen = RayExecutor._on_scorers, []

    def lossy(self, units):
        seen.append(units[0].kind)
        if seen.count("score") == 2 and units[0].kind == "score":
            raise InputLost("gone")
        return on_scorers(self, units)

    monkeypatch.setattr(RayExecutor, "_on_scorers", lossy)
    actors = ["execution.client_actors=2", "execution.scorer_actors=2"]
    assert checksums(
        raysim.run(QUICKSTART, settings(tmp_path, "ray", *few, *actors, rounds=1), session=session)
    ) == checksums(reference)
    assert seen.count("score") == 5, "four levels beside the first, one of them twice"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_bits_of_serial(tmp_path, session, method):
    """In pools that the method before has used, which leaves nothing behind."""
    few = ["client.per_round=3", "client.local_epochs=1", "output.tensorboard=false", *METHODS[method]]
    actors = ["execution.client_actors=2", "execution.scorer_actors=2"]
    parallel = raysim.run(QUICKSTART, settings(tmp_path, "ray", *few, *actors, rounds=3), session=session)
    serial = run(tmp_path, "serial", *few, rounds=3, backend="serial")
    assert checksums(parallel) == checksums(serial)
    for table, columns in (
        ("rounds", ["weight_error", "scored_images", "validation_loss", "validation_accuracy"]),
        ("clients", ["score", "score_age"]),
    ):
        assert getattr(parallel, table).select(columns).equals(getattr(serial, table).select(columns))
