"""raysim beside Flower and pfl: what a client costs without training, and clients per second with it.

    python -m venv flower && flower/bin/pip install 'flwr[simulation]==1.42.*' 'torch==2.14.*'
    python -m venv pfl && pfl/bin/pip install 'pfl[pytorch]==0.6.*' 'torch==2.14.*'
    python tests/benchmarks/peers.py --flower-python flower/bin/python --pfl-python pfl/bin/python [--only raysim flower]

The environments are the peers' own: Flower 1.42 brings Ray 2.55; pfl 0.6 works with torch 2.14 and numpy 2.4, no pin is needed.
Both run on Python 3.11.

overhead: 20 clients per round return what they were sent, a vector of 44 thousand or 11.2 million float32 (ResNet-18), and the
server averages. raysim: the null algorithm of `raysim bench`, with a round's checksums. Flower: FedAvg, two actors of one CPU,
through its Message API and through NumPyClient. Milliseconds per client, median over the rounds after the first two.

throughput: 1,000 clients on scikit-learn's digits, resized to 28 x 28 and repeated 16 times, so that each has 22 or 23 images
(IID; the same lists for all three), LeNet-5 with BatchNorm, 100 clients per round, one epoch in batches of 8, SGD, FedAvg by
size, two processes with one torch thread each, the global model tested once per round on 359 images. Clients per second over
the rounds after the first, in which processes still start. raysim does what a run does by default: it also writes tables,
TensorBoard events and a checkpoint in every round. The other two write nothing. pfl does not average BatchNorm's statistics.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import finish
from rich.console import Console
from rich.table import Table

import raysim
from raysim.bench.stand_ins import without_training
from raysim.config import RunConfig, resolve
from raysim.execution.settings import ExecutionSettings
from raysim.preparation import prepare, prepare_data
from raysim.recorder import checksums
from raysim.recording.progress import Silent
from raysim.simulation import make_executor, run_round

HERE = Path(__file__).parent
SIZES = {"lenet5": 44_470, "resnet18": 11_175_370}
REPEATS = 16


def raysim_overhead(model: str, rounds: int) -> dict[str, Any]:
    clock = time.perf_counter()
    ready = without_training(ExecutionSettings(client_actors=2, scorer_actors=1), model, 20)
    state, seconds = ready.initial, []
    with contextlib.closing(make_executor(ready, Silent())) as executor:
        start_s = time.perf_counter() - clock
        for _ in range(rounds):
            clock = time.perf_counter()
            result = run_round(ready, state, executor, Silent())
            state = result.state
            checksums(state, result.outcomes)
            seconds.append(time.perf_counter() - clock)
            del result
    return {"start_s": start_s, "seconds": seconds, "parameters": ready.population.layout.size}


class FirstRound(Silent):
    """When the first round began."""

    began: float | None = None

    def round_started(self, round_num: int, cohort_size: int, *, scored: bool) -> None:
        self.began = self.began or time.perf_counter()


class Times(FirstRound):
    """When each round was over, records included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round_finished(self, record: Any) -> None:
        self.ends.append(time.perf_counter())


def repeated_digits(folder: Path) -> Path:
    """Digits as an npz file, at LeNet-5's size, the training images many times over; a part `val` as raysim wants one."""
    dataset = prepare_data(resolve({"model": {"name": "lenet5"}, "partition": {"scheme": "iid"}})).dataset
    path = folder / "digits.npz"
    arrays: dict[str, np.ndarray] = {"val_images": dataset.test.images[:10, 0], "val_labels": dataset.test.labels[:10]}
    arrays |= {"test_images": dataset.test.images[:, 0], "test_labels": dataset.test.labels}
    arrays |= {"train_images": np.tile(dataset.train.images[:, 0], (REPEATS, 1, 1))}
    np.savez(path, train_labels=np.tile(dataset.train.labels, REPEATS), **arrays)
    return path


def throughput_config(folder: Path, rounds: int) -> RunConfig:
    return resolve(
        {
            "name": "throughput",
            "rounds": rounds,
            "data": {"name": "npz", "path": str(repeated_digits(folder)), "validation": {"source": "split"}},
            "partition": {"scheme": "iid", "clients": 1000},
            "model": {"name": "lenet5"},
            "client": {"per_round": 100, "local_epochs": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.05}},
            "weighting": {"name": "size"},
            "execution": {"client_actors": 2, "scorer_actors": 1},
            "output": {"dir": str(folder)},
        }
    )


def export(config: RunConfig, path: Path) -> Path:
    """The same images, clients and settings for the peers."""
    setup = prepare(config).setup
    lists = [setup.partition.of(client) for client in range(setup.partition.num_clients)]
    np.savez(
        path,
        train_images=setup.train.images,
        train_labels=setup.train.labels,
        test_images=setup.test.images,
        test_labels=setup.test.labels,
        indices=np.concatenate(lists),
        offsets=np.cumsum([0, *map(len, lists)]),
        per_round=config.client.per_round,
        batch_size=config.client.batch_size,
        lr=config.client.optimizer.lr,
    )
    return path


def raysim_throughput(config: RunConfig) -> dict[str, Any]:
    clock, times = time.perf_counter(), Times()
    record = raysim.run(config, progress=times)
    assert times.began is not None
    seconds = np.diff([times.began, *times.ends]).tolist()
    return {
        "start_s": times.began - clock,
        "seconds": seconds,
        "accuracy": [entry.accuracy for entry in record.round_records],
    }


def peer(command: list[str | Path]) -> dict[str, Any]:
    """Run a program in another environment; its last line is JSON."""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"start_s"')]
    content: dict[str, Any] = json.loads(lines[-1])
    return content


def overhead(args: argparse.Namespace, which: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model, size in SIZES.items():
        if "raysim" in which:
            found[f"raysim {model}"] = raysim_overhead(model, args.overhead_rounds)
            assert found[f"raysim {model}"]["parameters"] == size, found[f"raysim {model}"]["parameters"]
        for api in ("message", "numpy") if "flower" in which else ():
            options = ["--parameters", str(size), "--clients", "20", "--rounds", str(args.overhead_rounds)]
            command = [args.flower_python, HERE / "peer_flower.py", "overhead", *options, "--api", api]
            found[f"flower {api} {model}"] = peer(command)
    table = Table(title="without training, 20 clients, two client processes: ms per client")
    for column in ("", "median", "least", "most", "first round"):
        table.add_column(column, justify="left" if not column else "right")
    for name, entry in found.items():
        ms = [1000 * seconds / 20 for seconds in entry["seconds"]]
        entry["ms_per_client"] = statistics.median(ms[2:])
        table.add_row(name, *(f"{value:.1f}" for value in (entry["ms_per_client"], min(ms[2:]), max(ms[2:]), ms[0])))
    Console(width=100).print(table)
    return found


def throughput(args: argparse.Namespace, which: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        config = throughput_config(Path(name), args.rounds + 1)
        work = export(config, Path(name) / "work.npz")
        options = ["--work", str(work), "--rounds", str(args.rounds + 1)]
        if "raysim" in which:
            found["raysim"] = raysim_throughput(config)
        if "flower" in which:
            found["flower"] = peer([args.flower_python, HERE / "peer_flower.py", "throughput", *options])
        if "pfl" in which:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            found["pfl"] = peer([args.pfl_python, *launcher, HERE / "peer_pfl.py", *options])
    table = Table(title=f"1,000 clients, 100 per round, {args.rounds} rounds after the first")
    for column in ("", "clients per second", "seconds", "start and first round", "test accuracy"):
        table.add_column(column, justify="left" if not column else "right")
    for name, entry in found.items():
        total = sum(entry["seconds"][1:])
        entry["clients_per_s"] = 100 * args.rounds / total
        start = entry["start_s"] + entry["seconds"][0]
        cells = (f"{entry['clients_per_s']:.1f}", f"{total:.2f}", f"{start:.1f}", f"{entry['accuracy'][-1]:.3f}")
        table.add_row(name, *cells)
    Console(width=100).print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="overhead, throughput; default: both")
    parser.add_argument("--only", nargs="+", choices=["raysim", "flower", "pfl"])
    parser.add_argument("--flower-python", help="the interpreter of an environment with Flower")
    parser.add_argument("--pfl-python", help="the interpreter of an environment with pfl")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of throughput")
    parser.add_argument("--overhead-rounds", type=int, default=9, help="rounds of overhead, the first two untimed")
    args = parser.parse_args()
    which = args.only or ["raysim", "flower", "pfl"]
    for name, python in (("flower", args.flower_python), ("pfl", args.pfl_python)):
        if name in which and python is None:
            parser.error(f"--{name}-python is missing; or leave {name} out with --only")
    if unknown := set(args.what) - {"overhead", "throughput"}:
        parser.error(f"{', '.join(unknown)}: should be overhead or throughput")
    result: dict[str, Any] = {"benchmark": "peers"}
    for name, work in (("overhead", overhead), ("throughput", throughput)):
        if name in (args.what or ["overhead", "throughput"]):
            result[name] = work(args, which)
            for entry in result[name].values():
                entry["accuracy"] = entry["accuracy"][-1] if entry.get("accuracy") else None
    finish(result)


if __name__ == "__main__":
    main()
