"""What the README says about adding a method, done word for word in a copy of the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_an_algorithm_is_one_file_and_one_line(tmp_path):
    for name in ("raysim", "tests", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (code,) = (block for block in BLOCKS if "class FedExP" in block)
    ((imported, entry),) = (block.split("...\n") for block in BLOCKS if '"fedexp": FedExP,' in block)
    (tmp_path / "raysim/algorithms/fedexp.py").write_text(code, encoding="utf-8")
    registry = tmp_path / "raysim/algorithms/__init__.py"
    text = registry.read_text(encoding="utf-8")
    future = "from __future__ import annotations\n"
    text = text.replace(future, future + imported).replace("\n}\n", f"\n{entry}}}\n")
    registry.write_text(text, encoding="utf-8")

    def python(*args: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    passed = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/algorithms/test_laws.py", "-k", "fedexp")
    assert re.search(r"^\d\d+ passed", passed, re.MULTILINE)
    few = ["rounds=2", "client.per_round=3", "execution.backend=serial", f"output.dir={tmp_path}/runs"]
    python("-m", "raysim", "run", "configs/quickstart.yaml", "algorithm.name=fedexp", *few)
    result = json.loads((tmp_path / "runs/quickstart/result.json").read_text())
    assert result["status"] == "finished"
