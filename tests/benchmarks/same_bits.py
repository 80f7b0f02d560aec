"""FedVG with every algorithm on Fashion-MNIST, with one and with two client actors: the checksums of every round are equal.

    python tests/benchmarks/same_bits.py

60,000 images, LeNet-5 with BatchNorm, 20 clients, Dirichlet 0.1, 5 per round, one local epoch, 5 rounds. Exit status 1 if a bit
differs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import raysim
from raysim.algorithms import ALGORITHMS

CHECKSUMS = ["params_checksum", "buffers_checksum", "server_checksum", "clients_checksum"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="/usr/share/datasets/fashion-mnist", help="folder of the idx files")
    parser.add_argument("--out", default="runs/same_bits")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    shared = ["rounds=5", "partition.clients=20", "partition.alpha=0.1", "client.per_round=5", "client.local_epochs=1"]
    shared += [f"data.root={args.root}", f"output.dir={args.out}", "execution.scorer_actors=2", *args.overrides]
    found: dict[int, dict[str, raysim.RunRecord]] = {1: {}, 2: {}}
    console = Console(stderr=True)
    for actors, records in found.items():
        with raysim.Session() as session:
            for name in ALGORITHMS:
                own = [f"name={name}-{actors}", f"algorithm={{name: {name}}}", "weighting={name: fedvg}"]
                own.append(f"execution.client_actors={actors}")
                records[name] = raysim.run("configs/fashion_mnist.yaml", [*shared, *own], session=session)
                console.print(f"{name}, {actors} client actors: {records[name].result['seconds']:.0f} s")
    table = Table(title="FedVG on Fashion-MNIST, 1 and 2 client actors")
    for column in ("algorithm", "accuracy in %", "checksum of round 5", "equal in every round", "client processes"):
        table.add_column(column)
    same = True
    for name in ALGORITHMS:
        one, two = (found[actors][name] for actors in (1, 2))
        equal = one.rounds.select(CHECKSUMS).to_pylist() == two.rounds.select(CHECKSUMS).to_pylist()
        same = same and equal
        last = one.round_records[-1]
        processes = [len(set(record.clients["pid"].to_pylist())) for record in (one, two)]
        accuracy = f"{100 * one.result['final']['accuracy']:.2f}"
        table.add_row(name, accuracy, last.params_checksum, "yes" if equal else "NO", " and ".join(map(str, processes)))
    Console(width=120).print(table)
    return 0 if same else 1


if __name__ == "__main__":
    assert Path("configs/fashion_mnist.yaml").is_file(), "run it in the project's folder"
    sys.exit(main())
