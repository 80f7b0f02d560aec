from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import raysim
from runs import checksums, run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_node_that_is_lost_in_a_round_changes_no_bit(tmp_path):
    """Its actors, the units they ran and the updates that lay on it are gone; the clients train again on what is left."""
    overrides = ["rounds=4", "execution.client_actors=2", "execution.scorer_actors=2", "execution.resource_timeout_s=5"]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("node_loss.py"), tmp_path, *overrides],
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = raysim.load(tmp_path / "lost")
    assert checksums(record) == checksums(run(tmp_path, "serial", rounds=4, backend="serial"))
    assert set(record.clients["status"].to_pylist()) == {"ok"}
    assert "is replaced" in (record.folder / "run.log").read_text()
    # Two other nodes: the model there twice (to train on and to be tested), the float64 sum back; not ten clients' updates.
    model = 4 * record.manifest["model"]["parameters"]
    assert 6 * model <= record.rounds["driver_bytes"].to_pylist()[0] < 8.5 * model
