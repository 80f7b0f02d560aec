"""Every method on Ray: the bits of `serial`, in pools that outlive a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import raysim
from raysim.algorithms import ALGORITHMS
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
    "adam with a schedule": ["client.optimizer={name: adam, schedule: {name: cosine}}"],
}


@pytest.fixture(scope="module")
def session(local_ray) -> Iterator[raysim.Session]:
    with raysim.Session() as session:
        yield session


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_bits_of_serial(tmp_path, session, method):
    """In pools that the method before has used, which leaves nothing behind."""
    few = ["client.per_round=3", "client.local_epochs=1", "output.tensorboard=false", *METHODS[method]]
    actors = ["execution.client_actors=2", "execution.scorer_actors=2"]
    parallel = raysim.run(QUICKSTART, settings(tmp_path, "ray", *few, *actors, rounds=3), session=session)
    assert checksums(parallel) == checksums(run(tmp_path, "serial", *few, rounds=3, backend="serial"))
