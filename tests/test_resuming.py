"""A run that was stopped goes on to the bits of one that never was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock
from typer.testing import CliRunner

import raysim
from raysim.algorithms import ALGORITHMS
from raysim.cli import app
from raysim.config import load_config, resolve
from raysim.errors import ConfigError, RunError
from raysim.recording.checkpoint import read_latest
from raysim.recording.tables import TableWriter
from runs import QUICKSTART, checksums, settings

TINY = (
    "data.train_images=240",
    "model.name=mlp",
    "partition.clients=5",
    "client.per_round=3",
    "client.local_epochs=1",
    "output.tensorboard=false",
)


def run(folder, name, *overrides, rounds=3, resume=False):
    given = settings(folder, name, *TINY, *overrides, rounds=rounds, backend="serial")
    return raysim.run(load_config(QUICKSTART, given), resume=resume)


def contents(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def without_times(result):
    return {k: v for k, v in result.items() if k in ("status", "rounds_done", "initial", "final", "best", "checksums")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three rounds in one go."""
    return run(tmp_path_factory.mktemp("whole"), "a", "algorithm.name=scaffold", "weighting.name=fedvg")


@pytest.fixture
def stopped(whole, tmp_path):
    """A copy of that run whose process was killed: no result, and of later rounds what `keep` leaves."""

    def stop(checkpoint: int, row: int):
        folder = tmp_path / "a"
        shutil.copytree(whole.folder, folder)
        (folder / "result.json").unlink()
        for path in (folder / "checkpoints").glob("round-*.json"):
            if int(path.stem.removeprefix("round-")) > checkpoint:
                path.unlink()
        TableWriter(folder).discard_after(row)
        return folder

    return stop


def resume(folder, *overrides):
    return raysim.run(load_config(folder / "config.yaml", [f"output.dir={folder.parent}", *overrides]), resume=True)


@pytest.mark.parametrize(
    "algorithm",
    [
        # One with client state and one with server state are quick enough for the fast set.
        name if name in ("scaffold", "fedadam") else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(ALGORITHMS)
    ],
)
def test_every_algorithm_goes_on_to_the_same_bits(tmp_path, algorithm):
    given = (f"algorithm.name={algorithm}", "weighting.name=fedvg")
    whole = run(tmp_path, "whole", *given)
    run(tmp_path, "parts", *given, rounds=2)
    parts = run(tmp_path, "parts", *given, resume=True)
    assert checksums(parts) == checksums(whole)
    assert without_times(parts.result) == without_times(whole.result)
    assert parts.result["resumed_after"] == [2]
    assert parts.clients.select(["client_id", "score", "weight"]) == whole.clients.select(
        ["client_id", "score", "weight"]
    )


def test_kept_scores_survive(tmp_path):
    given = ("scoring.rescore_every=3", "client.per_round=5")
    whole = run(tmp_path, "whole", *given)
    run(tmp_path, "parts", *given, rounds=1)
    parts = run(tmp_path, "parts", *given, resume=True)
    assert checksums(parts) == checksums(whole)
    assert parts.clients["score_age"].to_pylist() == whole.clients["score_age"].to_pylist()


@pytest.mark.parametrize(
    ("checkpoint", "row", "after"),
    [(3, 2, 2), (2, 3, 2), (3, 3, 3), (2, 2, 2), (0, 3, None)],
    ids=["killed before the rows", "the checkpoint is missing", "before the result", "between rounds", "no checkpoint"],
)
def test_killed_at_any_moment_nothing_is_lost_or_doubled(whole, stopped, checkpoint, row, after):
    folder = stopped(checkpoint, row)
    assert raysim.load(folder).result == {"status": "running"}
    record = resume(folder)
    assert checksums(record) == checksums(whole)
    assert without_times(record.result) == without_times(whole.result)
    assert record.result["resumed_after"] == [after or 0]
    assert read_latest(folder).round_num == 3
    log = (folder / "run.log").read_text(encoding="utf-8")
    assert ("begins again" in log) if after is None else (f"resumed after round {after}" in log)


def test_rows_that_are_computed_again_are_gone_until_then(stopped, monkeypatch):
    folder = stopped(2, 3)
    monkeypatch.setenv("RAYSIM_FAULT", "kind=nan,round=3")
    with pytest.raises(RunError, match="round 3"):
        resume(folder, "execution.on_nonfinite=abort")
    record = raysim.load(folder)
    assert record.rounds["round_num"].to_pylist() == [1, 2]
    assert set(record.clients["round_num"].to_pylist()) == {1, 2}
    assert (record.result["status"], record.result["rounds_done"]) == ("failed", 2)


def test_a_resumed_run_that_cannot_start_loses_nothing(stopped, monkeypatch):
    folder = stopped(2, 2)
    before = contents(folder)

    def no_cluster(*_):
        raise RunError("no cluster")

    monkeypatch.setattr("raysim.simulation.make_executor", no_cluster)
    with pytest.raises(RunError, match="no cluster"):
        resume(folder)
    assert {path: digest for path, digest in contents(folder).items() if path.name != "run.log"} == {
        path: digest for path, digest in before.items() if path.name != "run.log"
    }


def test_a_logger_that_refuses_leaves_a_finished_run_as_it_was(whole, stopped, monkeypatch):
    folder = stopped(3, 3)
    shutil.copy(whole.folder / "result.json", folder)
    before = contents(folder)

    def refuse(*_):
        raise ConfigError("no server")

    monkeypatch.setattr("raysim.recorder.open_loggers", refuse)
    with pytest.raises(ConfigError, match="no server"):
        resume(folder, "rounds=4")
    after = contents(folder)
    assert {path for path in before if before[path] != after.get(path)} <= {folder / "run.log"}


def test_a_finished_run_without_checkpoints_keeps_its_rounds(tmp_path):
    given = ("output.checkpoint_every=0",)
    record = run(tmp_path, "n", *given, rounds=1)
    before = contents(record.folder)
    with pytest.raises(ConfigError, match="has no usable checkpoint, so it cannot go on"):
        run(tmp_path, "n", *given, rounds=2, resume=True)
    assert contents(record.folder) == before


def test_a_run_that_lost_its_manifest_is_not_removed(stopped, monkeypatch):
    folder = stopped(2, 2)
    (folder / "manifest.json").unlink()
    monkeypatch.setattr("raysim.simulation.make_executor", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resume(folder)
    assert (folder / "checkpoints" / "round-00002.npz").is_file()


def test_a_round_that_was_not_tested_cannot_be_the_last_one(tmp_path):
    given = ("evaluation.every=3",)
    record = run(tmp_path, "e", *given, rounds=3)
    (record.folder / "checkpoints" / "round-00003.json").unlink()
    (record.folder / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"rounds: 2, but that round of .* was not tested"):
        run(tmp_path, "e", *given, rounds=2, resume=True)


def test_seconds_are_of_the_whole_run(stopped):
    folder = stopped(2, 2)
    before = sum(raysim.load(folder).rounds["round_s"].to_pylist())
    assert before < resume(folder).result["seconds"]


def test_a_damaged_checkpoint_is_passed_by(whole, stopped):
    folder = stopped(3, 3)
    (folder / "checkpoints" / "round-00003.npz").write_bytes(b"cut")
    record = resume(folder)
    assert record.result["resumed_after"] == [2]
    assert checksums(record) == checksums(whole)


def test_more_rounds_than_before(whole, stopped, tmp_path):
    longer = run(tmp_path, "b", "algorithm.name=scaffold", "weighting.name=fedvg", rounds=4)
    folder = stopped(3, 3)
    record = resume(folder, "rounds=4")
    assert checksums(record) == checksums(longer)
    assert raysim.load(folder).config.rounds == 4


def test_a_finished_run_is_left_as_it_is(whole):
    before = contents(whole.folder)
    record = resume(whole.folder)
    assert record.result == whole.result
    assert contents(whole.folder) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("client.optimizer.lr=0.5", r"client\.optimizer\.lr: 0\.5, but the run in .* was begun with 0\.05"),
        ("execution.threads=2", r"execution\.threads: 2, but .* begun with 1"),
        ("algorithm.name=fedavg", r"algorithm\.name: fedavg, but .* begun with scaffold"),
        ("rounds=1", r"rounds: 1, but 2 are done"),
    ],
)
def test_another_run_is_refused_and_nothing_is_touched(stopped, override, message):
    folder = stopped(2, 2)
    before = contents(folder)
    with pytest.raises(ConfigError, match=message):
        resume(folder, override)
    assert contents(folder) == before


@pytest.mark.parametrize(("section", "name"), [("data", "hash"), ("data", "validation_hash"), ("partition", "hash")])
def test_other_data_are_refused(stopped, section, name):
    folder = stopped(2, 2)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    assert len(manifest[section][name]) >= 16
    manifest[section][name] = "0" * 32
    path.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{section}: {name} \w+, but .* begun with 0000"):
        resume(folder)


@pytest.mark.parametrize("override", ["name=other", "output.dir=elsewhere"])
def test_a_run_does_not_move_when_it_is_resumed(stopped, override):
    result = CliRunner().invoke(app, ["resume", str(stopped(2, 2)), override])
    assert result.exit_code == 2
    assert f"{override}: a resumed run stays in its folder" in result.output


def test_a_cosine_rate_fixes_the_number_of_rounds(tmp_path):
    given = ("client.optimizer.schedule.name=cosine",)
    run(tmp_path, "c", *given, rounds=1)
    with pytest.raises(ConfigError, match=r"rounds: 2, .* begun with 1, and client\.optimizer\.schedule: cosine"):
        run(tmp_path, "c", *given, rounds=2, resume=True)


def test_a_run_that_is_being_written_is_refused(stopped):
    folder = stopped(2, 2)
    with FileLock(folder / ".lock"), pytest.raises(ConfigError, match="another process is writing this run"):
        resume(folder)


def test_where_there_are_no_locks_it_says_so_and_goes_on(whole, stopped, monkeypatch, caplog):
    def no_locks(self):
        raise OSError("Function not implemented")

    monkeypatch.setattr(FileLock, "acquire", no_locks)
    folder = stopped(2, 2)
    assert checksums(resume(folder)) == checksums(whole)
    assert "cannot be locked (Function not implemented); see that no other process writes this run" in caplog.text


def test_an_empty_folder_holds_no_run(tmp_path):
    (tmp_path / "none").mkdir()
    result = CliRunner().invoke(app, ["resume", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "is not a run folder" in result.output
    assert list((tmp_path / "none").iterdir()) == []


def test_killed_before_anything_was_written_it_begins(tmp_path):
    for name in (".lock", "run.log"):
        (tmp_path / "early").mkdir(exist_ok=True)
        (tmp_path / "early" / name).touch()
    assert run(tmp_path, "early", rounds=1, resume=True).result["status"] == "finished"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not a run folder"):
        run(tmp_path, "mine", rounds=1, resume=True)


def test_an_existing_folder_is_refused_without_resume_and_the_message_names_it(whole):
    with pytest.raises(ConfigError, match="raysim resume"):
        raysim.run(whole.config)


def test_each_step_is_in_tensorboard_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = ("output.tensorboard=true",)
    record = run(tmp_path, "t", *board)
    (record.folder / "result.json").unlink()
    (record.folder / "checkpoints" / "round-00003.json").unlink()
    run(tmp_path, "t", *board, resume=True)
    events = EventAccumulator(str(record.folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("global/accuracy")] == [0, 1, 2, 3]
    assert len(list((record.folder / "tensorboard").iterdir())) == 1


def test_a_run_that_begins_again_replaces_its_events(tmp_path):
    given = ("output.tensorboard=true", "output.checkpoint_every=0")
    record = run(tmp_path, "t", *given, rounds=1)
    (record.folder / "result.json").unlink()
    run(tmp_path, "t", *given, rounds=1, resume=True)
    assert len(list((record.folder / "tensorboard").iterdir())) == 1


def test_a_moved_folder_goes_on_where_it_is(whole, stopped, tmp_path):
    folder = stopped(2, 2).rename(tmp_path / "moved é")
    result = CliRunner().invoke(app, ["resume", str(folder)])
    assert result.exit_code == 0, result.output
    assert checksums(raysim.load(folder)) == checksums(whole)
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_killed_in_mid_round_and_run_again(tmp_path):
    """The command line, a real SIGKILL, and `run --resume` with the same words."""
    given = settings(tmp_path, "k", *TINY, "algorithm.name=scaffold", rounds=40, backend="serial")
    command = [sys.executable, "-m", "raysim", "run", str(QUICKSTART), *given, "--resume"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    rows = tmp_path / "k" / "rounds"
    deadline = time.monotonic() + 120
    while len(list(rows.glob("0*.parquet")) if rows.exists() else []) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert raysim.load(tmp_path / "k").result == {"status": "running"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "resumed after round" in done.stderr
    whole = run(tmp_path, "w", "algorithm.name=scaffold", rounds=40)
    assert checksums(raysim.load(tmp_path / "k")) == checksums(whole)


@pytest.mark.ray
def test_on_ray_it_is_the_same(tmp_path, local_ray):
    config = resolve(load_config(QUICKSTART, settings(tmp_path, "r", *TINY, rounds=2)).as_dict())
    raysim.run(config)
    record = raysim.run(load_config(tmp_path / "r" / "config.yaml", ["rounds=3"]), resume=True)
    assert checksums(record) == checksums(run(tmp_path, "s"))
