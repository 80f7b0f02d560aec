"""Runs the quickstart on a cluster of a head and two worker nodes, one of which is taken away in round 2.

python node_loss.py FOLDER [key.path=value ...]
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import raysim

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def take_away_when(log: Path, cluster: Cluster, node: object, text: str) -> None:
    """Remove the node once a line of the run's log has the text."""
    while not (log.exists() and text in log.read_text()):
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)


def main() -> None:
    folder, *overrides = sys.argv[1:]
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 5}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick})
    cluster.add_node(num_cpus=1)
    victim = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    log = Path(folder) / "lost" / "run.log"
    threading.Thread(target=take_away_when, args=(log, cluster, victim, "round 2 client"), daemon=True).start()
    record = raysim.run(QUICKSTART, [f"output.dir={folder}", "name=lost", *overrides])
    sys.stdout.write(record.result["status"] + "\n")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
