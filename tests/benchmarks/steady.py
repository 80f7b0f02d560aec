"""Whether anything grows with the rounds: memory, object store and open files of a long run.

    python tests/benchmarks/steady.py [--rounds 300] [--trace]

FedVG on scikit-learn's digits: LeNet-5, 20 clients, 4 per round, two client actors and a scorer, everything recorded as in any
run. Every 10 rounds, 1.5 seconds after the last one (Ray frees objects once a second): resident memory and open files of the
driver and of each actor, bytes in the object store; for information their memory without what is shared (own), and that of the
raylet and the GCS. From round 30 to the end (the middle one of the last three samples) the memory of the driver and the actors
may grow by 3 %; the object store and the open files must not grow. `--trace` tells where Python objects of the driver that came
after round 30 were made.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import tracemalloc
from typing import Any

from measure import MB, finish, process_use, ray_servers, running, store_use
from rich.console import Console
from rich.table import Table

from raysim.config import resolve

WARM = 30
EVERY = 10
LIMIT = 0.03


def sample(actors: dict[str, int], servers: dict[str, int]) -> dict[str, float]:
    """Numbers of this moment by name."""
    uses = {"driver": process_use(), **{name: process_use(pid) for name, pid in actors.items()}}
    numbers = {f"{name} MB": use.rss / MB for name, use in uses.items()}
    numbers |= {f"{name} own MB": use.private / MB for name, use in uses.items()}
    numbers |= {f"{name} files": use.fds for name, use in uses.items()}
    store = store_use()
    numbers |= {"store MB": store.used / MB, "objects": store.objects}
    return numbers | {f"{name} MB": process_use(pid).rss / MB for name, pid in servers.items()}


def judge(first: dict[str, float], samples: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """By name: the first number, the middle one of the last three, the largest, and whether the second is within the limits."""
    verdicts = {}
    for name, start in first.items():
        last = statistics.median(entry[name] for entry in samples[-3:])
        limit = start * (1 + LIMIT) if name.endswith("MB") and name != "store MB" else start + 0.01
        informs = name.startswith(("raylet", "gcs")) or name.endswith("own MB")
        ok = None if informs else last <= limit
        verdicts[name] = {"first": start, "last": last, "largest": max(entry[name] for entry in samples), "ok": ok}
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    samples: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = resolve(
            {
                "name": "steady",
                "rounds": args.rounds,
                "partition": {"clients": 20},
                "model": {"name": "lenet5"},
                "client": {"per_round": 4, "local_epochs": 1, "batch_size": 16},
                "weighting": {"name": "fedvg"},
                "execution": {"client_actors": 2, "scorer_actors": 1},
                "output": {"dir": folder},
            }
        )
        clock = time.perf_counter()
        with running(config) as (run, recorder, _):
            for record in run:
                if record.round_num % EVERY == 0 or record.round_num == args.rounds:
                    time.sleep(1.5)
                    actors = {name: pid for pid, name in sorted(recorder.actors.items(), key=lambda item: item[1])}
                    samples[record.round_num] = sample(actors, ray_servers())
                    print(f"round {record.round_num}: {time.perf_counter() - clock:.0f} s", flush=True)
                if args.trace and record.round_num == WARM:
                    tracemalloc.start(8)
                if args.trace and record.round_num == WARM + 1:
                    before = tracemalloc.take_snapshot()
            if args.trace:
                for line in tracemalloc.take_snapshot().compare_to(before, "traceback")[:12]:
                    print(line, *line.traceback.format(), sep="\n")
    names = list(samples[min(samples)])
    shown = [name for name in names if "own" not in name]
    table = Table("round", *(name.replace(" ", "\n") for name in shown))
    for number, entry in samples.items():
        table.add_row(str(number), *(f"{entry[name]:.1f}" if "MB" in name else f"{entry[name]:.0f}" for name in shown))
    Console(width=160).print(table)
    verdicts = judge(samples[WARM], [entry for number, entry in samples.items() if number >= WARM])
    verdict_table = Table("", f"round {WARM}", "last", "largest", "growth", "")
    for name, verdict in verdicts.items():
        growth = f"{verdict['last'] / verdict['first'] - 1:+.2%}" if verdict["first"] else "-"
        word = {True: "ok", False: "grows", None: ""}[verdict["ok"]]
        verdict_table.add_row(name, *(f"{verdict[key]:.2f}" for key in ("first", "last", "largest")), growth, word)
    Console(width=160).print(verdict_table)
    finish(
        {
            "benchmark": "steady",
            "rounds": args.rounds,
            "steady": all(verdict["ok"] is not False for verdict in verdicts.values()),
            "verdicts": verdicts,
        }
    )


if __name__ == "__main__":
    main()
