"""What a process loads, read from its `sys.modules`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

HEAVY = ("torch", "ray", "pydantic", "pyarrow", "numpy")

STEPS = """
import torch, raysim.algorithms, raysim.weighting
from raysim.local import OptimizerSettings
for name in ("sgd", "adam", "adamw"):
    params = torch.ones(3)
    OptimizerSettings(name).start(params, torch.ones(3))()
    assert (params < 1).all()
"""

SCORING = """
import numpy as np, torch
from raysim.data.arrays import ImageSet
from raysim.execution import work
from raysim.models import build_model
from raysim.models.base import InputSpec, ModelSettings
from raysim.objective import ModelObjective, stacked_sums
from raysim.state import Buffers
images = ImageSet(np.zeros((4, 1, 28, 28), np.uint8), np.arange(4))
model = build_model(ModelSettings("lenet5"), InputSpec(1, 28, 28, 10), np.random.default_rng(0))
objective = ModelObjective(model, images).on(images, "bfloat16")
buffers = Buffers(objective.buffers.floats.repeat(2, 1), objective.buffers.ints.repeat(2, 1))
with objective.scoring("batch"):
    batch = objective.take(np.arange(4))
    objective.add_gradient(batch)
    stacked_sums(objective, objective.params.repeat(2, 1), buffers, [batch], gradient=True)
"""

HELP = """
import raysim.cli
try:
    raysim.cli.app(["--help"])
except SystemExit as done:
    assert done.code == 0
"""


def loaded(code: str, modules: Iterable[str], *arguments: str) -> list[str]:
    """Which of the modules a fresh process has loaded after the code."""
    code = f"import sys\n{code}\nprint('LOADED', *[name for name in {tuple(modules)} if name in sys.modules])"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *_, last = done.stdout.splitlines()
    marker, *names = last.split()
    assert marker == "LOADED"
    return names


def test_the_package_and_its_help_load_nothing_heavy():
    assert loaded("import raysim", HEAVY) == []
    assert loaded(HELP, HEAVY) == []


def test_registries_local_steps_and_scoring_load_neither_ray_nor_torchs_compiler():
    """Scoring in bfloat16 and of several models in one call, too."""
    assert loaded(STEPS + SCORING, ("torch", "ray", "torchvision", "torch._dynamo")) == ["torch"]


@pytest.mark.slow
def test_checking_a_serial_run_loads_no_ray(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{name: mlp}}\nexecution: {{backend: serial}}\noutput: {{dir: '{tmp_path}'}}\n")
    check = f"import raysim.cli\nraysim.cli.app(['check', {str(file)!r}], standalone_mode=False)"
    assert loaded(check, ("torch", "ray", "torchvision")) == ["torch"]
