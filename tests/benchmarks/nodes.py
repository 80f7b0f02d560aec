"""What goes through the driver's node in a round: three raylets on this machine, driver on the head, which computes nothing.

    python tests/benchmarks/nodes.py [--clients 20 40] [--rounds 3]

Clients return a vector of ResNet-18's size (11.2 million float32) without training, each with its own factor. Updates are
summed in groups of 16 on the two worker nodes, so that one vector comes to the driver however many clients take part. Bytes are
the kernel's count of each TCP connection between a process of the head's node (raylet, GCS, driver) and one of another node, by
`ss -tinp` (package iproute2), before and after a round. The same rounds are then made on one node, and checksums compared.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
from measure import MB, finish, store_use
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from raysim.bench.stand_ins import Null, without_training
from raysim.execution.settings import ExecutionSettings
from raysim.preparation import Prepared
from raysim.recorder import checksums
from raysim.recording.progress import Silent
from raysim.simulation import make_executor, run_round
from raysim.state import ClientUpdate

CONNECTION = re.compile(r"\S+ +\d+ +\d+ +(?P<local>\S+) +(?P<peer>\S+) +users:\(\(.*?pid=(?P<pid>\d+)")
BOTH = re.compile(r"bytes_(sent|received):(\d+)")


@dataclass(frozen=True)
class Scaled(Null):
    """Clients that return the model times a number of their own, so that sums depend on the order they are made in."""

    name: Literal["scaled"] = "scaled"

    def client_update(self, server, client, objective, training, rng):
        return ClientUpdate(server.params * (0.01 * rng.standard_normal()), objective.num_examples, 1, 0.0), None


@dataclass(frozen=True)
class Connections:
    """Bytes of the TCP connections that leave the head's node, by (owner, local, peer): sent and received so far."""

    sent: dict[tuple[str, str, str], int]
    received: dict[tuple[str, str, str], int]


def ancestors(pid: int) -> Iterator[int]:
    """The process, its parent, and so on."""
    while pid > 1:
        yield pid
        try:
            pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # It has ended.
            return


def connections(raylets: dict[int, str]) -> Connections:
    """Look at all connections; `raylets` names the node of each raylet, everything else of ours is the head's."""
    lines = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [(match, line) for line in lines if (match := CONNECTION.match(line))]
    node_of: dict[int, str] = {}
    for pid in {int(match["pid"]) for match, _ in found}:
        node_of[pid] = next((raylets[above] for above in ancestors(pid) if above in raylets), "head")
    owner = {(match["local"], match["peer"]): int(match["pid"]) for match, _ in found}
    result = Connections({}, {})
    for match, line in found:
        pid, other = int(match["pid"]), owner.get((match["peer"], match["local"]))
        if other is None or node_of[pid] != "head" or node_of[other] == "head":
            continue
        name = Path((Path("/proc") / str(pid) / "cmdline").read_text().split("\0")[0]).name
        kind = name if name in ("raylet", "gcs_server") else "driver"
        counted = dict(BOTH.findall(line))
        key = (kind, match["local"], match["peer"])
        result.sent[key], result.received[key] = int(counted.get("sent", 0)), int(counted.get("received", 0))
    return result


def between(before: Connections, after: Connections) -> dict[str, float]:
    """MB from and to the head's node, and how much of it by which of its processes; connections that closed are lost."""
    moved: Counter[str] = Counter()
    for way in ("sent", "received"):
        earlier = getattr(before, way)
        for key, count in getattr(after, way).items():
            new = count - earlier.get(key, 0)
            moved[way] += new
            moved[f"{way} by {key[0]}"] += new
    return {name: count / MB for name, count in moved.items()} | {"closed": len(before.sent.keys() - after.sent.keys())}


@contextlib.contextmanager
def three_nodes(store_mb: int) -> Iterator[dict[int, str]]:
    """A head without CPUs and two workers of one CPU; yields the process ids of the workers' raylets."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": store_mb * MB, "include_dashboard": False},
    )
    try:
        workers = [cluster.add_node(num_cpus=1, object_store_memory=store_mb * MB) for _ in range(2)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield {node.all_processes["raylet"][0].process.pid: f"worker {i}" for i, node in enumerate(workers)}
    finally:
        ray.shutdown()
        cluster.shutdown()


def make(clients: int, scorers: int) -> Prepared:
    ready = without_training(ExecutionSettings(client_actors=2, scorer_actors=scorers), "resnet18", clients)
    return replace(ready, setup=replace(ready.setup, algorithm=Scaled()))


def run_rounds(ready: Prepared, rounds: int, raylets: dict[int, str] | None) -> list[dict[str, Any]]:
    """Checksum, seconds and traffic of each round, after one that is not counted."""
    state, found = ready.initial, []
    with contextlib.closing(make_executor(ready, Silent())) as executor:
        for round_num in range(1, rounds + 2):
            before = connections(raylets) if raylets is not None else None
            clock = time.perf_counter()
            result = run_round(ready, state, executor, Silent())
            seconds = time.perf_counter() - clock
            state = result.state
            entry = {"round": round_num, "seconds": seconds, "checksums": checksums(state, result.outcomes)}
            nodes = Counter(outcome.actor.node for outcome in result.outcomes if outcome.actor is not None)
            entry["clients_by_node"] = sorted(nodes.values())
            if raylets is not None:
                assert before is not None
                entry["moved_mb"] = between(before, connections(raylets))
                entry["store_mb"] = store_use().used / MB
            found.append(entry)
            del result
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 40])
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted, after one that is not")
    parser.add_argument("--store-mb", type=int, default=2500, help="object store of each node")
    args = parser.parse_args()
    many: dict[int, list[dict[str, Any]]] = {}
    with three_nodes(args.store_mb) as raylets:
        for clients in args.clients:
            many[clients] = run_rounds(make(clients, 2), args.rounds, raylets)
    one = {clients: run_rounds(make(clients, 1), args.rounds, None) for clients in args.clients}
    table = Table(title="MB between the driver's node and the others in a round; one model is 42.6 MB")
    for column in (
        "clients",
        "round",
        "seconds",
        "out",
        "in",
        "by driver",
        "by raylet",
        "by GCS",
        "closed",
        "same bits",
    ):
        table.add_column(column, justify="right")
    equal, totals = True, {}
    for clients, rounds in many.items():
        for entry, alone in zip(rounds, one[clients], strict=True):
            moved, same = entry["moved_mb"], entry["checksums"] == alone["checksums"]
            equal = equal and same
            by = [sum(moved.get(f"{way} by {kind}", 0) for way in ("sent", "received")) for kind in KINDS]
            cells = (entry["seconds"], moved["sent"], moved["received"], *by)
            counts = (str(moved["closed"]), "yes" if same else "NO")
            table.add_row(str(clients), str(entry["round"]), *(f"{cell:.1f}" for cell in cells), *counts)
        totals[clients] = statistics.median(e["moved_mb"]["sent"] + e["moved_mb"]["received"] for e in rounds[1:])
    Console(width=110).print(table)
    least, most = min(totals.values()), max(totals.values())
    finish(
        {
            "benchmark": "nodes",
            "mb_per_round": totals,
            "flat": most <= 1.1 * least,
            "same_bits": equal,
            "rounds": {
                clients: [{key: entry[key] for key in entry if key != "checksums"} for entry in rounds]
                for clients, rounds in many.items()
            },
            "one_node_seconds": {clients: [entry["seconds"] for entry in rounds] for clients, rounds in one.items()},
        }
    )


KINDS = ("driver", "raylet", "gcs_server")

if __name__ == "__main__":
    main()
