"""Ray across hosts: network namespaces with addresses, process ids and host names of their own, on one switch."""

from __future__ import annotations

import os
import shutil
import signal
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
RECIPE = Path(__file__).parents[2] / "cluster" / "slurm.sbatch"


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

    def boot(self, host: int, command: Sequence[str], **more: str) -> Path:
        """Begin a host's first process, which takes all others with it; returns its log."""
        log = self.folder / f"h{host}.log"
        own = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--pid", "--fork", "--kill-child"]
        with log.open("wb") as output:
            self._processes[host] = subprocess.Popen(
                [*own, "--mount-proc", "sh", "-c", f'hostname host{host} && exec "$@"', "sh", *command],
                env=environment() | more,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return log

    def start_ray(self, host: int, *options: str) -> None:
        """Ray on a host, until the host is removed; waits until it says that it runs."""
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        where = head if host == 0 else [f"--address={self.address(0)}:{PORT}"]
        place = [f"--node-ip-address={self.address(host)}", f"--temp-dir={self.folder}/h{host}"]
        size = ["--object-store-memory=100000000", "--num-gpus=0", "--disable-usage-stats"]
        log = self.boot(host, ["ray", "start", "--block", *where, *place, *size, *options])
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in (text := log.read_text()):
            assert self._processes[host].poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.2)

    def wait(self, host: int, timeout_s: float) -> int:
        return self._processes[host].wait(timeout_s)

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
def bare_hosts() -> Iterator[Hosts]:
    """Three hosts on which nothing runs."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/var/tmp") as folder:
        made = Hosts(Path(folder), 3)
        try:
            yield made
        finally:
            made.remove()
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert f"rs{os.getpid()}h" not in left


@pytest.fixture
def hosts(bare_hosts: Hosts) -> Hosts:
    """A head without CPUs and two workers of one CPU each; the last has a label."""
    bare_hosts.start_ray(0, "--num-cpus=0")
    bare_hosts.start_ray(1, "--num-cpus=1")
    bare_hosts.start_ray(2, "--num-cpus=1", "--labels=raysim-role=scorer")
    return bare_hosts


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


SRUN = """#!/bin/bash
# Runs a task on each host, as srun does; its options are only for the real one. Its status is the highest.
while [[ $1 == --* ]]; do shift; done
worst=0
mkdir -p "$RAY_TMPDIR" # Every host's own, though all have the machine's /tmp.
for i in 0 1; do
  ip netns exec "$RS_HOSTS$i" unshare --uts --pid --fork --kill-child --mount-proc \\
    bash -c 'mkdir -p "$0" && mount --bind "$0" "$RAY_TMPDIR" && exec "$@"' "$RS_FOLDER/disk$i" \\
    env SLURM_NODEID=$i SLURM_CPUS_ON_NODE=1 "$@" > >(sed -u "s/^/$i: /") 2>&1 &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || worst=$?; done
exit "$worst"
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf '10.77.0.%d\\n' 1 2; else echo "scontrol $*"; fi
"""


def sbatch(hosts: Hosts, *arguments: str) -> tuple[int, str]:
    """Run the recipe as Slurm would: srun and scontrol are ours, Ray's symmetric-run and all else is real."""
    commands = hosts.folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    slurm = {
        "PATH": f"{commands}{os.pathsep}{environment()['PATH']}",
        "HOME": str(hosts.folder / "home"),
        "RS_FOLDER": str(hosts.folder),
        "RS_HOSTS": hosts.names[0][:-1],
        "RAYSIM_SCORER_NODES": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_NNODES": "2",
    }
    log = hosts.folder / "log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            ["bash", str(RECIPE), str(QUICKSTART), *arguments],
            env=environment() | slurm,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return job.wait(280), log.read_text()
    except subprocess.TimeoutExpired:
        raise AssertionError(log.read_text()) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        Path(f"/tmp/raysim-{os.getpid()}").rmdir()


@pytest.mark.timeout(900)
def test_the_slurm_recipe_runs_goes_on_and_says_what_is_wrong(bare_hosts: Hosts) -> None:
    label = ["execution.scorer.label.raysim-role=scorer", "execution.scorer_actors=2", "execution.client_actors=2"]
    run_it = [f"output.dir={bare_hosts.folder}", "name=slurm", *label]
    status, output = sbatch(bare_hosts, *run_it, "rounds=2")
    assert status == 0, output
    assert "2 x 0.5 CPU on nodes with raysim-role=scorer" in output
    status, output = sbatch(bare_hosts, *run_it, "rounds=4")
    assert status == 0, output
    record = raysim.load(bare_hosts.folder / "slurm")
    assert checksums(record) == checksums(run(bare_hosts.folder, "serial", rounds=4, backend="serial"))

    status, output = sbatch(bare_hosts, *run_it, "rounds=ten")
    assert status == 2, output
    assert 'rounds: should be a whole number, got "ten"' in output
    assert not list(bare_hosts.folder.glob("disk*/*")), "a job leaves nothing behind on its nodes"
