"""The units of work as pure functions: what runs in an actor under Ray and in this process under `serial`.

Nothing outlives a call but the setup and the buffers of a bound model, which every call overwrites before it reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raysim.algorithms.base import Coefficients
from raysim.evaluation import Metrics, ShardPredictions, metrics_of, predict_shard
from raysim.execution.base import GROUP, Broadcast, FusedModel, GpuMemory, Packed, Setup, TrainReport, WorkItem
from raysim.execution.faults import strike
from raysim.fusion.base import Candidates
from raysim.models import build_model
from raysim.objective import Batch, BatchSums, ModelObjective, Objective, Precision, stacked_sums
from raysim.seeding import Purpose, rng_for, torch_seeded_from
from raysim.state import Arrays, Buffers, as_tensor, record_checksum, vectors_and_numbers
from raysim.subset import Shards, subset_shards
from raysim.vector import VectorLayout, add_scaled, first_nonfinite
from raysim.weighting.base import Needs, Probe, Scored, Sums, Tally, add_sums, sums_of

BUFFER_FLOATS, BUFFER_INTS = "buffers.floats", "buffers.ints"


def build_objective(setup: Setup, device: torch.device | str = "cpu") -> ModelObjective:
    """The run's model, bound to flat vectors; its values are those of round 0."""
    # Actors overwrite the values, so only the driver needs pretrained ones.
    model = build_model(replace(setup.model, pretrained=False), setup.input_spec, rng_for(setup.seed, Purpose.INIT))
    return ModelObjective(model, setup.validation, device=device)


@contextmanager
def torch_settings(setup: Setup, device: torch.device, precision: Precision = "float32") -> Iterator[None]:
    """Threads, gradient mode, TF32 and determinism of a unit of work; put back afterwards.

    All of them are set for every unit because a process may be shared (serial) or run units on several threads (actors).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(setup.threads)
    # Only where it matters: the switch imports torch's compiler, seconds of start-up in every actor.
    on_gpu = device.type == "cuda"
    strict = on_gpu and setup.deterministic and not torch.are_deterministic_algorithms_enabled()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    if on_gpu:
        matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    if strict:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark = False
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        if strict:
            torch.use_deterministic_algorithms(False)
        if on_gpu:
            matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = flags


def train_client(
    setup: Setup, objective: ModelObjective, broadcast: Broadcast, item: WorkItem, state: Packed, *, attempt: int = 1
) -> tuple[Arrays, Packed, TrainReport]:
    """Local work of one client in one round.

    Args:
        setup: The run.
        objective: The process's bound model; overwritten.
        broadcast: Server state and buffers at the start of the round.
        item: Which client.
        state: The client's state, or no record before its first part.
        attempt: For test faults only; a repeated unit draws the same numbers.

    Returns:
        The update's vectors with the model's buffers, the client's new state, and the report.
    """
    started = time.perf_counter()
    faults = strike(setup.faults, "train", item.client_id, broadcast.round_num, attempt)
    device = objective.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch_settings(setup, device, setup.client_precision):
        bound = objective.on(setup.train.take(setup.partition.of(item.client_id)), setup.client_precision)
        server = broadcast.server.unpack(device)
        bound.load(server.params, broadcast.buffers.unpack(device))
        client = state.unpack(device) if state.kind is not None else setup.algorithm.init_client(server.params)
        rng = rng_for(setup.seed, Purpose.LOCAL, round_num=broadcast.round_num, client_id=item.client_id)
        with torch_seeded_from(rng, device), bound.training():
            training = setup.training.at(broadcast.round_num, setup.rounds)
            update, client = setup.algorithm.client_update(server, client, bound, training, rng)
    arrays, scalars = vectors_and_numbers(update)
    if "nan" in faults:
        arrays["delta"] = np.full_like(arrays["delta"], np.nan)
    arrays[BUFFER_FLOATS] = bound.buffers.floats.detach().cpu().numpy().copy()
    arrays[BUFFER_INTS] = bound.buffers.ints.cpu().numpy().copy()
    packed = Packed.of(client)
    report = TrainReport(
        scalars=scalars,
        buffer_ints=arrays[BUFFER_INTS],
        nonfinite=_first_nonfinite(arrays, packed.arrays, scalars, bound.layout),
        state_checksum=None if client is None else record_checksum(client),
        seconds=time.perf_counter() - started,
        gpu_memory=gpu_memory_of(device),
    )
    return arrays, packed, report


def gpu_memory_of(device: torch.device) -> GpuMemory | None:
    """What this process has needed of its GPU since its peak was last reset; None on the CPU."""
    if device.type != "cuda":
        return None
    return GpuMemory(torch.cuda.max_memory_reserved(device), torch.cuda.mem_get_info(device)[1])


def scoring_shards(setup: Setup, round_num: int, level: int = 0) -> Shards:
    """The validation batches of a round, by shard: those of the run; or of the round's subset, what a level adds to it."""
    subset = setup.scoring.subset
    if subset is None:
        return setup.scoring_shards
    rng = rng_for(setup.seed, Purpose.SCORING, round_num=round_num)
    return subset_shards(setup.validation.labels, subset, setup.scoring.batch_size, level, rng)


def probe_client(
    setup: Setup,
    objective: ModelObjective,
    broadcast: Broadcast,
    arrays: Arrays,
    reference: Tally | None,
    *,
    client_id: int,
    attempt: int = 1,
    level: int = 0,
    sums: Sums | None = None,
) -> tuple[Probe, float, Sums]:
    """Score one client's model, `params + delta` with the client's own buffers, on the validation set or a subset of it.

    Args:
        setup: The run.
        objective: The process's bound model; overwritten.
        broadcast: Server state at the start of the round.
        arrays: The client's update.
        reference: What `reference_at` found, if the weighting wants it.
        client_id: Whose update.
        attempt: For test faults only.
        level: How far the subset has grown.
        sums: Those of the level before; None: all levels are scored, with the same bits.

    Returns:
        The probe, the seconds it took, and the sums over all images so far.
    """
    started = time.perf_counter()
    strike(setup.faults, "score", client_id, broadcast.round_num, attempt)
    with _loaded(setup, objective, broadcast, arrays) as bound:
        tally = _tally(setup, bound, broadcast.round_num, level, sums, setup.weighting.accumulate)
    probe = finish_probe(setup, objective, broadcast, arrays, tally, reference)
    return probe, time.perf_counter() - started, tally.total


def accumulate_shard(setup: Setup, objective: ModelObjective, broadcast: Broadcast, arrays: Arrays, shard: int) -> Sums:
    """The weighting's sums for one client's model over one shard of the validation set."""
    with _loaded(setup, objective, broadcast, arrays) as bound:
        return setup.weighting.accumulate(bound, _batches(bound, setup.scoring_shards[shard]))


def finish_probe(
    setup: Setup,
    objective: ModelObjective,
    broadcast: Broadcast,
    arrays: Arrays,
    tally: Tally,
    reference: Tally | None,
) -> Probe:
    """The probe of one client's model from what was gathered, with those of the parts of a subset."""
    with torch_settings(setup, objective.device):
        params = _trained_params(broadcast, arrays, objective.device)
        global_params = broadcast.server.unpack(objective.device).params

        def finish(sums: Sums, reference: Sums | None) -> Probe:
            return setup.weighting.finish(sums, Scored(params, global_params, objective.layout, reference))

        probe = finish(tally.total, reference.total if reference else None)
        if tally.parts is not None:
            first, second = map(finish, tally.parts, (reference.parts if reference else None) or (None, None))
            probe = replace(probe, halves=(first, second))
    return probe


@contextmanager
def _loaded(setup: Setup, objective: ModelObjective, broadcast: Broadcast, arrays: Arrays) -> Iterator[ModelObjective]:
    """One client's model, on the validation set and ready to be scored."""
    with torch_settings(setup, objective.device, setup.scoring.precision):
        bound = objective.on(setup.validation, setup.scoring.precision)
        buffers = Buffers(as_tensor(arrays[BUFFER_FLOATS]), as_tensor(arrays[BUFFER_INTS]))
        bound.load(_trained_params(broadcast, arrays, objective.device), buffers)
        _recalibrate(setup, bound, setup.weighting.needs, broadcast.round_num)
        with bound.scoring(setup.scoring.batch_norm):
            yield bound


def _trained_params(broadcast: Broadcast, arrays: Arrays, device: torch.device) -> torch.Tensor:
    params: torch.Tensor = broadcast.server.unpack(device).params + as_tensor(arrays["delta"], device)
    return params


def probe_clients(
    setup: Setup,
    objective: ModelObjective,
    broadcast: Broadcast,
    updates: Sequence[Arrays],
    reference: Tally | None,
    client_ids: Sequence[int],
    *,
    attempt: int = 1,
) -> list[tuple[Probe, float]]:
    """Score several clients' models in one call: what `probe_client` finds of each, up to rounding.

    Args:
        setup: The run; what is not `stacks_models` is scored model by model.
        objective: The process's bound model; overwritten.
        broadcast: Server state at the start of the round.
        updates: The clients' updates.
        reference: What `reference_at` found, if the weighting wants it.
        client_ids: Whose updates.
        attempt: For test faults only.

    Returns:
        Each client's probe and its part of the seconds.

    Raises:
        RunError: The network cannot compute several models in one call; names `execution.clients_per_call`.
    """
    weighting = setup.weighting
    if len(updates) == 1 or not stacks_models(setup, objective.layout):
        return [
            probe_client(setup, objective, broadcast, arrays, reference, client_id=client_id, attempt=attempt)[:2]
            for client_id, arrays in zip(client_ids, updates, strict=True)
        ]
    started = time.perf_counter()
    for client_id in client_ids:
        strike(setup.faults, "score", client_id, broadcast.round_num, attempt)
    device = objective.device
    with torch_settings(setup, device, setup.scoring.precision):
        bound = objective.on(setup.validation, setup.scoring.precision)
        params = torch.stack([_trained_params(broadcast, arrays, device) for arrays in updates])
        own = [Buffers(as_tensor(a[BUFFER_FLOATS], device), as_tensor(a[BUFFER_INTS], device)) for a in updates]
        if setup.scoring.batch_norm == "recalibrate":
            own = [_recalibrated(setup, bound, *model, broadcast.round_num) for model in zip(params, own, strict=True)]
        buffers = Buffers(torch.stack([b.floats for b in own]), torch.stack([b.ints for b in own]))
        with bound.scoring(setup.scoring.batch_norm):
            of_shards = [_stacked(bound, params, buffers, shard, weighting.needs) for shard in setup.scoring_shards]
    tallies = [Tally(add_sums(sums)) for sums in zip(*of_shards, strict=True)]
    probes = [
        finish_probe(setup, objective, broadcast, arrays, tally, reference)
        for arrays, tally in zip(updates, tallies, strict=True)
    ]
    seconds = (time.perf_counter() - started) / len(updates)
    return [(probe, seconds) for probe in probes]


def stacks_models(setup: Setup, layout: VectorLayout) -> bool:
    """Whether several models can be scored in one call: the plain sums over all of the validation set are wanted."""
    weighting = setup.weighting
    return weighting.stackable and weighting.gradient_units(layout) is None and setup.scoring.subset is None


def _recalibrated(
    setup: Setup, bound: ModelObjective, params: torch.Tensor, buffers: Buffers, round_num: int
) -> Buffers:
    """A model's buffers under `scoring.batch_norm: recalibrate`."""
    bound.load(params, buffers)
    _recalibrate(setup, bound, setup.weighting.needs, round_num)
    return Buffers(bound.buffers.floats.clone(), bound.buffers.ints.clone())


def _stacked(
    bound: ModelObjective, params: torch.Tensor, buffers: Buffers, shard: Sequence[np.ndarray], needs: Needs
) -> list[Sums]:
    """The sums of each of several models over one shard."""
    grads, sums = stacked_sums(bound, params, buffers, _batches(bound, shard), gradient=needs == "gradient")
    losses, correct = sums.loss.cpu(), sums.correct.cpu()
    return [
        sums_of(None if grads is None else grads[i], BatchSums(losses[i], correct[i], sums.count))
        for i in range(len(params))
    ]


def reference_at(
    setup: Setup, objective: ModelObjective, broadcast: Broadcast, level: int = 0, sums: Sums | None = None
) -> Tally | None:
    """What the weighting needs of the global model on the validation set, or on a subset as `probe_client` scores it."""
    weighting = setup.weighting
    if weighting.reference_needs == "nothing":
        return None
    with torch_settings(setup, objective.device, setup.scoring.precision):
        bound = objective.on(setup.validation, setup.scoring.precision)
        bound.load(broadcast.server.unpack(objective.device).params, broadcast.buffers.unpack(objective.device))
        _recalibrate(setup, bound, weighting.reference_needs, broadcast.round_num)

        def gather(objective: Objective, shard: Iterable[Batch]) -> Sums:
            found = weighting.reference(objective, [shard])
            assert found is not None
            return found

        with bound.scoring(setup.scoring.batch_norm):
            return _tally(setup, bound, broadcast.round_num, level, sums, gather)


def _tally(
    setup: Setup,
    bound: ModelObjective,
    round_num: int,
    level: int,
    sums: Sums | None,
    gather: Callable[[Objective, Iterable[Batch]], Sums],
) -> Tally:
    """What is gathered on the shards of the validation set, or on those of a level of a subset beside all before it."""
    if setup.scoring.subset is None:
        return Tally(add_sums(gather(bound, _batches(bound, shard)) for shard in setup.scoring_shards))
    tally = None if sums is None else Tally(sums)
    for step in range(0 if sums is None else level, level + 1):
        for shard in scoring_shards(setup, round_num, step):
            new = gather(bound, _batches(bound, shard))
            tally = Tally(new) if tally is None else Tally.of(tally.total, new)
    assert tally is not None, "level 0 has two shards"
    return tally


def fuse_models(
    setup: Setup,
    objective: ModelObjective,
    broadcast: Broadcast,
    merged: Packed,
    buffers: Packed,
    weights: np.ndarray,
    updates: Sequence[Arrays],
) -> FusedModel:
    """The run's fusion of a cohort.

    Args:
        setup: The run.
        objective: The process's bound model; overwritten.
        broadcast: Server state at the start of the round.
        merged: Server state after the algorithm's step.
        buffers: The averaged buffers.
        weights: float64 [C].
        updates: The clients' updates.
    """
    assert setup.fusion is not None
    device, round_num = objective.device, broadcast.round_num
    with torch_settings(setup, device):
        bound = objective.on(setup.validation)
        server = merged.unpack(device)
        bound.load(server.params, buffers.unpack(device))
        deltas = [as_tensor(arrays["delta"], device) for arrays in updates]
        candidates = Candidates(broadcast.server.unpack(device).params, server.params, deltas, weights)
        rng = rng_for(setup.seed, Purpose.FUSION, round_num=round_num)
        with torch_seeded_from(rng, device), bound.training():
            training = setup.fusion.training.at(round_num, setup.rounds)
            fused = setup.fusion.fuse(bound, candidates, training, rng)
    return FusedModel(fused.params.cpu().numpy().copy(), Packed.of(bound.buffers.copied()), fused.weights, fused.note)


def evaluate_shard(
    setup: Setup, objective: ModelObjective, server: Packed, buffers: Packed, shard: int
) -> ShardPredictions:
    """Predictions of the global model on one shard of an evaluation, in evaluation mode."""
    tests = len(setup.evaluation_shards)
    images = setup.test if shard < tests else setup.validation
    examples = setup.evaluation_shards[shard] if shard < tests else setup.validation_shards[shard - tests]
    with torch_settings(setup, objective.device):
        bound = objective.on(images)
        bound.load(server.unpack(objective.device).params, buffers.unpack(objective.device))
        return predict_shard(bound, examples, setup.evaluation_batch_size)


def evaluation_metrics(setup: Setup, shards: Sequence[ShardPredictions]) -> Metrics:
    """Metrics from the predictions on all shards of an evaluation, in their order."""
    tests, classes = len(setup.evaluation_shards), setup.input_spec.num_classes
    metrics = metrics_of(setup.test.labels, shards[:tests], classes)
    if not setup.validation_shards:
        return metrics
    validation = metrics_of(setup.validation.labels, shards[tests:], classes)
    return replace(metrics, validation_loss=validation.loss, validation_accuracy=validation.accuracy)


def sum_updates(
    positions: Sequence[int], load: Callable[[int], Arrays], coefficients: Mapping[str, Coefficients]
) -> dict[str, np.ndarray]:
    """Linear combinations of update fields over a cohort, in float64.

    Updates are added in order inside fixed groups of 16 positions of the sampled cohort, then the groups in order. The grouping
    is part of the numerics: it lets groups be summed where the data lies without changing a bit.

    Args:
        positions: Each update's place in the sampled cohort, ascending.
        load: Gives the vectors of the i-th update; those of one group are held at a time.
        coefficients: Update field -> factors over the updates.
    """
    return add_groups(
        sum_group(list(map(load, members)), {name: c.rows(members) for name, c in coefficients.items()})
        for members in groups_of(positions)
    )


def groups_of(positions: Sequence[int]) -> list[list[int]]:
    """The updates that are summed together, as indices into `positions`, in order."""
    groups: dict[int, list[int]] = {}
    for i, position in enumerate(positions):
        groups.setdefault(position // GROUP, []).append(i)
    return list(groups.values())


def sum_group(updates: Sequence[Arrays], coefficients: Mapping[str, Coefficients]) -> dict[str, np.ndarray]:
    """The sums over one group, from its updates in order and the coefficients of these."""
    totals: dict[str, np.ndarray] = {}
    for name, factors in coefficients.items():
        vectors = [arrays[name] for arrays in updates]
        total = totals[name] = np.zeros(vectors[0].shape, dtype=np.float64)
        if factors.values.ndim == 1:
            add_scaled(total, vectors, factors.values)
            continue
        for unit, of_unit in zip(factors.units, factors.values.T, strict=True):
            for part in unit.slices:
                add_scaled(total[part], [vector[part] for vector in vectors], of_unit)
    return totals


def add_groups(groups: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The sums of groups, added in their order."""
    totals: dict[str, np.ndarray] = {}
    for sums in groups:
        for name, partial in sums.items():
            if name not in totals:
                totals[name] = partial if partial.flags.writeable else partial.copy()
            else:
                totals[name] += partial
    return totals


def _recalibrate(setup: Setup, bound: ModelObjective, needs: Needs, round_num: int) -> None:
    """Under `scoring.batch_norm: recalibrate`, statistics of the validation set for the model that is about to be scored.

    Of a subset those of its first images: sums of all its levels are taken at one and the same model.
    """
    if setup.scoring.batch_norm == "recalibrate" and needs in ("losses", "gradient"):
        bound.recalibrate(batch for shard in scoring_shards(setup, round_num) for batch in _batches(bound, shard))


def _batches(bound: ModelObjective, shard: Sequence[np.ndarray]) -> Iterator[Batch]:
    return (bound.take(indices) for indices in shard)


def _first_nonfinite(update: Arrays, state: Arrays, scalars: Mapping[str, Any], layout: VectorLayout) -> str | None:
    """Name of the first thing with a NaN or infinity in what a client returns: a tensor of the delta, a vector, a number."""
    for name, array in update.items():
        if np.issubdtype(array.dtype, np.floating) and (index := first_nonfinite(array)) is not None:
            return layout.tensor_at(index) if name == "delta" else name
    for name, array in state.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            return f"client state {name}"
    return next((name for name, value in scalars.items() if not np.isfinite(value).all()), None)
