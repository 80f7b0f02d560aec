"""Test accuracy of FedVG, size and uniform weights on the same partition and cohorts: one table.

    python tests/benchmarks/weightings.py --root /usr/share/datasets/fashion-mnist --out runs/weightings

Fashion-MNIST, LeNet-5 with BatchNorm, Dirichlet 0.05, 100 clients, 10 per round, 30 rounds, two seeds. Runs that are
finished in `--out` are not run again.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import raysim
from raysim.recording.progress import make_progress

METHODS = {
    "size": ["weighting.name=size"],
    "uniform": ["weighting.name=uniform"],
    "fedvg, batch statistics": ["weighting.name=fedvg", "scoring.batch_norm=batch"],
    "fedvg, running statistics": ["weighting.name=fedvg", "scoring.batch_norm=running"],
}


def record_of(method: str, seed: int, args: argparse.Namespace) -> raysim.RunRecord:
    """The run's record, from its folder if it is finished there."""
    name = f"{method.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    folder = Path(args.out) / name
    if folder.exists():
        record = raysim.load(folder)
        if record.result["status"] == "finished":
            return record
        shutil.rmtree(folder)
    overrides = [
        f"name={name}",
        f"seed={seed}",
        f"rounds={args.rounds}",
        f"partition.alpha={args.alpha}",
        f"data.root={args.root}",
        f"output.dir={args.out}",
        *METHODS[method],
        *args.overrides,
    ]
    console = Console(stderr=True)
    console.print(name)
    return raysim.run("configs/fashion_mnist.yaml", overrides, progress=make_progress(args.rounds, console))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root", default="/usr/share/datasets/fashion-mnist", help="folder of Fashion-MNIST's idx files"
    )
    parser.add_argument("--out", default="runs/weightings")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    args = parser.parse_args()
    table = Table(
        title=f"Fashion-MNIST, Dirichlet {args.alpha:g}, {args.rounds} rounds, seeds {args.seeds}: test accuracy in %"
    )
    for column in (
        "weights",
        "last round, by seed",
        "mean",
        "mean of last 5",
        "best round, by seed",
        "largest weight",
        "entropy",
    ):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for method in METHODS:
        records = [record_of(method, seed, args) for seed in args.seeds]
        curves = [100 * np.array(record.rounds["accuracy"].to_pylist()) for record in records]
        rounds = [record.rounds for record in records]
        table.add_row(
            method,
            " ".join(f"{curve[-1]:.2f}" for curve in curves),
            f"{statistics.mean(curve[-1] for curve in curves):.2f}",
            f"{statistics.mean(curve[-5:].mean() for curve in curves):.2f}",
            " ".join(f"{curve.max():.2f}" for curve in curves),
            f"{np.mean([np.mean(t['weight_max'].to_pylist()) for t in rounds]):.3f}",
            f"{np.mean([np.mean(t['weight_entropy'].to_pylist()) for t in rounds]):.3f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
