"""What an actor does with the GPU that it was given, without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from raysim.execution import ray_actors


@pytest.mark.parametrize(
    ("assigned", "share", "available", "device", "limit"),
    [
        (["0"], 0.25, True, "cuda", 0.25),
        (["0"], 1.0, True, "cuda", None),
        (["0", "1"], 2.0, True, "cuda", None),
        ([], 0.0, True, "cpu", None),
        (["0"], 0.5, False, "cpu", None),
    ],
)
def test_an_actor_with_a_part_of_a_gpu_takes_no_more_of_its_memory(
    monkeypatch, assigned, share, available, device, limit
):
    context = SimpleNamespace(
        get_accelerator_ids=lambda: {"GPU": assigned},
        get_assigned_resources=lambda: {"CPU": 1.0, "GPU": share},
    )
    limits = []
    monkeypatch.setattr(ray_actors.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    assert ray_actors._device() == torch.device(device)
    assert limits == ([] if limit is None else [limit])
