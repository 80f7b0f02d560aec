"""The Ray executor: the same bits as `serial`, whatever the number of processes and whoever dies."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

import raysim
from raysim.cohort import Coefficients
from raysim.config import load_config
from raysim.errors import ConfigError, RunError
from raysim.execution.base import Broadcast, WorkItem
from raysim.preparation import prepare
from raysim.recording.progress import Silent
from raysim.simulation import make_executor, sample_cohort
from runs import QUICKSTART, SIX_CLIENTS, KillOnLog, checksums, run, settings

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(scope="module")
def serial(tmp_path_factory) -> raysim.RunRecord:
    return run(tmp_path_factory.mktemp("serial"), "quickstart", backend="serial")


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("scorers", [1, 2])
def test_equal_checksums_for_any_number_of_actors(tmp_path, serial, clients, scorers):
    record = run(tmp_path, "q", f"execution.client_actors={clients}", f"execution.scorer_actors={scorers}")
    assert checksums(record) == checksums(serial)
    table = record.clients
    assert len(table) == 50
    assert len(set(table["pid"].to_pylist())) == clients
    assert len(set(table["scorer_pid"].to_pylist())) == scorers
    assert set(table["pid"].to_pylist()).isdisjoint(table["scorer_pid"].to_pylist())
    serial_rows = serial.clients.select(["client_id", "score", "weight", "train_loss"]).to_pylist()
    assert table.select(["client_id", "score", "weight", "train_loss"]).to_pylist() == serial_rows


def test_a_session_starts_its_pools_once_and_anew_for_another_shape(tmp_path):
    few = ["client.per_round=2", "client.local_epochs=1", "output.tensorboard=false"]
    with raysim.Session() as session:

        def pids(name, *overrides):
            record = raysim.run(QUICKSTART, settings(tmp_path, name, *few, *overrides, rounds=1), session=session)
            return {pid for column in ("pid", "scorer_pid") for pid in record.clients[column].to_pylist()}

        one = ["execution.client_actors=1", "execution.scorer_actors=1"]
        first = pids("first", *one)
        assert pids("second", *one, "seed=1", "model.name=mlp") == first
        assert pids("third", "execution.client_actors=1", "execution.scorer_actors=2").isdisjoint(first)
        with pytest.raises(RunError, match="non-finite"):
            pids("fourth", *one, "client.optimizer.lr=1e30", "execution.on_nonfinite=abort")
        assert len(pids("fifth", *one)) == 2, "after an error the pools are new"


def test_equal_checksums_when_every_client_has_its_own_actor(tmp_path):
    reference = run(tmp_path, "serial", *SIX_CLIENTS, backend="serial")
    pool = run(tmp_path, "two", *SIX_CLIENTS, "execution.client_actors=2")
    each = run(tmp_path, "each", *SIX_CLIENTS, "execution.client_actors=per_client")
    assert checksums(reference) == checksums(pool) == checksums(each)
    owners = set(zip(each.clients["client_id"].to_pylist(), each.clients["actor"].to_pylist(), strict=True))
    assert owners == {(k, f"client-{k}") for k in range(6)}


def test_equal_checksums_after_a_client_actor_and_a_scorer_were_killed(tmp_path, serial, monkeypatch):
    """Each is killed while its unit runs; the sleep on the first attempt makes sure that it still does."""
    trained, scored = sample_cohort(0, 2, 20, 10)[3], sample_cohort(0, 3, 20, 10)[5]
    monkeypatch.setenv(
        "RAYSIM_FAULT",
        f"kind=sleep,seconds=60,client={trained},round=2,attempt=1;"
        f"kind=sleep,seconds=60,client={scored},round=3,stage=score,attempt=1",
    )
    log = tmp_path / "killed" / "run.log"
    killers = [
        KillOnLog(log, rf"round 2 client {trained} train on \S+ pid (?P<pid>\d+) attempt 1"),
        KillOnLog(log, rf"round 3 client {scored} score on \S+ pid (?P<pid>\d+) attempt 1"),
    ]
    record = run(tmp_path, "killed", "execution.client_actors=2", "execution.scorer_actors=2")
    assert all(killer.killed for killer in killers)
    assert checksums(record) == checksums(serial)
    rows = {(r["round_num"], r["client_id"]): r for r in record.clients.to_pylist()}
    assert (rows[2, trained]["attempt"], rows[2, trained]["status"]) == (2, "ok")
    assert rows[2, trained]["pid"] != killers[0].killed
    assert (rows[3, scored]["scorer_attempt"], rows[3, scored]["status"]) == (2, "ok")
    assert record.rounds["retries"].to_pylist()[1:3] == [1, 1]


def test_an_actor_killed_at_every_attempt_costs_one_client_not_the_run(tmp_path, monkeypatch):
    client = sample_cohort(0, 1, 6, 6)[2]
    monkeypatch.setenv("RAYSIM_FAULT", f"kind=kill,client={client},round=1")
    record = run(tmp_path, "k", *SIX_CLIENTS, "execution.client_actors=2", "execution.retries=1", rounds=2)
    rows = [r for r in record.clients.to_pylist() if r["client_id"] == client]
    assert [r["status"] for r in rows] == ["failed", "ok"]
    assert "actor died (2 attempts)" in rows[0]["reason"]
    assert record.rounds["failed"].to_pylist() == [1, 0]


def test_errors_and_time_outs_of_clients_are_recorded_and_the_round_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=raise,client=1,round=1;kind=sleep,seconds=300,client=4,round=1")
    started = time.monotonic()
    record = run(tmp_path, "e", *SIX_CLIENTS, "execution.client_actors=2", "client.timeout_s=4", rounds=2)
    assert time.monotonic() - started < 60
    rows = {(r["round_num"], r["client_id"]): r for r in record.clients.to_pylist()}
    assert rows[1, 1]["status"] == "failed"
    assert "RuntimeError: fault asked for: client 1, round 1, train" in rows[1, 1]["reason"]
    assert rows[1, 4]["reason"] == "train: timed out after 4 s"
    assert rows[2, 1]["status"] == rows[2, 4]["status"] == "ok"
    log = (record.folder / "run.log").read_text()
    assert log.count("Traceback (most recent call last)") <= 1 <= log.count("fault asked for")
    assert sum(r["weight"] or 0 for (number, _), r in rows.items() if number == 1) == pytest.approx(1)


def test_a_round_without_any_usable_update_ends_the_run_with_grouped_reasons(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=raise,round=2")
    with pytest.raises(RunError, match=r"round 2: 0 usable updates.*6 x train: .*fault asked for|6 x|1 x train"):
        run(tmp_path, "a", *SIX_CLIENTS, "execution.client_actors=2")
    record = raysim.load(tmp_path / "a")
    assert record.result["status"] == "failed"
    assert record.rounds["round_num"].to_pylist() == [1], "the finished round is kept"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("execution.client.num_cpus=4", "execution.client.num_cpus: 4 asked for, but the cluster has 2"),
        ("execution.client.num_gpus=3", "execution.client.num_gpus: 3 asked for, but the cluster has 2"),
        ("execution.scorer.num_cpus=3", "execution.scorer.num_cpus: 3 asked for"),
        ("execution.client_actors=per_client", "per_client needs 20 x 0.5 CPU"),
    ],
)
def test_impossible_resources_are_an_error_at_once(tmp_path, override, message):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "r", override)
    assert time.monotonic() - started < 10
    assert not (tmp_path / "r").exists()


def test_resources_that_others_hold_are_waited_for_with_a_limit(tmp_path):
    import ray

    @ray.remote(num_cpus=1.8)
    class Holder:
        def hold(self) -> None:
            return None

    holder = Holder.remote()
    ray.get(holder.hold.remote())
    try:
        with pytest.raises(ConfigError, match=r"2 CPU needed, 0\.2 free.*after 2 s.*resource_timeout_s"):
            run(tmp_path, "w", "execution.resource_timeout_s=2")
    finally:
        ray.kill(holder)


def test_updates_stay_away_from_the_driver_until_they_are_summed_one_at_a_time(tmp_path, monkeypatch):
    """LeNet-5's update is 178 kB, above Ray's inline limit of 100 kB."""
    import ray

    fetched = []

    def get(ref, **options):
        fetched.append(real(ref, **options))
        return fetched[-1]

    real = ray.get
    monkeypatch.setattr(ray, "get", get)
    prepared = prepare(load_config(QUICKSTART, settings(tmp_path, "u", *SIX_CLIENTS, "execution.client_actors=2")))
    state = prepared.initial
    items = [WorkItem(k, k, None, prepared.population.num_examples[k]) for k in range(6)]
    with contextlib.closing(make_executor(prepared, Silent())) as executor:
        outcomes, _, _ = executor.run_cohort(Broadcast.of(1, state.server, state.buffers), items, Silent())
        assert [outcome.status for outcome in outcomes] == ["ok"] * 6
        assert not [value for value in fetched if isinstance(value, dict) and "delta" in value]
        executor.sums(outcomes, {"delta": Coefficients(np.full(6, 1 / 6))})
        assert len([value for value in fetched if isinstance(value, dict) and "delta" in value]) == 6


def test_fractional_gpus_are_shared_in_equal_parts(tmp_path):
    """Two GPUs in Ray's books for 2 clients and 2 scorers; without CUDA the actors compute on the CPU."""
    overrides = ("execution.client.num_gpus=auto", "execution.scorer.num_gpus=auto", "execution.scorer_actors=2")
    record = run(tmp_path, "g", *SIX_CLIENTS, "client.per_round=2", *overrides, rounds=1)
    plan = record.manifest["plan"]
    assert plan["client_actors"] == 2
    assert plan["client"]["num_gpus"] == plan["scorer"]["num_gpus"] == "1/2"
    serial = run(tmp_path, "s", *SIX_CLIENTS, "client.per_round=2", rounds=1, backend="serial")
    assert checksums(record) == checksums(serial)


def test_size_weights_need_no_scoring(tmp_path):
    serial = run(tmp_path, "s", "weighting.name=size", rounds=2, backend="serial")
    record = run(tmp_path, "r", "weighting.name=size", rounds=2)
    assert checksums(record) == checksums(serial)
    assert record.clients["score"].null_count == 20
    assert record.rounds["scorer_utilisation"].null_count == 2


def test_a_lost_argument_is_told_from_an_error_of_the_unit(monkeypatch):
    """Ray raises an error that is both a RayTaskError and an ObjectLostError when an argument is gone."""
    import ray
    from ray.exceptions import ObjectLostError, RayTaskError

    from raysim.execution.ray_backend import RayBackend
    from raysim.execution.ray_pool import InputLost, UnitFailed

    def result_of(cause):
        def get(ref):
            raise RayTaskError("score", "Traceback: ...", cause).as_instanceof_cause()

        monkeypatch.setattr(ray, "get", get)
        return RayBackend(None, None, None, {}).result("ref")

    with pytest.raises(InputLost):
        result_of(ObjectLostError("00" * 28, "", ""))
    with pytest.raises(UnitFailed):
        result_of(ValueError("no"))


def test_an_update_that_is_lost_before_the_sum_is_made_again(tmp_path, monkeypatch):
    """The client trains again, drawing the same numbers, when its update cannot be read; no reference of it stays behind."""
    from ray.exceptions import ObjectLostError

    prepared = prepare(load_config(QUICKSTART, settings(tmp_path, "u", *SIX_CLIENTS, "execution.client_actors=2")))
    state = prepared.initial
    items = [WorkItem(k, k, None, prepared.population.num_examples[k]) for k in range(6)]
    coefficients = {"delta": Coefficients(np.full(6, 1 / 6))}
    with contextlib.closing(make_executor(prepared, Silent())) as executor:
        outcomes, _, _ = executor.run_cohort(Broadcast.of(1, state.server, state.buffers), items, Silent())
        whole = executor.sums(outcomes, coefficients)["delta"]
        fetch, lost = executor.fetch, [outcomes[3].update]

        def lose_once(handle):
            if handle in lost:
                lost.remove(handle)
                raise ObjectLostError("00" * 28, "", "")
            return fetch(handle)

        monkeypatch.setattr(executor, "fetch", lose_once)
        assert executor.sums(outcomes, coefficients)["delta"].tobytes() == whole.tobytes()
        assert lost == []
        assert executor._backend._vectors == {}


def test_scoring_that_runs_over_its_time_is_done_by_another_scorer(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=sleep,seconds=300,client=2,round=1,stage=score,attempt=1")
    record = run(tmp_path, "s", *SIX_CLIENTS, "execution.scorer_actors=2", "execution.unit_timeout_s=5", rounds=1)
    row = record.clients.to_pylist()[2]
    assert (row["status"], row["scorer_attempt"]) == ("ok", 2)


def test_idle_scorers_share_a_model_and_the_bits_are_those_of_one(tmp_path):
    """Three shards for two scorers: some models are scored shard by shard; their sums are merged in order."""
    sharded = (*SIX_CLIENTS, "scoring.shards=3", "scoring.batch_size=16", "execution.scorer_actors=2")
    serial = run(tmp_path, "s", *sharded, rounds=2, backend="serial")
    record = run(tmp_path, "r", *sharded, "execution.client_actors=1", rounds=2)
    assert checksums(record) == checksums(serial)
    log = (record.folder / "run.log").read_text()
    assert log.count(" finish on scorer-") * 3 == log.count(" accumulate on scorer-") > 0
    scores = record.clients.select(["round_num", "client_id", "score", "validation_loss"]).to_pylist()
    assert scores == serial.clients.select(["round_num", "client_id", "score", "validation_loss"]).to_pylist()
    assert all(row["score_s"] > 0 and row["queue_s"] >= 0 for row in record.clients.to_pylist())


def test_several_models_are_scored_in_one_call_and_an_error_stays_with_its_client(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=raise,client=2,round=1,stage=score")
    fused = (*SIX_CLIENTS, "execution.scorer_actors=1", "execution.clients_per_call=3")
    record = run(tmp_path, "m", *fused, rounds=1)
    monkeypatch.delenv("RAYSIM_FAULT")
    serial = run(tmp_path, "s", *SIX_CLIENTS, rounds=1, backend="serial")
    assert "clients " in (record.folder / "run.log").read_text().partition(" score_many on ")[0].splitlines()[-1]
    rows, expected = (r.clients.to_pylist() for r in (record, serial))
    assert [row["status"] for row in rows] == ["ok", "ok", "failed", "ok", "ok", "ok"]
    assert "fault asked for: client 2" in rows[2]["reason"]
    for row, other in zip(rows, expected, strict=True):
        if row["client_id"] != 2:
            assert row["score"] == pytest.approx(other["score"], rel=1e-4)
