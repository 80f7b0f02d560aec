"""Seconds per round of raysim beside a bare PyTorch loop that does the same arithmetic, in alternation.

    python tests/benchmarks/round_time.py --root /usr/share/datasets/fashion-mnist [--pairs 5] [--scoring-batch 32 256]

The bare loop: two processes with one thread each share a queue, largest client first; each takes a client, trains it with
plain `torch.nn` and `torch.optim.SGD`, and scores it at once. Same data, cohorts, batches and test evaluation; no aggregation,
no records. raysim's time covers everything up to the committed round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from raysim.config import load_config
from raysim.execution.base import Setup
from raysim.models import build_model
from raysim.objective import cut_batches
from raysim.preparation import Prepared, prepare
from raysim.recorder import Recorder
from raysim.recording.progress import Silent
from raysim.seeding import Purpose, rng_for
from raysim.simulation import make_executor, rounds, sample_cohort

PROCESSES = 2


def inputs(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).float().div_(255.0)


def bare_client(
    setup: Setup, model: torch.nn.Module, start: dict[str, torch.Tensor], round_num: int, client: int
) -> None:
    """Train one client and take its gradient on the validation set, as plain PyTorch does it."""
    model.load_state_dict(start)
    model.train()
    training = setup.training
    optimizer = torch.optim.SGD(model.parameters(), lr=training.optimizer.lr)
    examples = setup.partition.of(client)
    rng = rng_for(setup.seed, Purpose.LOCAL, round_num=round_num, client_id=client)
    rng.integers(2**63)
    for _ in range(training.local_epochs):
        order = rng.permutation(len(examples))
        for batch in cut_batches(order, training.batch_size, last_batch="auto", has_batch_norm=True):
            chosen = examples[batch]
            optimizer.zero_grad()
            loss = F.cross_entropy(
                model(inputs(setup.train.images[chosen])), torch.from_numpy(setup.train.labels[chosen])
            )
            loss.backward()
            optimizer.step()
    model.zero_grad()
    for shard in setup.scoring_shards:
        for batch in shard:
            labels = torch.from_numpy(setup.validation.labels[batch])
            F.cross_entropy(model(inputs(setup.validation.images[batch])), labels, reduction="sum").backward()
    norms = [p.grad.abs().sum().item() for p in model.parameters()]
    assert np.isfinite(norms).all()


@torch.no_grad()
def bare_test(setup: Setup, model: torch.nn.Module, shard: int) -> None:
    model.eval()
    examples = setup.evaluation_shards[shard]
    for start in range(0, len(examples), setup.evaluation_batch_size):
        chosen = examples[start : start + setup.evaluation_batch_size]
        model(inputs(setup.test.images[chosen])).argmax(dim=1)


def bare_process(setup: Setup, tasks: Any, done: Any) -> None:
    torch.set_num_threads(1)
    model = build_model(setup.model, setup.input_spec, rng_for(setup.seed, Purpose.INIT))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done.put("ready")
    while (task := tasks.get()) is not None:
        kind, round_num, key = task
        if kind == "client":
            bare_client(setup, model, start, round_num, key)
        else:
            bare_test(setup, model, key)
        done.put(key)


class BareLoop:
    """Two processes, a shared queue, largest first."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        context = multiprocessing.get_context("spawn")
        self._tasks, self._done = context.Queue(), context.Queue()
        self._processes = [
            context.Process(target=bare_process, args=(prepared.setup, self._tasks, self._done))
            for _ in range(PROCESSES)
        ]
        for process in self._processes:
            process.start()
        for _ in self._processes:
            self._done.get()

    def round(self, round_num: int) -> float:
        """Seconds of one round."""
        prepared = self._prepared
        cohort = sample_cohort(
            prepared.config.seed, round_num, prepared.population.num_clients, prepared.config.cohort_size
        )
        started = time.perf_counter()
        for client in sorted(cohort, key=lambda k: -prepared.population.num_examples[k]):
            self._tasks.put(("client", round_num, client))
        for _ in cohort:
            self._done.get()
        for shard in range(len(prepared.setup.evaluation_shards)):
            self._tasks.put(("test", round_num, shard))
        for _ in prepared.setup.evaluation_shards:
            self._done.get()
        return time.perf_counter() - started

    def close(self) -> None:
        for _ in self._processes:
            self._tasks.put(None)
        for process in self._processes:
            process.join()


def compare(root: str, scoring_batch: int, pairs: int, overrides: list[str]) -> dict[str, Any]:
    """Alternate rounds of raysim and of the bare loop."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            "configs/fashion_mnist.yaml",
            [
                f"data.root={root}",
                f"scoring.batch_size={scoring_batch}",
                f"rounds={pairs + 1}",
                f"output.dir={folder}",
                *overrides,
            ],
        )
        prepared = prepare(config)
        config.folder.mkdir()
        from datetime import UTC, datetime

        with contextlib.ExitStack() as stack:
            executor = stack.enter_context(contextlib.closing(make_executor(prepared, Silent())))
            recorder = stack.enter_context(contextlib.closing(Recorder(prepared, executor, datetime.now(UTC), None)))
            bare = stack.enter_context(contextlib.closing(BareLoop(prepared)))
            run = rounds(prepared, executor, recorder, Silent())
            plan = executor.describe()
            rows = []
            for pair in range(pairs + 1):
                clock = time.perf_counter()
                record = next(run)
                ours = time.perf_counter() - clock
                floor = bare.round(record.round_num)
                if pair == 0:  # Warm-up of both.
                    continue
                rows.append((ours, floor, record))
                parts = {
                    "train": record.train_s,
                    "score tail": record.score_tail_s,
                    "aggregate": record.aggregate_s,
                    "evaluate": record.evaluate_s,
                    "commit": record.commit_s,
                }
                print(
                    f"  pair {pair}: raysim {ours:.2f} s ({', '.join(f'{name} {s:.3f}' for name, s in parts.items())}; "
                    f"busy: clients {record.client_utilisation:.0%}, scorers {record.scorer_utilisation:.0%})  "
                    f"bare {floor:.2f} s  ratio {ours / floor:.3f}",
                    flush=True,
                )
    ratios = [ours / floor for ours, floor, _ in rows]
    return {
        "scoring_batch": scoring_batch,
        "client_actors": plan["client_actors"],
        "scorer_actors": plan["scorer_actors"],
        "raysim_s": statistics.median(r[0] for r in rows),
        "bare_s": statistics.median(r[1] for r in rows),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root", default="/usr/share/datasets/fashion-mnist", help="folder of Fashion-MNIST's idx files"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--scoring-batch", type=int, nargs="+", default=[32, 256])
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    args = parser.parse_args()
    for batch in args.scoring_batch:
        print(f"scoring batch {batch}:", flush=True)
        result = compare(args.root, batch, args.pairs, args.overrides)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
