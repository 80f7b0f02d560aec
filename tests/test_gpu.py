"""What only a GPU can show: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from raysim.config import resolve
from raysim.execution import work
from raysim.execution.base import Broadcast, Packed, WorkItem
from raysim.objective import _COPIES
from raysim.preparation import Prepared, prepare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

CUDA = torch.device("cuda")


@pytest.fixture
def prepared() -> Prepared:
    return prepare(
        resolve(
            {
                "data": {"image_size": 28},
                "partition": {"clients": 4},
                "client": {"local_epochs": 1},
                "weighting": {"name": "fedvg"},
                "execution": {"backend": "serial"},
            }
        )
    )


def trained(prepared: Prepared, objective, precision: str = "float32"):
    """A round's broadcast and what client 0 makes of it."""
    setup, state = replace(prepared.setup, client_precision=precision), prepared.initial
    broadcast = Broadcast.of(1, state.server, state.buffers)
    item = WorkItem(0, 0, None, prepared.population.num_examples[0])
    arrays, _, report = work.train_client(setup, objective, broadcast, item, Packed(None, {}))
    return broadcast, arrays, report


def test_a_unit_repeats_and_is_close_to_the_cpus(prepared):
    objective = work.build_objective(prepared.setup, CUDA)
    deltas = [trained(prepared, objective)[1]["delta"] for _ in range(2)]
    assert deltas[0].tobytes() == deltas[1].tobytes()
    on_cpu = trained(prepared, work.build_objective(prepared.setup))[1]["delta"]
    assert np.linalg.norm(deltas[0] - on_cpu) < 1e-2 * np.linalg.norm(on_cpu)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_other_precisions_repeat_and_are_close(prepared, precision):
    objective = work.build_objective(prepared.setup, CUDA)
    plain = trained(prepared, objective)[1]["delta"]
    first, again = (trained(prepared, objective, precision)[1]["delta"] for _ in range(2))
    assert first.tobytes() == again.tobytes()
    assert 0 < np.linalg.norm(first - plain) < 0.1 * np.linalg.norm(plain)


def test_memory_is_reported(prepared):
    memory = trained(prepared, work.build_objective(prepared.setup, CUDA))[2].gpu_memory
    assert 0 < memory.peak < memory.total == torch.cuda.get_device_properties(0).total_memory


def test_the_validation_set_is_sent_once_and_a_clients_data_is_dropped(prepared):
    objective = work.build_objective(prepared.setup, CUDA)
    broadcast, arrays, _ = trained(prepared, objective)
    assert not _COPIES
    for _ in range(2):
        work.probe_client(prepared.setup, objective, broadcast, arrays, None, client_id=0)
    (kept,) = _COPIES.values()
    assert kept.inputs.device.type == "cuda"
    assert torch.equal(kept.inputs.cpu(), torch.from_numpy(prepared.setup.validation.images))


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_models_scored_in_one_call_agree_with_the_loop(prepared, mode):
    setup = replace(prepared.setup, scoring=replace(prepared.setup.scoring, batch_norm=mode))
    objective = work.build_objective(setup, CUDA)
    broadcast, arrays, _ = trained(prepared, objective)
    other = {**arrays, "delta": 2 * arrays["delta"]}
    found = work.probe_clients(setup, objective, broadcast, [arrays, other], None, (0, 1))
    for client_id, update in enumerate((arrays, other)):
        probe, *_ = work.probe_client(setup, objective, broadcast, update, None, client_id=client_id)
        assert found[client_id][0].score == pytest.approx(probe.score, rel=1e-4)
        assert found[client_id][0].loss == pytest.approx(probe.loss, rel=1e-5)


def test_scoring_a_batch_waits_for_nothing(prepared):
    """torch refuses a wait for the GPU inside."""
    objective = work.build_objective(prepared.setup, CUDA)
    with objective.scoring("batch"):
        objective.add_gradient(objective.take(np.arange(32)))
        torch.cuda.set_sync_debug_mode("error")
        try:
            batch = objective.take(np.arange(32))
            objective.add_gradient(batch) + objective.losses(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
