"""Ten thousand clients with a state each: time of a round, memory, and a checkpoint of all states.

    python tests/benchmarks/many_clients.py --root /usr/share/datasets/fashion-mnist

SCAFFOLD on Fashion-MNIST's 60,000 images (0.5 % of them held out, so about 6 per client), LeNet-5 (44 thousand parameters),
1,000 clients per round, one local epoch in batches of 3, uniform weights, two client processes, 20 rounds. The only checkpoint
is that of the last round; it is read back whole, and the states' checksums are compared with those that the clients' own
processes took. The limits: 8,500 clients with a state, 4 GB for the driver and the object store together. Each byte counts
once: the driver's resident memory also holds what it has mapped of the object store, most of it when it writes the checkpoint.
The first round's seconds include the test of the initial model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from measure import MB, Peaks, finish, process_use, running, store_use
from rich.console import Console
from rich.table import Table

from raysim.config import resolve
from raysim.recording.checkpoint import arrays_checksum, read_client_state, read_latest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root", default="/usr/share/datasets/fashion-mnist", help="folder of Fashion-MNIST's idx files"
    )
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--per-round", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", help="where the run folder goes; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    config = resolve(
        {
            "name": "many",
            "rounds": args.rounds,
            "data": {"name": "fashion_mnist", "root": args.root, "validation": {"fraction": 0.005}},
            "partition": {"scheme": "iid", "clients": args.clients},
            "model": {"name": "lenet5"},
            "client": {"per_round": args.per_round, "local_epochs": 1, "batch_size": 3},
            "algorithm": {"name": "scaffold"},
            "weighting": {"name": "uniform"},
            "execution": {"client_actors": 2, "scorer_actors": 1},
            "output": {"dir": str(folder), "checkpoint_every": args.rounds},
        }
    )
    table = Table(
        "round", "seconds", "train", "aggregate", "evaluate", "commit", "driver MB", "own MB", "store MB", "objects"
    )
    clock = time.perf_counter()
    with running(config) as (run, recorder, _):
        start_s = time.perf_counter() - clock
        peaks, seconds = Peaks(), []
        try:
            for _ in range(args.rounds):
                clock = time.perf_counter()
                record = next(run)
                seconds.append(time.perf_counter() - clock)
                driver, store = process_use(), store_use()

                cells = [seconds[-1], record.train_s, record.aggregate_s, record.evaluate_s, record.commit_s]
                sizes = [
                    f"{driver.rss / MB:.0f}",
                    f"{driver.private / MB:.0f}",
                    f"{store.used / MB:.0f}",
                    str(store.objects),
                ]
                table.add_row(str(record.round_num), *(f"{cell:.2f}" for cell in cells), *sizes)
                print(f"round {record.round_num}: {seconds[-1]:.2f} s, store {store.used / MB:.0f} MB", flush=True)
            spilled = store_use().spilled
        finally:
            peaks.close()
        digests, write_s = dict(recorder.digests), recorder.checkpoint_seconds
    files = list((config.folder / "checkpoints").rglob("*.npz"))
    clock = time.perf_counter()
    checkpoint = read_latest(config.folder)
    read_manifest_s = time.perf_counter() - clock
    assert checkpoint is not None
    clock = time.perf_counter()
    states = {client: read_client_state(config.folder, entry) for client, entry in checkpoint.clients.items()}
    read_states_s = time.perf_counter() - clock
    equal = digests == {client: arrays_checksum(arrays) for client, arrays in states.items()}
    Console(width=110).print(table)
    finish(
        {
            "benchmark": "many_clients",
            "clients": args.clients,
            "per_round": args.per_round,
            "rounds": args.rounds,
            "start_s": start_s,
            "seconds_per_round": seconds,
            "ms_per_client_without_last_round": 1000 * sum(seconds[:-1]) / max(1, len(seconds) - 1) / args.per_round,
            "clients_with_state": len(digests),
            "enough_states": len(digests) >= 8_500,
            "peak_driver_gb": peaks.rss / 1e9,
            "peak_store_gb": peaks.store / 1e9,
            "peak_driver_private_gb": peaks.private / 1e9,
            "peak_private_and_store_gb": peaks.total / 1e9,
            "within_4_gb": peaks.total <= 4e9,
            "rss_and_store_within_4_gb": peaks.rss + peaks.store <= 4e9,
            "spilled_gb": spilled / 1e9,
            "checkpoint_files": len(files),
            "checkpoint_gb": sum(path.stat().st_size for path in files) / 1e9,
            "checkpoint_write_s": write_s,
            "checkpoint_read_s": read_manifest_s + read_states_s,
            "read_latest_s": read_manifest_s,
            "states_equal": equal,
        }
    )


if __name__ == "__main__":
    main()
