"""What the framework costs when nobody trains: milliseconds per client, and how well scorers are kept busy.

    python tests/benchmarks/overhead.py clients                      # per client: 44 thousand and 11.2 million parameters
    python tests/benchmarks/overhead.py scorers --scorers 1 2 4 8    # scorers that sleep instead of computing

A client loads the model, returns a vector of its size, which is checked for finite values; the server sums in float64 and takes
checksums once a round. Weights by size.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from raysim.algorithms.base import Algorithm
from raysim.config import resolve
from raysim.preparation import Prepared, prepare
from raysim.recorder import _checksums
from raysim.recording.progress import Silent
from raysim.simulation import make_executor, run_round
from raysim.state import ClientUpdate, ServerState
from raysim.weighting.base import Weighting, Weights, by_size


@dataclass(frozen=True)
class Null(Algorithm[Any, None, Any]):
    """Clients that return the model they got, a little higher."""

    name: Literal["null"] = "null"

    def init_server(self, params, population):
        return ServerState(params)

    def client_update(self, server, client, objective, training, rng):
        return ClientUpdate(objective.params - server.params + 1e-9, objective.num_examples, 1, 0.0), None

    def server_update(self, server, cohort):
        return ServerState(server.params + cohort.mean_delta())


@dataclass(frozen=True)
class Sleeping(Weighting):
    """Scoring that takes a known time."""

    name: Literal["sleeping"] = "sleeping"
    seconds: float = 0.25

    @property
    def needs(self):
        return "losses"

    def accumulate(self, objective, shard):
        time.sleep(self.seconds)
        return {"loss": np.array(1.0), "correct": np.array(1), "count": np.array(1)}

    def weights(self, reports, reference, layout):
        return Weights(by_size(reports))


def prepared(model: str, clients: int, **execution: Any) -> Prepared:
    ready = prepare(
        resolve(
            {
                "model": {"name": model},
                "partition": {"scheme": "iid", "clients": clients},
                "client": {"per_round": clients, "local_epochs": 1},
                "execution": {"client_actors": 2, "scorer_actors": 1, **execution},
            }
        )
    )
    return replace(ready, setup=replace(ready.setup, algorithm=Null()))


def per_client(rounds: int) -> None:
    table = Table(title="without training, weights by size, 20 clients, 2 client actors")
    for column in ("parameters", "ms per client, median", "least", "most"):
        table.add_column(column, justify="right")
    for model in ("lenet5", "resnet18"):
        ready = prepared(model, 20)
        state, times = ready.initial, []
        with contextlib.closing(make_executor(ready, Silent())) as executor:
            for _ in range(rounds + 2):
                clock = time.perf_counter()
                result = run_round(ready, state, executor, Silent())
                state = result.state
                _checksums(state, result.outcomes)
                times.append(1000 * (time.perf_counter() - clock) / 20)
                del result
        times = times[2:]
        numbers = (statistics.median(times), min(times), max(times))
        table.add_row(f"{ready.population.layout.size:,}", *(f"{number:.1f}" for number in numbers))
    Console().print(table)


def scorers(counts: list[int], seconds: float) -> None:
    table = Table(title=f"scoring that sleeps {seconds} s, 4 models per scorer")
    for column in ("scorers", "seconds", "ideal", "efficiency"):
        table.add_column(column, justify="right")
    for count in counts:
        few = {"num_cpus": 0.01}
        ready = prepared("lenet5", 4 * count, scorer_actors=count, client=few, scorer=few)
        ready = replace(ready, setup=replace(ready.setup, weighting=Sleeping(seconds=seconds)))
        times = []
        with contextlib.closing(make_executor(ready, Silent())) as executor:
            for _ in range(4):
                clock = time.perf_counter()
                run_round(ready, ready.initial, executor, Silent())
                times.append(time.perf_counter() - clock)
        best = statistics.median(times[1:])
        table.add_row(str(count), f"{best:.2f}", f"{4 * seconds:.2f}", f"{4 * seconds / best:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["clients", "scorers"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scorers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=0.25)
    args = parser.parse_args()
    if args.what == "clients":
        per_client(args.rounds)
    else:
        scorers(args.scorers, args.seconds)


if __name__ == "__main__":
    main()
