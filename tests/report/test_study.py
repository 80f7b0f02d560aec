from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raysim.errors import ConfigError
from raysim.fields import flatten
from raysim.report.collect import collect, curve_of, label_entropy
from raysim.report.study import study_of

Make = Callable[..., Path]


def grid(folder: Path, make_run: Make, seeds: int = 2) -> None:
    for weighting in ("size", "fedvg"):
        for alpha in (0.1, 0.5):
            for seed in range(seeds):
                make_run(folder / f"{weighting}-{alpha}-{seed}", (0.1,), seed=seed, alpha=alpha, weighting=weighting)


def test_what_varies_makes_methods_conditions_and_seeds(tmp_path, make_run):
    grid(tmp_path / "made", make_run)
    runs, left_out = collect([tmp_path])
    study = study_of(runs)
    assert study.methods == ("fedvg", "size")
    assert study.conditions == ("alpha=0.1", "alpha=0.5")
    assert study.seeds == (0, 1)
    assert [run.seed for run in study.of("alpha=0.5", "size")] == [0, 1]
    assert (left_out, study.warnings) == ([], ())
    # Root, name, output and threads differ between all runs and are no setting.
    assert study.condition_keys == ("partition.alpha",)


def test_another_key_can_be_what_is_compared(tmp_path, make_run):
    grid(tmp_path, make_run)
    study = study_of(collect([tmp_path])[0], ["partition.alpha"])
    assert study.methods == ("alpha=0.1", "alpha=0.5")
    assert study.conditions == ("weighting.name=fedvg", "weighting.name=size")
    with pytest.raises(
        ConfigError, match=r"model is the same in all 8 runs; what varies is partition, partition.alpha, w"
    ):
        study_of(collect([tmp_path])[0], ["model"])


def test_methods_are_told_apart_by_what_differs(tmp_path, make_run):
    weightings = [{"name": "fedvg", "norm": "l1"}, {"name": "fedvg", "norm": "l2"}, {"name": "size"}]
    for i, weighting in enumerate(weightings):
        for algorithm in ("fedavg", {"name": "fedprox", "mu": 0.1}):
            make_run(tmp_path / f"{i}-{len(algorithm)}", (0.1,), weighting=weighting, algorithm=algorithm)
    make_run(tmp_path / "fused", weighting=weightings[0], settings={"fusion": {"name": "fedlaw"}})
    study = study_of(collect([tmp_path])[0])
    assert "fedprox + fedvg (norm=l2)" in study.methods
    assert "fedavg + size" in study.methods
    assert "fedavg + fedvg (norm=l1) + fedlaw" in study.methods
    assert len(study.methods) == 7
    # The settings of another kind of section are not taken for those of an older version.
    assert not any("did not store" in warning for warning in study.warnings)


def test_numbers_are_sorted_as_numbers(tmp_path, make_run):
    for alpha in (0.5, 10.0, 2.0, 0.05):
        make_run(tmp_path / str(alpha), (0.1,), alpha=alpha)
    study = study_of(collect([tmp_path])[0])
    assert study.conditions == ("alpha=0.05", "alpha=0.5", "alpha=2.0", "alpha=10.0")


def test_abandoned_attempts_and_hidden_folders_are_not_looked_into(tmp_path, make_run):
    make_run(tmp_path / "study" / "run")
    make_run(tmp_path / "study" / "attempts" / "run-1", seed=1)
    make_run(tmp_path / "study" / ".trash" / "run-2", seed=2)
    runs, left_out = collect([tmp_path, tmp_path / "study", tmp_path / "study" / "run"])
    assert [run.folder for run in runs] == [tmp_path / "study" / "run"]
    assert left_out == []


def test_unfinished_and_broken_runs_are_left_out_with_a_reason(tmp_path, make_run):
    make_run(tmp_path / "good")
    make_run(tmp_path / "failed", seed=1, status="failed")
    (make_run(tmp_path / "going", seed=2) / "result.json").unlink()
    (make_run(tmp_path / "torn", seed=3) / "result.json").write_text("{", encoding="utf-8")
    (make_run(tmp_path / "odd", seed=4) / "config.yaml").write_text("a: [", encoding="utf-8")
    (make_run(tmp_path / "hurt", seed=5) / "rounds" / "00001.parquet").write_bytes(b"PAR1")
    make_run(tmp_path / "blind", (None, None), seed=6)
    runs, left_out = collect([tmp_path])
    reasons = {item.folder.name: item.reason for item in left_out}
    assert [run.folder.name for run in runs] == ["good"]
    assert reasons.keys() == {"failed", "going", "torn", "odd", "hurt", "blind"}
    assert reasons["failed"] == "failed after 3 of 3 rounds"
    assert reasons["going"] == "running or killed after 3 of 3 rounds"
    assert reasons["blind"] == "no round was tested"
    assert all(reasons[name].startswith("unreadable: ") for name in ("torn", "odd", "hurt"))


def test_nothing_to_report(tmp_path, make_run):
    with pytest.raises(ConfigError, match="is not a folder"):
        collect([tmp_path / "absent"])
    with pytest.raises(ConfigError, match="no finished run in 0 run folders"):
        collect([tmp_path])
    make_run(tmp_path / "failed", status="failed")
    with pytest.raises(ConfigError, match=r"(?s)no finished run in 1 run folder.*failed after 3 of 3 rounds"):
        collect([tmp_path])


def test_a_copy_is_no_second_observation(tmp_path, make_run):
    shutil.copytree(make_run(tmp_path / "a"), tmp_path / "b")
    runs, left_out = collect([tmp_path])
    assert [run.folder.name for run in runs] == ["a"]
    assert left_out[0].reason == f"same settings and seed as {tmp_path / 'a'}, with the same result"


def test_the_same_run_by_two_versions_is_refused(tmp_path, make_run):
    make_run(tmp_path / "old")
    make_run(tmp_path / "new", settings={"scoring": {"shards": 1}})
    with pytest.raises(
        ConfigError, match="the same setting and seed, as far as their configurations say; leave one out"
    ):
        study_of(collect([tmp_path])[0])


def test_an_older_run_that_does_not_store_a_key_is_the_same_setting(tmp_path, make_run):
    make_run(tmp_path / "old")
    make_run(tmp_path / "new", seed=1, settings={"scoring": {"shards": 1, "subset": None}})
    study = study_of(collect([tmp_path])[0])
    assert len(study.of("", "fedavg + size")) == 2
    assert study.warnings == (
        "1 run of another version of raysim did not store scoring.shards; taken to be 1, as in the other runs.",
    )


def test_a_section_that_is_empty_in_some_runs_varies(tmp_path, make_run):
    make_run(tmp_path / "all", settings={"scoring": {"subset": None}})
    make_run(tmp_path / "part", settings={"scoring": {"subset": {"images": 64}}})
    assert study_of(collect([tmp_path])[0]).conditions == ("images=64", "images=none")


def test_what_weakens_a_comparison_is_said(tmp_path, make_run):
    make_run(tmp_path / "a", weighting="size")
    make_run(tmp_path / "b", weighting="fedvg", data_hash="e" * 16)
    make_run(tmp_path / "c", (0.1, 0.2, 0.3, None), weighting="fedvg")
    warnings = " ".join(study_of(collect([tmp_path])[0]).warnings)
    for part in (
        "has holes: 3 runs for 4",
        "different lengths (3, 4 rounds)",
        "did not test the last round",
        "one seed only",
    ):
        assert part in warnings
    assert "Not the same data" in warnings
    assert "rounds=3, seed 0" in warnings


def test_entropy_by_hand():
    """All of one class 0; two equal classes ln 2; nothing at all 0."""
    assert label_entropy(np.array([[5, 0], [3, 3], [0, 0]])) == pytest.approx([0, np.log(2), 0])


def test_flat_keeps_lists_and_empty_sections():
    assert flatten({"a": {"b": {"c": 1}, "d": [1, 2]}, "e": {}}) == {"a.b.c": 1, "a.d": [1, 2], "e": {}}


def test_columns_of_other_versions_may_be_missing_or_new():
    table = pa.table({"round_num": [1, 2], "accuracy": [0.1, None], "validation_accuracy": [0.3, 0.4]})
    curve = curve_of(table)
    assert curve.validation_accuracy.tolist() == [0.3, 0.4]
    assert np.isnan(curve.accuracy).tolist() == [False, True]
    assert np.isnan(curve.costs["train_s"]).all()
