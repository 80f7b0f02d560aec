"""Seconds for scoring several clients' models one by one and in one call (`execution.clients_per_call`), on this device.

    python tests/benchmarks/vmap.py
    python tests/benchmarks/vmap.py --model cnn --counts 2 16 --batch-sizes 32

Random images, in this process; on a CPU one thread, as an actor has, and its own seconds, which no other process disturbs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from raysim.config import resolve
from raysim.data.arrays import ImageSet
from raysim.data.validation import stratified_batches
from raysim.execution import work
from raysim.execution.base import Broadcast
from raysim.preparation import prepare


def seconds_of(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """Median after a first call that does not count."""
    times = []
    for _ in range(repeats + 1):
        started = clock()
        call()
        times.append(clock() - started)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--images", type=int, default=2048, help="size of the validation set")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    prepared = prepare(
        resolve({"model": {"name": args.model}, "weighting": {"name": "fedvg"}, "execution": {"backend": "serial"}})
    )
    rng, spec, state = np.random.default_rng(0), prepared.setup.input_spec, prepared.initial
    shape = (args.images, spec.channels, spec.height, spec.width)
    validation = ImageSet(rng.integers(0, 256, shape, dtype=np.uint8), rng.integers(0, spec.num_classes, args.images))
    broadcast = Broadcast.of(1, state.server, state.buffers)
    updates = [
        {
            "delta": rng.normal(0, 0.01, len(state.server.params)).astype(np.float32),
            work.BUFFER_FLOATS: state.buffers.floats.numpy(),
            work.BUFFER_INTS: state.buffers.ints.numpy(),
        }
        for _ in range(max(args.counts))
    ]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, one thread"
    table = Table(title=f"{args.model}, {args.images} images, {name}")
    for column in ("batch", "models", "loop, s", "one call, s", "loop / call"):
        table.add_column(column, justify="right")
    for batch_size in args.batch_sizes:
        shards = (tuple(stratified_batches(validation.labels, batch_size, rng)),)
        setup = replace(prepared.setup, validation=validation, scoring_shards=shards)
        objective = work.build_objective(setup, device)
        for count in args.counts:
            ids, some = range(count), updates[:count]

            def loop(setup=setup, objective=objective, ids=ids) -> None:
                for i in ids:
                    work.probe_client(setup, objective, broadcast, updates[i], None, client_id=i)

            def call(setup=setup, objective=objective, ids=ids, some=some) -> None:
                work.probe_clients(setup, objective, broadcast, some, None, ids)

            one_by_one, together = (seconds_of(way, args.repeats, clock) for way in (loop, call))
            numbers = (f"{one_by_one:.3f}", f"{together:.3f}", f"{one_by_one / together:.2f}")
            table.add_row(str(batch_size), str(count), *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
