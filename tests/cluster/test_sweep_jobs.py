from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.test_local_cluster import REPOSITORY, SCRIPT, Cluster, make_cluster, run

import raysim
from raysim.config import load_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

NASTY = 'it\'s "100%" $HOME `id`\n{"json": [1]} été'
TINY: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits", "train_images": 200},
    "partition": {"clients": 4},
    "model": {"name": "mlp"},
    "client": {"per_round": 2, "local_epochs": 1},
    "output": {"tensorboard": False},
    "execution": {"client": {"num_cpus": 0.1}, "scorer": {"num_cpus": 0.1}, "client_actors": 1, "scorer_actors": 1},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as folder:
        made = make_cluster(Path(folder), token=False)
        started = run([str(SCRIPT), "start"], made.environment)
        try:
            assert started.returncode == 0, started.stdout
            yield made
        finally:
            made.script("stop")
        assert made.processes() == []


def sweep_file(place: Path, **content: Any) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    file = place / "stu dy's é.yaml"
    content = {"run": {**TINY, **content.pop("run", {})}, "output": {"dir": str(place / "out $x")}, **content}
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def command(file: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "raysim", "sweep", str(file), *options]


def points(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))["points"]
    return state


def test_jobs_give_the_numbers_of_runs_here_and_only_what_is_missing_is_run_again(cluster: Cluster) -> None:
    place = cluster.folder / "two words"
    file = sweep_file(
        place,
        list=[{"seed": 0, "data.root": f"/{NASTY}"}, {"seed": 1}, {"seed": 2, "data.train_images": 99999}],
        name="it's 100% $HOME",
    )
    folder = place / "out $x" / "it's 100% $HOME"
    options = ["--submit", cluster.url, "--max-concurrent", "2", "--entrypoint-cpus", "0.1", "--retries", "1"]
    done = run(command(file, *options), cluster.environment)
    assert done.returncode == 3, done.stdout
    first, second, third = points(folder).values()
    assert [row["status"] for row in (first, second, third)] == ["finished", "finished", "failed"]
    # A wrong configuration is not tried again.
    assert third["attempts"] == 1
    assert "data.train_images: 99999, but digits has" in third["reason"]
    assert first["job"].startswith("it_s_100_HOME-")
    assert len(list((folder / "jobs").glob("*.log"))) == 3

    stored = load_config(Path(first["folder"]) / "config.yaml")
    assert stored.data.root == Path(f"/{NASTY}")
    for name, row in points(folder).items():
        if row["status"] == "finished":
            here = raysim.run(
                folder / "points" / f"{name}.yaml", [f"output.dir={place / 'here'}", "execution.backend=serial"]
            )
            result = json.loads((Path(row["folder"]) / "result.json").read_text())
            assert here.result["checksums"] == result["checksums"]

    again = run(command(file, *options), cluster.environment)
    assert again.returncode == 3
    assert "3 points, 2 finished before" in again.stdout
    assert [row["job"] for row in points(folder).values() if row["status"] == "failed"] == [f"{third['job']}-2"]


def test_printed_lines_run_under_bash_and_can_send_the_source(cluster: Cluster) -> None:
    place = cluster.folder / "printed's"
    file = sweep_file(place, seeds=1, run={"data": {**TINY["data"], "root": f"/{NASTY}"}})
    printed = subprocess.run(
        command(file, "--print", "--submit", cluster.url, "--working-dir", str(REPOSITORY)),
        env=cluster.environment,
        text=True,
        capture_output=True,
        timeout=100,
        check=True,
    )
    assert "source for the jobs: " in printed.stderr
    ran = run(["bash", "-c", printed.stdout], cluster.environment)
    assert ran.returncode == 0, ran.stdout
    (point,) = (place / "out $x" / file.stem).glob("seed0-*")
    assert json.loads((point / "result.json").read_text())["status"] == "finished"
    assert load_config(point / "config.yaml").data.root == Path(f"/{NASTY}")
    assert "_ray_pkg_" in json.loads((point / "manifest.json").read_text())["folder"]


def test_interrupted_waiting_leaves_the_job_and_stop_ends_it(cluster: Cluster) -> None:
    place = cluster.folder / "long"
    file = sweep_file(place, seeds=1, run={"rounds": 100_000})
    options = ["--submit", cluster.url]
    waiting = subprocess.Popen(
        command(file, *options), env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    folder = place / "out $x" / file.stem
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob("seed0-*/rounds/*.parquet")):
            assert time.monotonic() < deadline
            assert waiting.poll() is None
            time.sleep(0.2)
        waiting.send_signal(signal.SIGINT)
        said, _ = waiting.communicate(timeout=30)
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 130, said
    assert "submitted jobs go on" in said
    (point,) = folder.glob("seed0-*")
    assert not (point / "result.json").exists()

    # Another call waits for the same job, until it is stopped.
    with subprocess.Popen(
        command(file, *options), env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as second:
        assert second.stdout is not None
        deadline = time.monotonic() + 60
        while "begun as job" not in (line := second.stdout.readline()):
            assert time.monotonic() < deadline
        assert re.search(r"begun as job stu_dy_s_e-[0-9a-f]{8}$", line)
        stopped = run(command(file, *options, "--stop"), cluster.environment)
        assert "1 jobs were ended" in stopped.stdout
        rest, _ = second.communicate(timeout=60)
    assert second.returncode == 3, rest
    assert json.loads((point / "result.json").read_text())["status"] == "interrupted"
    assert {row["status"] for row in points(folder).values()} == {"interrupted"}
    assert "no job of this sweep was running" in run(command(file, *options, "--stop"), cluster.environment).stdout


def test_a_folder_that_a_job_cannot_see_is_named_with_the_node(cluster: Cluster) -> None:
    url = "file:///nowhere/sweep/points/a.yaml"
    job = run(
        ["ray", "job", "submit", "--address", cluster.url, "--", "python", "-m", "raysim", "point", url],
        cluster.environment,
    )
    assert job.returncode == 1
    assert f"node {socket.gethostname()}: /nowhere/sweep has no points/a.yaml" in job.stdout


def test_a_head_that_is_not_there_or_says_nothing_is_told_within_seconds(tmp_path: Path) -> None:
    file = sweep_file(tmp_path / "x", seeds=1)
    environment = make_cluster(tmp_path / "c", token=False).environment
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        code = (
            "from raysim.execution import ray_jobs\nray_jobs.LIMITS_S = (1.0, 2.0)\n"
            f"ray_jobs.Jobs('http://127.0.0.1:{port}')"
        )
        done = run([sys.executable, "-c", code], environment)
        assert f"no Ray dashboard answers at http://127.0.0.1:{port}" in done.stdout
    done = run(command(file, "--submit", f"http://127.0.0.1:{port}"), environment)
    assert done.returncode == 2, done.stdout
    assert f"no Ray dashboard answers at http://127.0.0.1:{port}" in done.stdout
    done = run(command(file, "--submit", f"127.0.0.1:{port}"), environment)
    assert "is no address of a dashboard" in done.stdout
