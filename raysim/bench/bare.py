"""The yardstick: the arithmetic of a round in plain PyTorch processes, with neither Ray nor raysim's vectors in between.

Processes with one thread each share a queue, largest client first. Each takes a client, trains it with `torch.nn` and
`torch.optim.SGD`, and takes its gradient on the validation set at once. Same data, cohorts, batches and test set as raysim; no
aggregation, no records.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from raysim.algorithms.fedavg import FedAvg
from raysim.config import RunConfig
from raysim.data.arrays import ImageSet
from raysim.errors import RunError
from raysim.execution.base import Setup
from raysim.local import OptimizerSettings
from raysim.models import build_model, has_batch_norm
from raysim.objective import cut_batches
from raysim.preparation import Prepared
from raysim.seeding import Purpose, rng_for
from raysim.simulation import sample_cohort
from raysim.weighting.fedvg import FedVG

LISTEN_S = 2.0
"""How often a process that waits looks whether its other side is still there."""


def mirrored(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The nearest configuration whose arithmetic the bare loop has, and what is different in it."""
    notes = []
    if config.algorithm.name != "fedavg":
        notes.append(f"algorithm {config.algorithm.name} is measured as fedavg")
        config = replace(config, algorithm=FedAvg())
    assert config.weighting is not None
    if config.weighting.name != "fedvg" and config.weighting.needs != "nothing":
        notes.append(f"weighting {config.weighting.name} is measured as fedvg")
        config = replace(config, weighting=FedVG())
    if config.fusion is not None:
        notes.append(f"fusion {config.fusion.name} is left out")
        config = replace(config, fusion=None)
    optimizer = config.client.optimizer
    if optimizer.name != "sgd":
        notes.append(f"optimizer {optimizer.name} is measured as sgd")
        plain = OptimizerSettings(lr=optimizer.lr, schedule=optimizer.schedule)
        config = replace(config, client=replace(config.client, optimizer=plain))
    if config.scoring.batch_norm == "recalibrate":
        notes.append("scoring.batch_norm recalibrate is measured as batch")
        config = replace(config, scoring=replace(config.scoring, batch_norm="batch"))
    return config, notes


class BareLoop:
    """Bare processes for a run's rounds.

    Args:
        prepared: The run.
        processes: How many.
        gpus: GPUs that they take in turn; 0: they compute on the CPU.

    Raises:
        RunError: A process ended before its work.
    """

    def __init__(self, prepared: Prepared, processes: int, gpus: int = 0) -> None:
        self._prepared = prepared
        context = multiprocessing.get_context("spawn")
        self._tasks: Any = context.Queue()
        self._done: Any = context.Queue()
        devices = [f"cuda:{i % gpus}" if gpus else "cpu" for i in range(processes)]
        self._processes = [
            context.Process(target=_serve, args=(prepared.setup, device, self._tasks, self._done), daemon=True)
            for device in devices
        ]
        # Ctrl-C reaches every process of a terminal. These inherit that it is ignored: the one that started them ends them.
        heard = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if heard else None
        try:
            for process in self._processes:
                process.start()
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)
        try:
            self._wait(processes)
        except BaseException:
            self.close()
            raise

    def rounds(self, count: int) -> float:
        """Seconds of the run's first rounds, each with its test where one is due."""
        config, sizes = self._prepared.config, self._prepared.population.num_examples
        started = time.perf_counter()
        for round_num in range(1, count + 1):
            cohort = sample_cohort(config.seed, round_num, len(sizes), config.cohort_size)
            cohort = [client for client in cohort if sizes[client]]
            for client in sorted(cohort, key=lambda k: -sizes[k]):
                self._tasks.put(("client", round_num, client))
            self._wait(len(cohort))
            if round_num % config.evaluation.every == 0 or round_num == count:
                shards = len(self._prepared.setup.evaluation_shards)
                for shard in range(shards):
                    self._tasks.put(("test", round_num, shard))
                self._wait(shards)
        return time.perf_counter() - started

    def scored(self, models: int) -> float:
        """Seconds of scoring as many models as given."""
        started = time.perf_counter()
        for model in range(models):
            self._tasks.put(("score", 0, model))
        self._wait(models)
        return time.perf_counter() - started

    def _wait(self, count: int) -> None:
        while count:
            try:
                self._done.get(timeout=LISTEN_S)
                count -= 1
            except queue.Empty:
                ended = [process for process in self._processes if not process.is_alive()]
                if ended:
                    raise RunError(f"a bare process ended with exit status {ended[0].exitcode}") from None

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for channel in (self._tasks, self._done):
            channel.cancel_join_thread()
            channel.close()


def _serve(setup: Setup, device: str, tasks: Any, done: Any) -> None:
    torch.set_num_threads(setup.threads)
    model = build_model(replace(setup.model, pretrained=False), setup.input_spec, rng_for(setup.seed, Purpose.INIT))
    model.to(device)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done.put("ready")
    parent = multiprocessing.parent_process()
    while True:
        try:
            kind, round_num, key = tasks.get(timeout=LISTEN_S)
        except queue.Empty:
            if parent is None or not parent.is_alive():
                return
            continue
        if kind == "client":
            model.load_state_dict(start)
            _train(setup, model, round_num, key, device)
        if kind == "score" or (kind == "client" and setup.weighting.needs_probe):
            _score(setup, model, device)
        elif kind == "test":
            _test(setup, model, key, device)
        done.put(key)


def _train(setup: Setup, model: nn.Module, round_num: int, client: int, device: str) -> None:
    model.train()
    training = setup.training.at(round_num, setup.rounds)
    settings = training.optimizer
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, settings.lr, settings.momentum, weight_decay=settings.weight_decay)
    examples = setup.partition.of(client)
    rng = rng_for(setup.seed, Purpose.LOCAL, round_num=round_num, client_id=client)
    rng.integers(2**63)  # What raysim seeds torch with comes first: the batches are the same.
    rule, normed = training.last_batch, has_batch_norm(model)
    for _ in range(training.local_epochs):
        order = rng.permutation(len(examples))
        for batch in cut_batches(order, training.batch_size, last_batch=rule, has_batch_norm=normed):
            inputs, labels = _load(setup.train, examples[batch], device)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _score(setup: Setup, model: nn.Module, device: str) -> None:
    model.train(setup.scoring.batch_norm == "batch")
    model.zero_grad()
    for shard in setup.scoring_shards:
        for batch in shard:
            inputs, labels = _load(setup.validation, batch, device)
            loss = F.cross_entropy(model(inputs), labels, reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
    norms = [p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None]
    if not np.isfinite(norms).all():
        raise RunError("a validation gradient of the bare loop is not finite; a smaller client.optimizer.lr helps")


@torch.no_grad()
def _test(setup: Setup, model: nn.Module, shard: int, device: str) -> None:
    model.eval()
    examples = setup.evaluation_shards[shard]
    for start in range(0, len(examples), setup.evaluation_batch_size):
        inputs, _ = _load(setup.test, examples[start : start + setup.evaluation_batch_size], device)
        model(inputs).argmax(dim=1).cpu()


def _load(images: ImageSet, chosen: np.ndarray, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.from_numpy(images.images[chosen]).to(device).float().div_(255.0)
    return inputs, torch.from_numpy(images.labels[chosen]).to(device)
