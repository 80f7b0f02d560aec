"""Test accuracy of methods on the same partitions and cohorts: one table per study, all of its runs in one process.

    python tests/benchmarks/methods.py weightings    # FedVG, size and uniform weights; 100 clients, Dirichlet 0.05
    python tests/benchmarks/methods.py algorithms    # every algorithm with the three; 12,000 images, 20 clients
    python tests/benchmarks/methods.py even          # FedAvg, FedDyn, FedAvgM and their settings at Dirichlet 100

Fashion-MNIST (Debian's package dataset-fashion-mnist), LeNet-5 with BatchNorm, two seeds, 30 rounds. Runs that are finished in
`--out` are not run again.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import raysim
from raysim.algorithms import ALGORITHMS

CONFIG = "configs/fashion_mnist.yaml"
COMMON = ("rounds=30", "execution.client_actors=2", "execution.scorer_actors=2")
SMALL = ("data.train_images=12000", "partition.clients=20", "client.per_round=5", "client.local_epochs=2")

ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")


@dataclass(frozen=True)
class Study:
    """A table: settings that all of its runs share, and the settings of each row."""

    title: str
    shared: Sequence[str]
    rows: dict[str, Sequence[str]]


def weighted(name: str) -> str:
    """The override that sets nothing but the weighting's name."""
    return f"weighting={{name: {name}}}"


def algorithm(name: str, **fields: object) -> str:
    """The override that sets the algorithm and some of its fields."""
    return f"algorithm={{{', '.join(f'{key}: {value}' for key, value in {'name': name, **fields}.items())}}}"


STUDIES = {
    "weightings": Study(
        "100 clients, Dirichlet 0.05, 10 per round, 5 local epochs",
        ("partition.alpha=0.05",),
        {
            "size": [weighted("size")],
            "uniform": [weighted("uniform")],
            "fedvg, batch statistics": [weighted("fedvg"), "scoring.batch_norm=batch"],
            "fedvg, running statistics": [weighted("fedvg"), "scoring.batch_norm=running"],
        },
    ),
    "algorithms": Study(
        "12,000 images, 20 clients, Dirichlet 0.05, 5 per round, 2 local epochs",
        (*SMALL, "partition.alpha=0.05"),
        {
            f"{row} {weighting}": [own, weighted(weighting)]
            for row, own in {
                **{name: algorithm(name) for name in ALGORITHMS},
                # Their published server_lr of 0.1 was meant to be tuned, and is too large here.
                **{f"{name} server_lr 0.01": algorithm(name, server_lr=0.01) for name in ADAPTIVE},
            }.items()
            for weighting in ("size", "uniform", "fedvg")
        },
    ),
    "even": Study(
        "12,000 images, 20 clients, Dirichlet 100, 5 per round, 2 local epochs; each method with its own default weights",
        (*SMALL, "partition.alpha=100", "weighting=null"),
        {
            "fedavg": [algorithm("fedavg")],
            "feddyn": [algorithm("feddyn")],
            "feddyn alpha 0.1": [algorithm("feddyn", alpha=0.1)],
            "fedavgm": [algorithm("fedavgm")],
            "fedavgm heavy ball": [algorithm("fedavgm", nesterov="false")],
            "fedavgm server_lr 0.1": [algorithm("fedavgm", server_lr=0.1)],
        },
    ),
}


def record_of(name: str, overrides: Sequence[str], session: raysim.Session) -> tuple[raysim.RunRecord, float]:
    """A run's record, from its folder if it is finished there, and the seconds it took."""
    out = next(o.removeprefix("output.dir=") for o in overrides if o.startswith("output.dir="))
    folder = Path(out, name)
    if folder.exists():
        record = raysim.load(folder)
        if record.result["status"] == "finished":
            return record, record.result["seconds"]
        shutil.rmtree(folder)
    clock = time.perf_counter()
    record = raysim.run(CONFIG, [f"name={name}", *overrides], session=session)
    return record, time.perf_counter() - clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--root", default="/usr/share/datasets/fashion-mnist", help="folder of the idx files")
    parser.add_argument("--out", default="runs/methods")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", help="rows that begin with one of these")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    args = parser.parse_args()
    study = STUDIES[args.study]
    table = Table(title=f"Fashion-MNIST, LeNet-5: test accuracy in %, seeds {args.seeds}\n{study.title}")
    table.add_column("method")
    for column in ("last round", "mean", "mean of last 5", "best round", "largest weight", "entropy", "seconds"):
        table.add_column(column, justify="right")
    console = Console(stderr=True)
    with raysim.Session() as session:
        for row, own in study.rows.items():
            if args.only and not row.startswith(tuple(args.only)):
                continue
            found = []
            for seed in args.seeds:
                name = f"{row.replace(',', '').replace(' ', '-')}-seed{seed}"
                shared = [f"data.root={args.root}", f"output.dir={args.out}/{args.study}", f"seed={seed}"]
                found.append(record_of(name, [*shared, *COMMON, *study.shared, *own, *args.overrides], session))
                result = found[-1][0].result
                console.print(f"{name}: {100 * result['final']['accuracy']:.2f} after {found[-1][1]:.1f} s")
            tables = [record.rounds for record, _ in found]
            curves = [100 * np.array(t["accuracy"].to_pylist(), dtype=float) for t in tables]
            table.add_row(
                row,
                " ".join(f"{curve[-1]:.2f}" for curve in curves),
                f"{statistics.mean(curve[-1] for curve in curves):.2f}",
                f"{statistics.mean(curve[-5:].mean() for curve in curves):.2f}",
                " ".join(f"{curve.max():.2f}" for curve in curves),
                f"{np.mean([np.mean(t['weight_max'].to_pylist()) for t in tables]):.3f}",
                f"{np.mean([np.mean(t['weight_entropy'].to_pylist()) for t in tables]):.3f}",
                " ".join(f"{seconds:.0f}" for _, seconds in found),
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
