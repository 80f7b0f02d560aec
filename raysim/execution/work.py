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
from raysim.evaluation import ShardPredictions, predict_shard
from raysim.execution.base import GROUP, Broadcast, FusedModel, Packed, Setup, TrainReport, WorkItem
from raysim.execution.faults import strike
from raysim.fusion.base import Candidates
from raysim.models import build_model
from raysim.objective import Batch, ModelObjective, Objective
from raysim.seeding import Purpose, rng_for, torch_seeded_from
from raysim.state import Arrays, Buffers, as_tensor, record_checksum, vectors_and_numbers
from raysim.subset import Shards, subset_shards
from raysim.vector import VectorLayout, add_scaled, first_nonfinite
from raysim.weighting.base import Needs, Probe, Scored, Sums, Tally, add_sums

BUFFER_FLOATS, BUFFER_INTS = "buffers.floats", "buffers.ints"


def build_objective(setup: Setup, device: torch.device | str = "cpu") -> ModelObjective:
    """The run's model, bound to flat vectors; its values are those of round 0."""
    # Actors overwrite the values, so only the driver needs pretrained ones.
    model = build_model(replace(setup.model, pretrained=False), setup.input_spec, rng_for(setup.seed, Purpose.INIT))
    return ModelObjective(model, setup.validation, device=device)


@contextmanager
def torch_settings(setup: Setup, device: torch.device) -> Iterator[None]:
    """Threads, gradient mode and determinism of a unit of work; put back afterwards.

    All of them are set for every unit because a process may be shared (serial) or run units on several threads (actors).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(setup.threads)
    # Only where it matters: the switch imports torch's compiler, seconds of start-up in every actor.
    strict = device.type == "cuda" and setup.deterministic and not torch.are_deterministic_algorithms_enabled()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    if strict:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        matmul.allow_tf32 = cudnn.allow_tf32 = cudnn.benchmark = False
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        if strict:
            torch.use_deterministic_algorithms(False)
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
    with torch_settings(setup, device):
        bound = objective.on(setup.train.take(setup.partition.of(item.client_id)))
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
    )
    return arrays, packed, report


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
    with torch_settings(setup, objective.device):
        server = broadcast.server.unpack(objective.device)
        params = server.params + as_tensor(arrays["delta"], objective.device)
        buffers = Buffers(as_tensor(arrays[BUFFER_FLOATS]), as_tensor(arrays[BUFFER_INTS]))
        bound = objective.on(setup.validation)
        bound.load(params, buffers)
        _recalibrate(setup, bound, setup.weighting.needs, broadcast.round_num)
        with bound.scoring(setup.scoring.batch_norm):
            gather = setup.weighting.accumulate
            tally = _tally(setup, bound, broadcast.round_num, level, sums, gather)

        def finish(sums: Sums, reference: Sums | None) -> Probe:
            return setup.weighting.finish(sums, Scored(params, server.params, bound.layout, reference))

        probe = finish(tally.total, reference.total if reference else None)
        if tally.parts is not None:
            first, second = map(finish, tally.parts, (reference.parts if reference else None) or (None, None))
            probe = replace(probe, halves=(first, second))
    return probe, time.perf_counter() - started, tally.total


def reference_at(
    setup: Setup, objective: ModelObjective, broadcast: Broadcast, level: int = 0, sums: Sums | None = None
) -> Tally | None:
    """What the weighting needs of the global model on the validation set, or on a subset as `probe_client` scores it."""
    weighting = setup.weighting
    if weighting.reference_needs == "nothing":
        return None
    with torch_settings(setup, objective.device):
        bound = objective.on(setup.validation)
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
    """Predictions of the global model on one shard of the test set, in evaluation mode."""
    with torch_settings(setup, objective.device):
        bound = objective.on(setup.test)
        bound.load(server.unpack(objective.device).params, buffers.unpack(objective.device))
        return predict_shard(bound, setup.evaluation_shards[shard], setup.evaluation_batch_size)


def sum_updates(
    positions: Sequence[int], load: Callable[[int], Arrays], coefficients: Mapping[str, Coefficients]
) -> dict[str, np.ndarray]:
    """Linear combinations of update fields over a cohort, in float64.

    Updates are added in order inside fixed groups of 16 positions of the sampled cohort, then the groups in order. The grouping
    is part of the numerics: it lets groups be summed where the data lies without changing a bit.

    Args:
        positions: Each update's place in the sampled cohort, ascending.
        load: Gives the vectors of the i-th update; one update is in memory at a time.
        coefficients: Update field -> factors over the updates.
    """
    return add_groups(
        sum_group(map(load, members), {name: c.rows(members) for name, c in coefficients.items()})
        for members in groups_of(positions)
    )


def groups_of(positions: Sequence[int]) -> list[list[int]]:
    """The updates that are summed together, as indices into `positions`, in order."""
    groups: dict[int, list[int]] = {}
    for i, position in enumerate(positions):
        groups.setdefault(position // GROUP, []).append(i)
    return list(groups.values())


def sum_group(updates: Iterable[Arrays], coefficients: Mapping[str, Coefficients]) -> dict[str, np.ndarray]:
    """The sums over one group, from its updates in order and the coefficients of these."""
    totals: dict[str, np.ndarray] = {}
    for i, arrays in enumerate(updates):
        for name, factors in coefficients.items():
            vector = arrays[name]
            if name not in totals:
                totals[name] = np.zeros(vector.shape, dtype=np.float64)
            if factors.values.ndim == 1:
                add_scaled(totals[name], vector, factors.values[i])
                continue
            for unit, factor in zip(factors.units, factors.values[i], strict=True):
                for part in unit.slices:
                    add_scaled(totals[name][part], vector[part], factor)
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
