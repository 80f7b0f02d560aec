from __future__ import annotations

import pytest

from raysim.config import RunConfig, resolve
from raysim.errors import ConfigError
from raysim.fields import flatten
from raysim.recording.hparams import DEFAULT_HPARAMS, path_problems, pick


def test_the_default_keys_exist():
    assert path_problems(RunConfig, DEFAULT_HPARAMS) == []


def test_keys_of_methods_that_this_run_does_not_use_are_fine():
    """A study over methods tells its runs apart by them."""
    paths = ["algorithm.mu", "weighting.norm", "weighting.first.norm", "client.optimizer.lr", "scoring.subset.images"]
    assert path_problems(RunConfig, paths) == []
    assert pick(resolve({"output": {"hparams": paths}}).as_dict(), paths) == {"client.optimizer.lr": 0.01}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("client.optimizer.lrr", "unknown key client.optimizer.lrr; did you mean client.optimizer.lr?"),
        ("sed", "unknown key sed; did you mean seed?"),
        ("client", "client is a section; the keys of client are batch_size, "),
        ("seed.x", "unknown key seed.x"),
        ("output.zzzz", "unknown key output.zzzz; the keys of output are "),
    ],
)
def test_unknown_keys_are_refused_with_a_suggestion(path, says):
    for given in ([path], {path: [1]}):
        with pytest.raises(ConfigError) as caught:
            resolve({"output": {"hparams": given}})
        (problem,) = caught.value.problems
        assert problem.startswith(f"configuration: output.hparams: {says}")


@pytest.mark.parametrize("key", ["hparams", "loggers"])
def test_a_name_given_twice_is_refused(key):
    name = {"hparams": "seed", "loggers": "mlflow"}[key]
    with pytest.raises(ConfigError, match=f"output.{key}: names one twice: {name}, {name}"):
        resolve({"output": {key: [name, name]}})


def test_values_of_a_study_come_back_as_they_were():
    study = {
        "partition.alpha": [0.1, 1],
        "weighting.name": ["size"],
        "deterministic": [True],
        "client.per_round": [None, 2],
    }
    config = resolve({"output": {"hparams": study}})
    assert config.as_dict()["output"]["hparams"] == study
    assert resolve(config.as_dict()) == config


def test_values_by_path():
    plain = {"a": {"b": 1, "c": None, "d": [1, 2]}, "e": "x"}
    assert pick(plain, ["e", "a.b", "a.c", "a.d", "a.z"]) == {"e": "x", "a.b": 1, "a.d": "[1, 2]"}
    assert flatten(plain) == {"a.b": 1, "a.c": None, "a.d": [1, 2], "e": "x"}
