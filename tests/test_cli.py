from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import raysim
from raysim.cli import app
from raysim.data.partition import Partition
from raysim.errors import ConfigError, RunError
from raysim.execution.work import train_client

TINY = """\
name: tiny
rounds: 2
data: {name: digits}
partition: {clients: 6, alpha: 0.5}
model: {name: mlp}
client: {per_round: 3, local_epochs: 1}
weighting: {name: fedvg}
execution: {backend: serial}
"""
RAY = "execution: {backend: ray, num_cpus: 2, num_gpus: 0, "


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in ("RAYSIM_OUTPUT_DIR", "RAYSIM_DATA_ROOT", "RAYSIM_FAULT", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


def call(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raysim", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fail(error: BaseException) -> Callable[..., None]:
    def run(*_: object, **__: object) -> None:
        raise error

    return run


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def medmnist_like(path: Path, wrong_label: int) -> None:
    labels = np.arange(88) % 11
    labels[5] = wrong_label
    images = np.zeros((88, 28, 28), dtype=np.uint8)
    parts = ("train", "val", "test")
    np.savez(path, **{f"{p}_images": images for p in parts}, **{f"{p}_labels": labels[:, None] for p in parts})


# ---- wrong configurations: found before round 1, explained, nothing left behind ----

WRONG = {
    "unknown key": ("client: {local_epoch: 5}", "client.local_epoch: unknown key; did you mean client.local_epochs?"),
    "unknown section": ("partiton: {alpha: 0.1}", "partiton: unknown key; did you mean partition?"),
    "misspelt weighting": ("weighting: {name: fedgv}", "weighting.name: should be "),
    "misspelt algorithm": ("algorithm: {name: fedagv}", "did you mean fedavg?"),
    "another method's key": ("algorithm: {name: fedavg, mu: 0.1}", "algorithm.mu: unknown key"),
    "text for a number": ("rounds: ten", "rounds: should be a whole number"),
    "alpha zero": ("partition: {alpha: 0}", "partition.alpha: should be greater than 0"),
    "more than all clients": ("client: {per_round: 50}", "client.per_round: 50 exceeds partition.clients: 20"),
    "per_round and fraction": ("client: {per_round: 2, fraction: 0.5}", "client: give per_round or fraction, not both"),
    "a third of a GPU, almost": ("execution: {client: {num_gpus: 0.3}}", "execution.client.num_gpus: must be auto"),
    "unknown data set": ("data: {name: digit}", "(did you mean digits?)"),
    "missing folder": ("data: {name: fashion_mnist, root: /nowhere/at/all}", "data.root: "),
    "missing file": ("data: {name: npz, path: nowhere.npz}", "data.path: "),
    "no file": ("data: {name: npz}", "data.path: missing"),
    "label outside the classes": ("data: {name: npz, path: organamnist.npz}", "labels outside 0..10: 255"),
    "no validation part": ("data: {validation: {source: split}}", "data.validation.source: split needs"),
    "too many clients": (
        "partition: {clients: 100, min_examples: 40}",
        "with min_examples 40 need 4000 examples, but only 1294",
    ),
    "unknown network": (
        "model: {name: lenet6}",
        "model.name: should be mlp or lenet5 or cnn or resnet18 (did you mean lenet5?)",
    ),
    "network without weights": ("model: {name: mlp, pretrained: true}", "model.pretrained: mlp has no"),
    "image too small": ("data: {image_size: 8}", "data.image_size: 8 pixels, but lenet5 takes 20 and more"),
    "batches of one": ("client: {batch_size: 1}", "client.batch_size: 1, but lenet5 has BatchNorm"),
    "too many shards": ("scoring: {shards: 500}", "scoring.shards: 500, but the validation set"),
    "too many CPUs": (RAY + "client: {num_cpus: 64}}", "execution.client.num_cpus: 64 asked for"),
    "no GPU": (RAY + "scorer: {num_gpus: 1}}", "execution.scorer.num_gpus: 1 asked for"),
    "not together": (RAY + "client: {num_cpus: 1.5}, scorer: {num_cpus: 1}}", "execution.client_actors: auto needs"),
    "an actor for each": (RAY + "client_actors: per_client}", "execution.client_actors: per_client needs 20 x"),
    "output is a file": ("output: {dir: tiny.yaml}", "output.dir: cannot create"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_configuration_is_explained_and_leaves_nothing(case, file, tmp_path, monkeypatch):
    text, message = WRONG[case]
    file.write_text(text + ("" if "execution" in text else "\nexecution: {backend: serial}"), encoding="utf-8")
    medmnist_like(tmp_path / "organamnist.npz", wrong_label=255)
    # As in a process that is not connected to Ray; and none is started.
    monkeypatch.setattr("raysim.preparation.starts_ray", lambda settings: settings.backend == "ray")
    monkeypatch.setattr("raysim.simulation.make_executor", lambda *_: pytest.fail("processes were started"))
    before = contents(tmp_path)
    done = call("run", file)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "raysim: " in done.stderr
    assert "Traceback" not in done.output
    assert len(done.output.splitlines()) <= 25
    assert contents(tmp_path) == before
    assert not (tmp_path / "runs").exists()


def test_several_mistakes_are_counted_and_listed(file):
    done = call("run", file, "rounds=ten", "client.local_epoch=5", "partition.alpha=-1")
    assert done.exit_code == 2
    first, *rest = done.stderr.splitlines()
    assert first == "raysim: 3 problems"
    assert [line.split(": ")[1] for line in rest] == ["rounds", "partition.alpha", "client.local_epoch"]
    assert all(line.startswith("  command line: ") for line in rest)


@pytest.mark.parametrize(("error", "status"), [(ConfigError("execution: taken"), 2), (KeyboardInterrupt(), 130)])
def test_what_ends_a_run_before_its_first_round_leaves_no_folder(file, tmp_path, monkeypatch, error, status):
    monkeypatch.setattr("raysim.simulation.make_executor", fail(error))
    assert call("run", file).exit_code == status
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_wrong_fault_is_explained(file, monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=explode")
    done = call("run", file)
    assert done.exit_code == 2
    assert "RAYSIM_FAULT: 'kind=explode' is not kind=kill|raise|sleep|nan" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("text", ["client: {local_epoch: 5}", RAY + "client: {num_cpus: 64}}"])
def test_a_wrong_configuration_ends_the_process_soon(text, file):
    file.write_text(text, encoding="utf-8")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with process("run", file) as running:
        _, errors = running.communicate(timeout=60)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert running.returncode == 2, errors
    assert "Traceback" not in errors
    # Ten seconds for the user; of processor time, since other work may share the machine.
    assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < 10


def test_usage():
    assert call("--version").output == f"raysim {raysim.__version__}\n"
    assert call("run").exit_code == 2
    assert call("run", "nowhere.yaml").exit_code == 2
    assert all(command in call("--help").output for command in ("run", "check", "partition"))


# ---- check and partition ----


def test_check_describes_the_run_and_starts_nothing(file, tmp_path):
    done = call("check", file, "client.fraction=null", "partition.clients=30")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny: fedavg with fedvg weights, mlp on digits, 30 clients, 3 per round, 2 rounds -> ")
    assert lines[1] == "data: digits, 1294 training, 144 validation and 359 test images of 1 x 8 x 8, 10 classes"
    assert lines[2].startswith("partition: dirichlet, 30 clients with ")
    assert lines[2].endswith("; 3 clients per round")
    assert lines[3] == "model: mlp, 55,210 parameters"
    assert lines[4].startswith("scoring: 3.34 images scored per image trained on")
    assert lines[-2:] == ["backend: serial, everything in one process", "ok"]
    assert not (tmp_path / "runs").exists()


def test_check_plans_a_ray_of_its_own(file, monkeypatch):
    monkeypatch.setattr("raysim.execution.ray_plan.starts_ray", lambda _: True)
    settings = ("execution.backend=ray", "execution.num_cpus=2", "execution.num_gpus=0")
    done = call("check", file, *settings)
    assert done.exit_code == 0, done.output
    assert "cluster: 1 node(s), 2 CPUs, 0 GPUs" in done.stdout
    assert "client actors: " in done.stdout
    assert "scorer actors: " in done.stdout


def test_check_finds_what_a_run_would_refuse(file, tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    done = call("check", file)
    assert done.exit_code == 0
    assert f"note: {tmp_path / 'runs' / 'tiny'} exists already; a run would refuse it" in done.stdout
    assert call("check", file, "client.batch_size=1", "model.name=lenet5").exit_code == 2


def test_partition_writes_the_file_and_the_picture(file, tmp_path):
    done = call("partition", file)
    assert done.exit_code == 0, done.output
    path = tmp_path / "runs" / "tiny.partition.parquet"
    partition = Partition.read(path)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "6 clients, 1294 examples, 10 classes" in done.stdout
    (examples,) = [line for line in done.stdout.splitlines() if "examples" in line and "clients" not in line]
    assert str(partition.sizes.min()) in examples
    assert str(partition.sizes.max()) in examples
    assert "label entropy (nats)" in done.stdout
    assert f"hash {partition.content_hash}" in done.stdout


# ---- a whole run ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run of two rounds."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    done = call("run", folder / "tiny.yaml", f"output.dir={folder / 'résultats'}", "name=essai-é [bold]")
    assert done.exit_code == 0, done.output
    assert "essai-é [bold]: fedavg with fedvg weights" in done.stderr
    assert "round 1/2" in done.stderr
    assert "round 2/2" in done.stderr
    assert "Traceback" not in done.output
    assert "accuracy" in done.stdout
    return folder / "résultats" / "essai-é [bold]"


def test_a_run_leaves_all_its_files(finished):
    result = json.loads((finished / "result.json").read_text(encoding="utf-8"))
    assert result["status"] == "finished"
    assert result["rounds_done"] == 2
    assert result["final"]["round"] == 2
    manifest = json.loads((finished / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["plan"]["backend"] == "serial"
    for name in ("config.yaml", "partition.parquet", "partition.png", "run.png", "run.log"):
        assert (finished / name).stat().st_size > 0, name
    for name in ("rounds", "clients", "tensorboard", "checkpoints"):
        assert any((finished / name).iterdir()), name
    assert "ready for round 1 after" in (finished / "run.log").read_text(encoding="utf-8")


def test_a_run_can_be_read(finished):
    record = raysim.load(finished)
    assert record.config.rounds == 2
    assert record.config.folder == finished
    assert [row.round_num for row in record.round_records if row.round_num] == [1, 2]
    clients = record.clients.to_pylist()
    assert len(clients) == 6
    assert {client["status"] for client in clients} == {"ok"}
    assert all(client["score"] > 0 for client in clients)
    assert record.partition.num_clients == 6


def test_a_second_run_into_the_folder_is_refused(finished):
    before = contents(finished)
    done = call("run", finished / "config.yaml", "rounds=1")
    assert done.exit_code == 2
    assert f"output.dir, name: {finished} exists" in done.stderr
    assert contents(finished) == before


def test_the_stored_configuration_repeats_the_run(finished, tmp_path):
    done = call("run", finished / "config.yaml", f"output.dir={tmp_path}", "name=again")
    assert done.exit_code == 0, done.output
    assert raysim.load(tmp_path / "again").result["checksums"] == raysim.load(finished).result["checksums"]


# ---- errors and interruptions ----


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RunError("round 3: no client is left"), 3, "raysim: round 3: no client is left"),
        (ZeroDivisionError("by zero"), 3, "raysim: unexpected ZeroDivisionError: by zero (run again with --debug"),
        (KeyboardInterrupt(), 130, "raysim: interrupted; the finished rounds are kept"),
    ],
)
def test_what_goes_wrong_decides_the_exit_status(file, monkeypatch, error, status, message):
    monkeypatch.setattr("raysim.simulation.run", fail(error))
    done = call("run", file)
    assert done.exit_code == status
    assert message in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(("error", "status"), [(RunError("no client is left"), 3), (ZeroDivisionError("by zero"), 3)])
def test_debug_shows_the_traceback_and_keeps_the_status(file, monkeypatch, error, status):
    monkeypatch.setattr("raysim.simulation.run", fail(error))
    done = call("run", file, "--debug")
    assert done.exit_code == status
    assert "Traceback (most recent call last)" in done.stderr
    assert str(error) in done.stderr.splitlines()[-1]


def test_debug_shows_the_traceback_of_a_wrong_configuration(file):
    done = call("check", "--debug", file, "rounds=ten")
    assert done.exit_code == 2
    assert "Traceback (most recent call last)" in done.stderr


def check_interrupted(folder: Path) -> None:
    record = raysim.load(folder)
    assert record.result["status"] == "interrupted"
    assert record.result["rounds_done"] == 1
    assert [row.round_num for row in record.round_records if row.round_num] == [1]
    assert {client["round_num"] for client in record.clients.to_pylist()} == {1}


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_run_keeps_its_finished_rounds(file, tmp_path, monkeypatch, number, status, word):
    def train_or_interrupt(setup, objective, broadcast, *rest):
        if broadcast.round_num == 2:
            os.kill(os.getpid(), number)
            time.sleep(10)
        return train_client(setup, objective, broadcast, *rest)

    monkeypatch.setattr("raysim.execution.serial.train_client", train_or_interrupt)
    # A shell starts its background jobs with SIGINT ignored, and so would be this test in one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = call("run", file)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == status, done.output
    assert f"raysim: {word}; the finished rounds are kept" in done.stderr
    assert "Traceback" not in done.output
    check_interrupted(tmp_path / "runs" / "tiny")


@pytest.mark.slow
def test_a_terminated_process_ends_soon_and_keeps_its_finished_rounds(file, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=sleep,round=2,seconds=100")
    with process("run", file) as running:
        assert running.stderr is not None
        assert any(line.startswith("round 1/2") for line in running.stderr)
        running.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 143, errors
    assert time.monotonic() - sent < 15
    assert "raysim: terminated; the finished rounds are kept" in errors
    assert "Traceback" not in errors
    check_interrupted(tmp_path / "runs" / "tiny")
