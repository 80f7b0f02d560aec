from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raysim.recording.tables import read_table

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "cluster" / "local.sh"
CHECKSUMS = ["params_checksum", "buffers_checksum", "server_checksum", "clients_checksum"]
LIMIT_S = 200


@dataclass(frozen=True)
class Cluster:
    """A cluster of `local.sh` with a home, ports and folder of its own.

    Attributes:
        folder: Short, for the sockets in it.
        environment: For everything that talks to it.
    """

    folder: Path
    environment: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environment['RAYSIM_DASHBOARD_PORT']}"

    def script(self, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run([str(SCRIPT), command], self.environment | environment)

    def submission(self, *arguments: str) -> list[str]:
        """The command that runs raysim as a job, to its end; the working folder is a copy of `configs/` alone."""
        command = ["ray", "job", "submit", "--address", self.url, "--working-dir", str(self.folder / "project"), "--"]
        return [*command, "raysim", *arguments]

    def processes(self) -> list[str]:
        """Command lines that name the cluster's folder."""
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # Ended meanwhile.
                continue
            if f"{self.folder}/" in text:
                lines.append(f"{path.parent.name}: {text[:200]}")
        return lines


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run to the end, stdout and stderr together."""
    return subprocess.run(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        check=False,
    )


def free_port(first: int) -> int:
    """Below the range from which the system gives ports to others."""
    for port in range(first, first + 1000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port from {first} on")


def make_cluster(folder: Path, *, token: bool) -> Cluster:
    home, project = folder / "home", folder / "project"
    (home / ".ray").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "configs", project / "configs")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "RAYSIM_"))}
    environment |= {
        "HOME": str(home),
        "RAYSIM_CLUSTER_DIR": str(folder / "ray"),
        "RAYSIM_HEAD_PORT": str(free_port(16379)),
        "RAYSIM_DASHBOARD_PORT": str(free_port(18265)),
        "RAYSIM_OBJECT_STORE_MB": "100",
    }
    if token:
        (home / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
        environment["RAY_AUTH_MODE"] = "token"
    return Cluster(folder, environment)


@pytest.fixture
def unused() -> Iterator[Cluster]:
    """A cluster, not started; its user has no token."""
    # Sockets have to lie near the root, pytest's folders are too deep.
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as folder:
        cluster = make_cluster(Path(folder), token=False)
        yield cluster
        cluster.script("stop")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A running cluster whose user has a token, as everybody has who has ever run raysim without a cluster."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as folder:
        cluster = make_cluster(Path(folder), token=True)
        # As a user starts it: `ray start` finds the token by itself.
        environment = {key: value for key, value in cluster.environment.items() if key != "RAY_AUTH_MODE"}
        started = run([str(SCRIPT), "start"], environment)
        try:
            assert started.returncode == 0, started.stdout
            assert f"RAY_AUTH_MODE=token ray job submit --address {cluster.url}" in started.stdout
            yield cluster
        finally:
            stopped = cluster.script("stop")
        assert stopped.returncode == 0, stopped.stdout
        assert cluster.processes() == []


@pytest.mark.parametrize("variable", ["RAYSIM_HEAD_PORT", "RAYSIM_DASHBOARD_PORT"])
def test_taken_port_is_named_with_its_variable(unused: Cluster, variable: str) -> None:
    with socket.create_server(("127.0.0.1", int(unused.environment[variable]))):
        started = unused.script("start")
    assert started.returncode == 1
    assert f"port {unused.environment[variable]} is in use" in started.stdout
    assert variable in started.stdout
    assert unused.processes() == []


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RAYSIM_WORKERS", "two", "positive whole number, got 'two'"),
        ("RAYSIM_OBJECT_STORE_MB", "10", "at least 75"),
        ("RAYSIM_CLUSTER_DIR", "cluster", "absolute path without spaces, got 'cluster'"),
        ("RAYSIM_CLUSTER_DIR", "/tmp/" + "x" * 40, "Ray's socket paths leave room for 38"),
    ],
)
def test_wrong_setting_is_named(unused: Cluster, variable: str, value: str, message: str) -> None:
    started = unused.script("start", **{variable: value})
    assert started.returncode == 1
    assert variable in started.stdout
    assert message in started.stdout


def test_status_and_stop_without_a_cluster(unused: Cluster) -> None:
    assert unused.script("status").returncode == 1
    assert unused.script("stop").returncode == 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_job_gives_the_numbers_of_a_serial_run(cluster: Cluster) -> None:
    results = cluster.folder / "results"
    job = run(
        cluster.submission("run", "configs/quickstart.yaml", "rounds=2", f"output.dir={results}"), cluster.environment
    )
    assert job.returncode == 0, job.stdout
    assert "succeeded" in job.stdout
    assert "3 node(s), 2 CPUs" in job.stdout
    folder = results / "quickstart"
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"
    clients = read_table(folder, "clients")
    assert set(clients["status"].to_pylist()) == {"ok"}
    assert len(set(clients["node"].to_pylist())) == 2

    serial = cluster.folder / "serial"
    file = REPOSITORY / "configs" / "quickstart.yaml"
    ran = run(
        ["raysim", "run", str(file), "rounds=2", "execution.backend=serial", f"output.dir={serial}"],
        cluster.environment,
    )
    assert ran.returncode == 0, ran.stdout
    rounds = [read_table(place, "rounds").select(CHECKSUMS) for place in (folder, serial / "quickstart")]
    assert rounds[0].equals(rounds[1])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rounds=ten", "output.dir=/nowhere"], 'command line: rounds: should be a whole number, got "ten"'),
        (["output.dir=here"], "output.dir: here is relative"),
    ],
)
def test_wrong_configuration_fails_the_job_with_its_message(
    cluster: Cluster, overrides: list[str], message: str
) -> None:
    job = run(cluster.submission("run", "configs/quickstart.yaml", *overrides), cluster.environment)
    assert job.returncode == 1
    assert "failed with exit code 2" in job.stdout
    assert message in job.stdout
    assert "Traceback" not in job.stdout


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stop_ends_a_running_job_and_nothing_else(unused: Cluster) -> None:
    """Here without a token. The bystander names the cluster's folder and is no part of it."""
    started = unused.script("start")
    assert started.returncode == 0, started.stdout
    assert "\n  ray job submit" in started.stdout
    status = unused.script("status")
    assert status.returncode == 0, status.stdout
    again = unused.script("start")
    assert again.returncode == 1
    assert "running already" in again.stdout

    results = unused.folder / "results"
    running = subprocess.Popen(
        unused.submission("run", "configs/quickstart.yaml", "rounds=1000", f"output.dir={results}"),
        env=unused.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(results.glob("quickstart/rounds/*.parquet")):
            assert time.monotonic() < deadline, "no round within 120 s"
            assert running.poll() is None
            time.sleep(0.2)
        with subprocess.Popen(
            ["tail", "-f", str(unused.folder / "ray" / "head.log")], stdout=subprocess.DEVNULL
        ) as bystander:
            stopped = unused.script("stop")
            assert bystander.poll() is None
            bystander.kill()
    finally:
        running.kill()
        running.wait()
    assert stopped.returncode == 0, stopped.stdout
    assert "stopped 3 nodes" in stopped.stdout
    assert unused.processes() == []
    assert unused.script("status").returncode == 1
    result = json.loads((results / "quickstart" / "result.json").read_text())
    assert result["status"] == "interrupted"
    assert 1 <= result["rounds_done"] < 1000
