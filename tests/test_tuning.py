"""A search with Ray Tune: trials are ordinary runs, inside placement groups of their own."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import raysim
from raysim.errors import ConfigError
from raysim.tuning import with_settings
from runs import QUICKSTART, TINY, settings

SMALL = ("execution.client.num_cpus=0.2", "execution.scorer.num_cpus=0.2", "evaluation.batch_size=64")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_four_trials_of_which_the_worse_are_stopped(local_ray: None, tmp_path: Path):
    import ray
    from ray import tune
    from ray.util import placement_group_table

    learning_rates = [0.3, 1e-6, 1e-7, 1e-8]
    folder = tmp_path / "a search"
    trials = raysim.tune(
        QUICKSTART,
        {"client.optimizer.lr": tune.grid_search(learning_rates)},
        settings(tmp_path, "a search", *TINY, *SMALL, "partition.alpha=10", rounds=6),
        num_samples=1,
        grace=1,
        reduction=3,
        driver_cpus=0.2,
    )
    assert ray.is_initialized(), "it was there before"
    assert sorted(trial.settings["client.optimizer.lr"] for trial in trials) == sorted(learning_rates)
    best = trials[0]
    assert (best.settings["client.optimizer.lr"], best.status, best.rounds) == (0.3, "finished", 6)
    stopped = [trial for trial in trials if trial.status == "interrupted"]
    assert stopped, [trial.status for trial in trials]
    for trial in stopped:
        assert trial.rounds < 6
        assert trial.reason == "stopped by the search: other settings promise more"
    for trial in trials:
        record = raysim.load(trial.folder)
        rows = record.rounds.to_pylist()
        assert len(rows) == trial.rounds
        assert trial.validation_accuracy == max(row["validation_accuracy"] for row in rows)
        assert record.manifest["plan"]["binding"] == "as reserved"
        assert (record.manifest["plan"]["client_actors"], record.manifest["plan"]["scorer_actors"]) == (1, 1)
    assert {path.name for path in folder.iterdir()} == {".tune", *(trial.name for trial in trials)}

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (
        any(group["state"] == "CREATED" for group in placement_group_table().values())
        or ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]
    ):
        time.sleep(0.5)
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"], "every actor is gone"


def test_what_cannot_be_searched_is_said_before_anything_starts(tmp_path: Path):
    base = settings(tmp_path, "s", *TINY)
    with pytest.raises(ConfigError, match=r"trial: client\.optimizer\.rl: unknown key"):
        raysim.tune(QUICKSTART, {"client.optimizer.rl": [0.1]}, base)
    with pytest.raises(ConfigError, match=r"raysim\.tune needs ray"):
        raysim.tune(QUICKSTART, {"client.optimizer.lr": [0.1]}, [*base, "execution.backend=serial"])
    (tmp_path / "s").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        raysim.tune(QUICKSTART, {"client.optimizer.lr": [0.1]}, base)


@pytest.mark.ray
def test_a_trial_that_fits_nowhere_does_not_wait_for_ever(local_ray: None, tmp_path: Path):
    base = settings(tmp_path, "s", *TINY, "execution.client_actors=4", "execution.client.num_cpus=1")
    with pytest.raises(ConfigError, match="a trial needs 6 bundles"):
        raysim.tune(QUICKSTART, {"client.optimizer.lr": [0.1]}, base)


def test_settings_of_a_trial_are_overrides():
    import numpy as np

    values = {"weighting": {"name": "fedvg", "norm": "l2"}, "seed": 3}
    config = with_settings(
        values, {"weighting.name": "size", "client.optimizer.lr": np.float64(1e-5), "rounds": np.int64(7)}, "t"
    )
    assert (config.weighting.name, config.client.optimizer.lr, config.rounds, config.seed, config.name) == (
        "size",
        1e-5,
        7,
        3,
        "t",
    )
    assert json.dumps(values) == '{"weighting": {"name": "fedvg", "norm": "l2"}, "seed": 3}'
