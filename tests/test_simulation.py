"""Whole runs in one process."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import raysim
from raysim.config import resolve
from raysim.errors import ConfigError, RunError
from raysim.execution.base import StoredState
from raysim.execution.serial import SerialExecutor
from raysim.recording.checkpoint import ClientFile, read_latest
from raysim.simulation import sample_cohort
from raysim.state import ServerState, record_checksum
from raysim.vector import checksum
from runs import QUICKSTART, SIX_CLIENTS, checksums, run


def serial(folder, name, *overrides, rounds=2):
    quick = ("data.train_images=600", "output.tensorboard=false")
    return run(folder, name, *SIX_CLIENTS, *quick, *overrides, rounds=rounds, backend="serial")


def clients(record, **where):
    return [row for row in record.clients.to_pylist() if all(row[key] == value for key, value in where.items())]


def test_a_run_learns_and_leaves_everything_behind(tmp_path):
    record = run(tmp_path, "q", rounds=5, backend="serial")
    accuracy = record.rounds["accuracy"].to_pylist()
    assert accuracy[-1] > record.result["initial"]["accuracy"] + 0.3
    assert {path.name for path in record.folder.iterdir()} == {
        ".lock",
        "checkpoints",
        "clients",
        "config.yaml",
        "manifest.json",
        "partition.parquet",
        "result.json",
        "rounds",
        "run.log",
        "tensorboard",
    }
    result = json.loads((record.folder / "result.json").read_text())
    assert (result["status"], result["rounds_done"]) == ("finished", 5)
    assert result["final"]["accuracy"] == accuracy[-1]
    assert result["best"]["accuracy"] == max(accuracy)
    assert result["checksums"]["params"] == record.rounds["params_checksum"].to_pylist()[-1]
    manifest = json.loads((record.folder / "manifest.json").read_text())
    assert manifest["partition"]["hash"] == record.partition.content_hash
    assert manifest["data"]["class_names"] == [str(k) for k in range(10)]
    assert raysim.load(record.folder).config == record.config
    assert record.class_counts.sum(axis=1).tolist() == record.partition.sizes.tolist()
    weights = np.array([row["weight"] for row in clients(record)]).reshape(5, 10)
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    assert all(row["status"] == "ok" and row["validation_loss"] > 0 for row in clients(record))


def test_the_same_seed_repeats_and_another_does_not(tmp_path):
    first, again, other = (
        serial(tmp_path, name, f"seed={seed}", rounds=1) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert checksums(first) == checksums(again)
    assert first.partition.content_hash != other.partition.content_hash
    assert first.result["checksums"] != other.result["checksums"]


def test_threads_of_the_caller_are_put_back(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        serial(tmp_path, "t")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_checkpoint_is_the_model_that_was_evaluated(tmp_path):
    record = serial(tmp_path, "c")
    latest = read_latest(record.folder)
    assert latest.round_num == 2
    assert checksum(latest.arrays["server.params"]) == record.result["checksums"]["params"]


@pytest.mark.parametrize("weighting", ["size", "uniform", "fedvg"])
def test_a_client_with_nan_is_excluded_before_scoring(tmp_path, monkeypatch, weighting):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=nan,client=3,round=1")
    record = serial(tmp_path, "n", f"weighting.name={weighting}")
    (row,) = clients(record, round_num=1, client_id=3)
    assert (row["status"], row["reason"]) == ("excluded", "non-finite update (conv1.weight)")
    assert (row["score"], row["weight"], row["score_s"]) == (None, None, None)
    assert sum(r["weight"] for r in clients(record, round_num=1, status="ok")) == pytest.approx(1)
    assert len(clients(record, round_num=1, status="ok")) == 5
    assert clients(record, round_num=2, client_id=3)[0]["status"] == "ok"
    assert np.isfinite(read_latest(record.folder).arrays["server.params"]).all()


def test_nan_everywhere_leaves_the_model_and_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=nan")
    with pytest.raises(RunError, match="no round had a usable update"):
        serial(tmp_path, "n")
    record = raysim.load(tmp_path / "n")
    assert len(set(record.rounds["params_checksum"].to_pylist())) == 1
    assert record.rounds["updated"].to_pylist() == [False, False]
    assert record.result["status"] == "failed"


def test_nan_may_abort_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=nan,client=3,round=2")
    with pytest.raises(RunError, match=r"round 2: client 3: non-finite update.*on_nonfinite: abort"):
        serial(tmp_path, "n", "execution.on_nonfinite=abort")


def test_diverging_clients_do_not_reach_the_model(tmp_path):
    with pytest.raises(RunError):
        serial(tmp_path, "d", "client.optimizer.lr=1e30")
    assert set(raysim.load(tmp_path / "d").clients["status"].to_pylist()) == {"excluded"}


def test_clients_without_examples_and_with_one_are_skipped_and_said_so(tmp_path):
    """LeNet-5 has BatchNorm: a client with one example has no batch and takes no step."""
    lists = [list(range(0, 33)), list(range(33, 50)), [50], []]
    path = tmp_path / "partition.json"
    available = np.setdiff1d(np.arange(1438), validation_of(tmp_path))
    path.write_text(json.dumps([available[part].tolist() for part in lists]))
    record = run(
        tmp_path,
        "few",
        "partition.scheme=file",
        f"partition.path={path}",
        "partition.clients=4",
        "client.per_round=4",
        rounds=1,
        backend="serial",
    )
    rows = clients(record)
    assert [row["status"] for row in rows] == ["ok", "ok", "skipped", "skipped"]
    assert [row["reason"] for row in rows][2:] == ["took no step: too few examples for a batch", "no examples"]
    assert [row["num_steps"] for row in rows][:2] == [10, 5], "33 = 16 + 17 and 17 in one batch, 5 epochs"
    assert record.rounds["skipped"].to_pylist() == [2]


def validation_of(tmp_path):
    """Training examples that the quickstart holds out."""
    from raysim.preparation import prepare_data

    data = prepare_data(raysim.load_config(QUICKSTART, [f"output.dir={tmp_path}"]))
    return np.setdiff1d(np.arange(len(data.dataset.train)), data.partition.indices)


def test_the_last_round_is_evaluated_and_others_as_asked(tmp_path):
    record = serial(tmp_path, "e", "evaluation.every=2", rounds=3)
    assert [value is not None for value in record.rounds["accuracy"].to_pylist()] == [False, True, True]


def test_shards_of_the_validation_set_add_up(tmp_path):
    """Gradient sums over shards are the gradient over the set; only rounding depends on their number."""
    settings = ("scoring.batch_size=8", "data.train_images=400")
    one, three = (serial(tmp_path, f"s{n}", *settings, f"scoring.shards={n}", rounds=1) for n in (1, 3))
    np.testing.assert_allclose(
        clients(one, round_num=1)[0]["score"], clients(three, round_num=1)[0]["score"], rtol=1e-5
    )


def test_cohorts_are_uniform_and_shared_by_all_methods():
    counts = np.bincount([k for r in range(1, 2001) for k in sample_cohort(0, r, 20, 5)], minlength=20)
    assert counts.sum() == 10000
    assert abs(counts - 500).max() < 100, "four standard deviations and more"
    assert sample_cohort(0, 1, 20, 5) == sorted(set(sample_cohort(0, 1, 20, 5)))
    assert sample_cohort(0, 1, 5, 5) == [0, 1, 2, 3, 4]


def test_a_second_run_into_the_same_folder_is_refused(tmp_path):
    record = serial(tmp_path, "x")
    before = {path: path.read_bytes() for path in record.folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="exists"):
        serial(tmp_path, "x")
    assert before == {path: path.read_bytes() for path in record.folder.rglob("*") if path.is_file()}


def test_load_refuses_what_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        raysim.load(tmp_path)


def test_a_configuration_from_plain_values(tmp_path):
    config = resolve(
        {
            "name": "values",
            "rounds": 1,
            "partition": {"clients": 3},
            "client": {"per_round": 2, "local_epochs": 1},
            "execution": {"backend": "serial"},
            "output": {"dir": str(tmp_path), "tensorboard": False, "checkpoint_every": 0},
        }
    )
    record = raysim.run(config)
    assert not (record.folder / "tensorboard").exists()
    assert not (record.folder / "checkpoints").exists()
    assert pq.read_table(record.folder / "rounds").num_rows == 1
    assert record.config.weighting.name == "size", "FedAvg's own"


def test_client_state_travels_between_rounds_and_into_checkpoints(tmp_path, monkeypatch):
    """A stateful algorithm that only counts each client's rounds."""
    from stateful import Counting

    config = raysim.load_config(
        QUICKSTART,
        [
            f"output.dir={tmp_path}",
            "name=st",
            "rounds=3",
            "execution.backend=serial",
            *SIX_CLIENTS,
            "client.per_round=3",
        ],
    )
    object.__setattr__(config, "algorithm", Counting())
    record = raysim.run(config)
    latest = read_latest(record.folder)
    taken = {k: sum(row["client_id"] == k for row in clients(record)) for k in range(6)}
    from raysim.recording.checkpoint import read_client_state

    stored = {k: read_client_state(record.folder, file)["rounds"].tolist() for k, file in latest.clients.items()}
    assert stored == {k: [float(count)] for k, count in taken.items() if count}
    assert len(set(record.rounds["clients_checksum"].to_pylist())) == 3


def test_checksum_of_a_record_is_not_that_of_its_parts():
    assert record_checksum(None) == checksum()


@pytest.mark.parametrize("algorithm", ["{name: fedavgm}", "{name: feddyn, alpha: 0.1, eval_model: active_average}"])
def test_what_is_tested_is_the_model_of_the_round(tmp_path, monkeypatch, algorithm):
    """The deployed model of the checkpoint, or for FedDyn's `active_average` theta + h / alpha."""
    tested = []
    evaluate = SerialExecutor.evaluate

    def spy(self, params, buffers, then):
        tested.append((params.clone(), buffers))
        evaluate(self, params, buffers, then)

    monkeypatch.setattr(SerialExecutor, "evaluate", spy)
    record = serial(tmp_path, "t", f"algorithm={algorithm}", "weighting=null")
    assert len(tested) == 3
    saved = read_latest(record.folder).arrays
    expected = saved["server.params"] + (saved["server.h"] / 0.1 if "server.h" in saved else 0)
    np.testing.assert_allclose(tested[-1][0].numpy(), expected, rtol=1e-6)
    assert record_checksum(tested[-1][1]) == record.round_records[-1].buffers_checksum
    assert not torch.equal(tested[0][0], tested[-1][0])


def test_a_weighting_decides_on_weights_and_nothing_else(tmp_path):
    """Accuracy weights, directly and as a mixture of themselves: the same run."""
    accuracy = "{name: accuracy}"
    mixed = f"{{name: mix, first: {accuracy}, second: {accuracy}}}"
    first, second = (
        serial(tmp_path, name, f"weighting={given}", rounds=1) for name, given in (("a", accuracy), ("b", mixed))
    )
    assert checksums(first) == checksums(second)


def test_a_server_step_out_of_all_bounds_is_not_deployed(tmp_path):
    with pytest.raises(RunError, match="round 1: the server's step made the global model non-finite"):
        serial(tmp_path, "x", "algorithm={name: fedavgm, server_lr: 1.0e+42}")
    record = raysim.load(tmp_path / "x")
    assert record.result["status"] == "failed"


def test_who_is_stopped_at_the_gate_has_no_part_in_the_round(tmp_path):
    """Recorded with its loss and the reason, without weight and without a control variate."""
    gate = "{name: guarded, of: {name: size}, loss_margin: 0.8}"
    record = serial(tmp_path, "g", "algorithm.name=scaffold", f"weighting={gate}", rounds=1)
    rows = clients(record)
    stopped = [row for row in rows if row["status"] == "excluded"]
    kept = [row for row in rows if row["status"] == "ok"]
    assert stopped
    assert kept
    assert all("above the gate's" in row["reason"] and row["weight"] is None for row in stopped)
    assert min(row["validation_loss"] for row in stopped) > max(row["validation_loss"] for row in kept)
    total = sum(row["num_examples"] for row in kept)
    assert [row["weight"] for row in kept] == pytest.approx([row["num_examples"] / total for row in kept])
    assert set(read_latest(record.folder).clients) == {row["client_id"] for row in kept}


def test_client_states_beyond_their_budget_are_kept_in_files(tmp_path, monkeypatch):
    """Six control variates of 176 kB; with a budget of two, four are read from files, and the run is the same."""
    loaded = []
    load = StoredState.load
    monkeypatch.setattr(StoredState, "load", lambda self: loaded.append(self.file.file) or load(self))
    settings = ("algorithm.name=scaffold", "output.checkpoint_every=2", "data.train_images=200")
    whole = serial(tmp_path, "w", *settings, rounds=3)
    assert loaded == []
    small = serial(tmp_path, "s", *settings, "execution.state_cache_mb=0.4", rounds=3)
    assert checksums(small) == checksums(whole)
    assert sorted(loaded) == sorted(f"clients/{k:05d}-{r:05d}.npz" for r in (1, 2) for k in range(4))


def test_a_stored_state_that_is_gone_is_an_error_that_names_the_file(tmp_path):
    state = StoredState(ServerState, tmp_path, ClientFile("clients/00001-00001.npz", "00"))
    with pytest.raises(RunError, match=r"a client's state cannot be read: .*00001-00001.npz"):
        state.load()


@pytest.fixture
def late(monkeypatch):
    """Tests of global models end only when they are waited for, as they may on Ray; how many are open at once."""
    pending, most = [], [0]
    evaluate = SerialExecutor.evaluate

    def begin(self, params, buffers, then):
        pending.append((params, buffers, then))
        most[0] = max(most[0], len(pending))

    def drain(self, limit_s=0.0):
        while pending:
            evaluate(self, *pending.pop(0))

    monkeypatch.setattr(SerialExecutor, "evaluate", begin)
    monkeypatch.setattr(SerialExecutor, "drain", drain)
    return most


def test_a_model_that_is_tested_while_the_next_round_trains_gets_its_own_row(tmp_path, late):
    settings = ("data.train_images=200", "algorithm.name=fedavgm")
    overlapped = serial(tmp_path, "o", *settings, rounds=3)
    assert late == [1], "the test of a round ends before that of the next begins"
    rows = overlapped.rounds.to_pylist()
    assert [row["round_num"] for row in rows] == [1, 2, 3]
    assert all(first["finished"] <= second["started"] for first, second in itertools.pairwise(rows))
    assert len({row["accuracy"] for row in rows} | {overlapped.result["initial"]["accuracy"]}) == 4


def test_a_round_that_was_computed_is_kept_when_the_next_one_fails(tmp_path, late, monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=raise,round=3")
    with pytest.raises(RuntimeError, match="fault asked for"):
        serial(tmp_path, "f", "data.train_images=200", rounds=3)
    record = raysim.load(tmp_path / "f")
    assert record.rounds["round_num"].to_pylist() == [1, 2]
    assert record.rounds["accuracy"].null_count == 0
    assert read_latest(record.folder).round_num == 2
