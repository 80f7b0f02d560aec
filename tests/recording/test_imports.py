from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "matplotlib", "tensorboard")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (("raysim.recording", "raysim.recording.records"), (*HEAVY, "numpy", "pyarrow", "rich", "pydantic")),
        (tuple(f"raysim.recording.{name}" for name in ("progress", "runfolder")), (*HEAVY, "numpy", "pyarrow")),
        (tuple(f"raysim.recording.{name}" for name in ("tables", "tensorboard", "manifest", "checkpoint")), HEAVY),
        (("raysim.recording.figures",), HEAVY),
    ],
)
def test_imports_stay_light(modules, absent):
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
