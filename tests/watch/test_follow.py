"""What is known of a run from its folder, whatever state that is in."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from raysim.watch.follow import QUIET_ROUNDS, STARTING_S, Follower, quantiles
from runs import TINY, run


class Clock:
    """Real time, moved on by hand."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


def test_a_finished_run_is_read_once(folder: Path):
    follower = Follower(folder)
    assert follower.look(10)
    assert (follower.state, follower.complete, follower.total, sorted(follower.rounds)) == (
        "finished",
        True,
        3,
        [1, 2, 3],
    )
    assert [row["round_num"] for row in follower.clients] == [3] * 4
    assert sum(row["weight"] for row in follower.clients) == pytest.approx(1)
    assert follower.eta_s is None
    assert follower.elapsed_s == pytest.approx(sum(row["round_s"] for row in follower.rows), rel=0.5)
    for path in folder.glob("*/0000[12].parquet"):
        path.write_bytes(b"not read again")
    assert not follower.look(10)
    assert follower.unreadable == []


def test_rounds_come_one_by_one_and_the_end_is_told_by_the_result(folder: Path):
    kept = folder.with_name("later")
    shutil.move(folder / "rounds", kept)
    result = (folder / "result.json").read_bytes()
    (folder / "result.json").unlink()
    (folder / "rounds").mkdir()
    follower = Follower(folder)
    follower.look()
    assert (follower.state, follower.newest, follower.log[-1].split()[3:5]) == ("starting", None, ["ready", "for"])
    for number in (1, 2, 3):
        shutil.copy(kept / f"{number:05d}.parquet", folder / "rounds")
        assert follower.look()
        assert (follower.state, follower.newest["round_num"]) == ("running", number)
        assert follower.eta_s == pytest.approx((3 - number) * follower.usual_s, abs=1.0)
    (folder / "result.json").write_bytes(result)
    assert follower.look()
    assert follower.state == "finished"


def test_silence_is_judged_by_the_usual_time_of_a_round(folder: Path):
    (folder / "result.json").unlink()
    clock = Clock()
    follower = Follower(folder, now=clock)
    follower.look()
    assert follower.state == "running"
    clock.ahead = 29
    assert follower.state == "running"  # Rounds of milliseconds: never before half a minute.
    clock.ahead = 31
    assert (follower.state, follower.eta_s) == ("no news", None)
    for number, row in follower.rounds.items():
        follower.rounds[number] = {**row, "round_s": 100.0}
    clock.ahead = 100 * QUIET_ROUNDS - 5
    assert follower.state == "running"
    clock.ahead = 100 * QUIET_ROUNDS + 5
    assert follower.state == "no news"
    os.utime(folder / "run.log", (clock(), clock()))  # A unit of work is logged.
    follower.look()
    assert follower.state == "running"


def test_a_server_whose_clock_is_behind_does_not_silence_a_run_that_writes(folder: Path):
    (folder / "result.json").unlink()
    past = time.time() - 3600
    for path in (folder, *folder.iterdir()):
        os.utime(path, (past, past))
    follower = Follower(folder)
    follower.look()
    assert follower.state == "no news"
    os.utime(folder / "rounds", (past + 1, past + 1))
    follower.look()
    assert follower.state == "running"


def test_starting_takes_longer_than_a_round(tmp_path: Path):
    (tmp_path / "run.log").write_text("2026-01-01 INFO plan\n", encoding="utf-8")
    clock = Clock()
    follower = Follower(tmp_path, now=clock)
    follower.look()
    clock.ahead = STARTING_S - 5
    assert follower.state == "starting"
    clock.ahead = STARTING_S + 5
    assert follower.state == "no news"


@pytest.mark.parametrize("name", ["rounds/00003.parquet", "clients/00003.parquet", "result.json", "config.yaml"])
def test_half_a_file_is_named_and_read_when_it_is_whole(folder: Path, name: str):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2] if name != "config.yaml" else b"name: 'x")
    follower = Follower(folder)
    follower.look(10)
    assert [text.startswith(f"{name}: ") for text in follower.unreadable] == [True]
    (folder / name).write_bytes(whole)
    follower.look(10)
    assert follower.unreadable == []
    assert (len(follower.rounds), len(follower.clients), follower.state, follower.total) == (3, 4, "finished", 3)


def test_a_resumed_run_goes_on_although_the_old_result_is_still_there(folder: Path):
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    (folder / "result.json").write_text(
        json.dumps({**result, "status": "interrupted", "rounds_done": 2}), encoding="utf-8"
    )
    later = time.time() + 1
    os.utime(folder / "rounds" / "00003.parquet", (later, later))
    follower = Follower(folder)
    follower.look(10)
    assert follower.state == "running"
    (folder / "rounds" / "00003.parquet").unlink()  # A copy of the folder that was made before.
    follower.look(10)
    assert follower.state == "interrupted"
    assert sorted(follower.rounds) == [1, 2]


def test_files_that_vanish_are_no_error(folder: Path):
    follower = Follower(folder)
    follower.look(10)
    shutil.rmtree(folder)
    follower.look(10)
    assert follower.rounds == {}


def test_many_rounds_are_read_in_several_looks_the_newest_first(folder: Path):
    follower = Follower(folder)
    follower.look(0.0)
    assert (sorted(follower.rounds), follower.complete) == ([3], False)
    follower.look(0.0)
    follower.look(0.0)
    assert follower.complete


def test_reasons_of_the_latest_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    faults = [f"kind=nan,client={client},round={client % 3 + 1}" for client in range(6)]
    monkeypatch.setenv("RAYSIM_FAULT", ";".join(faults))
    record = run(tmp_path, "faulty", *TINY, "client.per_round=6", rounds=3, backend="serial")
    follower = Follower(record.folder)
    follower.look(10)
    assert [(row["round_num"], row["client_id"], row["status"]) for row in follower.faults] == [
        (3, 2, "excluded"),
        (3, 5, "excluded"),
        (2, 1, "excluded"),
        (2, 4, "excluded"),
        (1, 0, "excluded"),
        (1, 3, "excluded"),
    ]
    assert "non-finite" in follower.faults[0]["reason"]


def test_quantiles_are_numpys():
    import numpy as np

    values, at = [3.0, 1.0, 10.0, 4.5], [0.0, 0.1, 0.5, 0.9, 1.0]
    assert quantiles(values, at) == pytest.approx(np.quantile(values, at).tolist(), rel=1e-12)
    assert quantiles([2.0], at) == [2.0] * 5
