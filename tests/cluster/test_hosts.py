"""Ray across hosts: network namespaces with addresses, process ids and host names of their own, on one switch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import raysim
from runs import QUICKSTART, checksums, run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(500)]

PORT = 6379
QUICK = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""By default Ray takes 15 to 65 s to call a silent node dead."""
COMMANDS = Path(sys.executable).parent


def why_not() -> str | None:
    """What is missing to make network namespaces here."""
    for command in ("ip", "unshare", "nsenter"):
        if shutil.which(command) is None:
            return f"no '{command}' on the PATH"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"rs{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    forked = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    return (made.stderr + forked.stderr).strip() or None


class Hosts:
    """Hosts on one switch, which is a namespace of its own, so that the machine's own network is left alone.

    Args:
        folder: Short, for the sockets in it; every host has a folder there, as if it were its own disk.
        count: Number of hosts; the first is the head.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.names = [f"rs{os.getpid()}h{i}" for i in range(count)]
        self.switch = f"rs{os.getpid()}sw"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        with ExitStack() as undo:
            undo.callback(self.remove)
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
            ip("-n", self.switch, "link", "set", "switch", "up")
            for i, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{i}", "netns", self.switch)
                ip("-n", self.switch, "link", "set", f"port{i}", "master", "switch", "up")
                ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
            undo.pop_all()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start_ray(self, host: int, *options: str) -> None:
        """Ray on a host, until the host is removed; waits until it says that it runs."""
        place = self.folder / f"h{host}"
        place.mkdir()
        where = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if host == 0
            else [f"--address={self.address(0)}:{PORT}"]
        )
        ray = ["ray", "start", "--block", *where, f"--node-ip-address={self.address(host)}", f"--temp-dir={place}"]
        ray += ["--object-store-memory=100000000", "--num-gpus=0", "--disable-usage-stats", *options]
        log = place / "log"
        with log.open("wb") as output:
            # The first process of a process namespace takes all others with it.
            own = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--pid", "--fork", "--kill-child"]
            self._processes[host] = subprocess.Popen(
                [*own, "--mount-proc", "sh", "-c", f'hostname host{host} && exec "$@"', "sh", *ray],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in (text := log.read_text()):
            assert self._processes[host].poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.2)

    def on(self, host: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a host where Ray runs."""
        children = Path(f"/proc/{self._processes[host].pid}/task/{self._processes[host].pid}/children").read_text()
        enter = ["nsenter", f"--target={children.split()[0]}", "--net", "--uts", "--pid", "--mount"]
        with log.open("wb") as output:
            return subprocess.Popen(
                [*enter, f"--wd={self.folder}", *command], env=environment(), stdout=output, stderr=subprocess.STDOUT
            )

    def cut_off(self, host: int) -> None:
        """Pull the host's plug: nothing gets out or in, and nobody is told."""
        ip("-n", self.names[host], "link", "set", "eth0", "down")

    def remove(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        for name in (*self.names, self.switch):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def environment() -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "RAYSIM_"))}
    path = f"{COMMANDS}{os.pathsep}{own.get('PATH', '')}"
    return own | QUICK | {"PATH": path, "RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """A head without CPUs and two workers of one CPU each; the last has a label."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as folder:
        made = Hosts(Path(folder), 3)
        try:
            made.start_ray(0, "--num-cpus=0")
            made.start_ray(1, "--num-cpus=1")
            made.start_ray(2, "--num-cpus=1", "--labels=raysim-role=scorer")
            yield made
        finally:
            made.remove()
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert f"rs{os.getpid()}h" not in left


def raysim_run(hosts: Hosts, name: str, *overrides: str) -> list[str]:
    return [
        *("raysim", "run", str(QUICKSTART), f"name={name}", f"output.dir={hosts.folder}", "rounds=4"),
        *(f"execution.address={hosts.address(0)}:{PORT}", "execution.resource_timeout_s=5", *overrides),
    ]


def test_a_host_that_is_cut_off_in_a_round_changes_no_bit(hosts: Hosts) -> None:
    """Two client and two scorer actors, one of each on either worker, until one of these falls silent in round 2."""
    pools = ["execution.client_actors=2", "execution.scorer_actors=2"]
    output = hosts.folder / "output"
    job = hosts.on(0, raysim_run(hosts, "cut", *pools), output)
    log = hosts.folder / "cut" / "run.log"
    deadline = time.monotonic() + 200
    while not (log.exists() and "round 2 client" in log.read_text()):
        assert job.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    hosts.cut_off(2)
    assert job.wait(200) == 0, output.read_text()

    record = raysim.load(hosts.folder / "cut")
    assert checksums(record) == checksums(run(hosts.folder, "serial", rounds=4, backend="serial"))
    clients = record.clients.to_pandas()
    assert set(clients.status) == {"ok"}
    assert clients[clients.round_num == 1].node.nunique() == 2
    assert clients[clients.round_num == 4].node.nunique() == 1
    lines = log.read_text().splitlines()
    ready = [line.rpartition(" ")[2] for line in lines if "scorer-" in line and " ready: pid" in line]
    assert len(set(ready[:2])) == 2, "the scorers are spread over the hosts"
    assert any("is replaced" in line for line in lines)


def test_scorers_go_to_the_host_with_the_label(hosts: Hosts) -> None:
    output = hosts.folder / "output"
    label = ["execution.scorer.label.raysim-role=scorer", "execution.scorer_actors=2", "execution.client_actors=2"]
    assert hosts.on(0, raysim_run(hosts, "label", *label), output).wait(200) == 0, output.read_text()
    assert "2 x 0.5 CPU on nodes with raysim-role=scorer" in output.read_text()
    lines = (hosts.folder / "label" / "run.log").read_text().splitlines()
    nodes = {
        role: {x.rpartition(" ")[2] for x in lines if f"{role}-" in x and " ready: pid" in x}
        for role in ("scorer", "client")
    }
    assert len(nodes["scorer"]) == 1
    assert len(nodes["client"]) == 1
    assert nodes["scorer"] != nodes["client"]

    away = hosts.on(0, raysim_run(hosts, "none", "execution.client.label.raysim-role=client"), output)
    assert away.wait(100) == 2
    assert (
        "execution.client.label: no node has raysim-role=client, raysim-role=scorer of that kind" in output.read_text()
    )
