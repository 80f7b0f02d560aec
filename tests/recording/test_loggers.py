from __future__ import annotations

import http.server
import json
import os
import threading
import time

import pytest

import runs
from raysim.errors import ConfigError, RunError
from raysim.recording import loggers
from raysim.recording.logger import RunInfo
from raysim.recording.loggers import Loggers, check_installed, open_loggers
from raysim.runrecord import load

FEW = ("model.name=mlp", "client.per_round=3", "client.local_epochs=1", "output.checkpoint_every=0")


def foreign(test):
    """Of another package: slow to load, and what packages warn each other of is not for us."""
    ignored = ("Deprecation", "PendingDeprecation", "Future", "Resource")
    for kind in (*(f"{name}Warning" for name in ignored), "pytest.PytestUnraisableExceptionWarning"):
        test = pytest.mark.filterwarnings(f"ignore::{kind}")(test)
    return pytest.mark.slow(test)


def names(folder, **fields):
    values = {"name": "run", "rounds": 2, "class_names": ["a"], "unit_names": ["u"], "client_sizes": [1, 2]}
    return RunInfo(folder=folder, **{**values, **fields})


class Recording:
    """Remembers what it is told; `error` is raised from the second round on, after `delay` seconds."""

    def __init__(self, error=None, delay=0.0):
        self.told, self._error, self._delay = [], error, delay

    def write_round(self, round_record, client_records):
        self.told.append(round_record.round_num)
        if round_record.round_num >= 2:
            time.sleep(self._delay)
            if self._error:
                raise self._error

    def finish(self, result):
        self.told.append(result and result["status"])


@pytest.mark.parametrize("kind", [loggers._Guarded, loggers._InBackground])
def test_a_logger_that_fails_is_told_of_once_and_the_others_go_on(kind, make_round):
    said, broken, sound = [], Recording(ConnectionError("server away\nlong story")), Recording()
    both = Loggers([kind("Broken", broken, said.append), kind("Sound", sound, said.append)])
    for round_num in range(5):
        both.write_round(make_round(round_num), [])
    both.finish({"status": "finished"})
    assert sound.told == [0, 1, 2, 3, 4, "finished"]
    assert broken.told == [0, 1, 2, None]  # It is let go.
    assert said == [
        "Broken is not written any more: ConnectionError: server away. The run goes on; its tables are complete."
    ]


def test_no_round_waits_for_a_slow_logger_and_the_end_not_for_ever(make_round, monkeypatch):
    monkeypatch.setattr(loggers, "FINISH_LIMIT_S", 0.2)
    said, slow = [], Recording(delay=5.0)
    group = Loggers([loggers._InBackground("Slow", slow, said.append)])
    started = time.monotonic()
    for round_num in range(4):
        group.write_round(make_round(round_num), [])
    assert time.monotonic() - started < 4.0, "less than one of them takes"
    group.finish({"status": "finished"})
    assert time.monotonic() - started < 3.0
    assert said == [
        "Slow is not written any more: it did not take what was left within 0 s. The run goes on; its tables are complete."
    ]


def test_the_end_comes_once(make_round):
    logger = Recording()
    group = Loggers([loggers._Guarded("One", logger, print)])
    group.finish({"status": "finished"})
    group.finish(None)
    assert logger.told == ["finished"]


def test_a_missing_package_is_found_before_round_1(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_installed(["mlflow", "wandb"])
    assert caught.value.problems == (
        'output.loggers: mlflow is not installed; run: pip install "raysim[mlflow]"',
        'output.loggers: wandb is not installed; run: pip install "raysim[wandb]"',
    )
    with pytest.raises(ConfigError, match="mlflow is not installed"):
        runs.run(tmp_path, "run", "output.loggers=[mlflow]", backend="serial")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_under_tensorboard_does_not_end_the_run(tmp_path, monkeypatch):
    def full(self, *args):
        if args[0].round_num == 2:
            raise RunError("Cannot write tensorboard: No space left on device.")

    monkeypatch.setattr("raysim.recording.tensorboard.TensorBoardWriter.write_round", full)
    record = runs.run(tmp_path, "run", *FEW, rounds=3, backend="serial")
    assert record.result["status"] == "finished"
    assert len(record.rounds) == 3
    log = (record.folder / "run.log").read_text(encoding="utf-8")
    assert log.count("TensorBoard is not written any more: Cannot write tensorboard: No space left on device.") == 1


@foreign
def test_mlflow_has_the_numbers_of_the_tables(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "\u00e9tude 1"
    folder.mkdir()
    record = runs.run(folder, "run", *FEW, "output.loggers=[mlflow]", rounds=2, backend="serial")
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    run_id = json.loads((record.folder / "mlflow.json").read_text(encoding="utf-8"))["run_id"]
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["client.optimizer.lr"] == "0.05"
    accuracy = [(one.step, one.value) for one in client.get_metric_history(run_id, "global/accuracy")]
    assert sorted(accuracy)[1:] == list(enumerate(record.rounds["accuracy"].to_pylist(), 1))
    assert run.data.metrics["result/seconds_per_round"] == pytest.approx(record.result["seconds_per_round"])


def test_names_of_metrics_in_mlflow():
    from raysim.recording.mlflow_logger import metric_name

    tags = [
        "weight/p90",
        "global/recall/a%2Fb",
        "global/recall/Pneumonie \u00e0 (x)",
        "global/recall/.",
        "layer/conv1.0/n",
    ]
    wanted = ["weight/p90", "global/recall/a_252Fb", "global/recall/Pneumonie \u00e0 _28x_29", "global/recall/_2E"]
    assert [metric_name(tag) for tag in tags] == [*wanted, "layer/conv1.0/n"]


class Server:
    """Answers as an MLflow server does, until it is told to be away."""

    def __enter__(self):
        replies = {
            "experiments/get-by-name": {
                "experiment": {"experiment_id": "0", "name": "raysim", "lifecycle_stage": "active"}
            },
            "runs/create": {
                "run": {"info": {"run_id": "a" * 32, "run_uuid": "a" * 32, "experiment_id": "0"}, "data": {}}
            },
        }

        class Handler(http.server.BaseHTTPRequestHandler):
            def reply(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                found = [value for part, value in replies.items() if part in self.path]
                content = json.dumps(found[0] if found else {}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = reply  # noqa: N815

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()


@foreign
def test_an_mlflow_server_that_goes_away(tmp_path, make_round, monkeypatch):
    pytest.importorskip("mlflow")
    said = []
    with Server() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        group = open_loggers(names(tmp_path, config={"seed": 1}), ["mlflow"], said.append)
        group.write_round(make_round(1, loss=1.0), [])
        time.sleep(0.5)
    group.write_round(make_round(2, loss=1.0), [])
    group.finish({"status": "finished", "seconds_per_round": 1.0, "rounds_done": 2})
    (text,) = said
    assert text.startswith("MLflow is not written any more: ")


@foreign
def test_an_mlflow_server_that_is_away_is_found_before_round_1(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"output.loggers: mlflow: http://127.0.0.1:9 cannot be used"):
        runs.run(tmp_path, "run", *FEW, "output.loggers=[mlflow]", backend="serial")
    assert not (tmp_path / "run").exists()


@foreign
def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    record = runs.run(tmp_path, "run", *FEW, "output.loggers=[wandb]", rounds=2, backend="serial")
    assert "not written any more" not in (record.folder / "run.log").read_text(encoding="utf-8")
    assert list((record.folder / "wandb").glob("offline-run-*/*.wandb"))
    assert (record.folder / "wandb.json").is_file()
    wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)  # Its own way to find its process.


@foreign
def test_wandb_without_login_is_found_before_round_1(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"output.loggers: wandb: nobody is logged in; run `wandb login`"):
        open_loggers(names(tmp_path), ["wandb"], print)


def test_what_loggers_are_is_not_part_of_the_results(tmp_path):
    with_events = runs.run(tmp_path, "one", *FEW, rounds=2, backend="serial")
    without = runs.run(tmp_path, "two", *FEW, "output.tensorboard=false", rounds=2, backend="serial")
    assert runs.checksums(with_events) == runs.checksums(without)
    assert os.listdir(with_events.folder / "tensorboard")
    assert load(with_events.folder).result == with_events.result
