from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from raysim.errors import RunError
from raysim.recording import manifest
from raysim.recording.manifest import build_manifest, write_json


@dataclass(frozen=True)
class Plan:
    actors: int
    share: float


def read(path: Path) -> object:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_values(tmp_path):
    value = {
        "z": float("nan"),
        "a": [float("inf"), 1 / 3, True, None],
        "numpy": (np.float32(0.5), np.int64(3), np.array([[1.0, np.nan]])),
        "path": Path("out/\u00e9t\u00e9"),
        "time": datetime(2026, 1, 1, tzinfo=UTC),
        "plan": Plan(3, float("inf")),
        7: "seven",
    }
    write_json(tmp_path / "value.json", value)
    found = read(tmp_path / "value.json")
    assert list(found) == ["z", "a", "numpy", "path", "time", "plan", "7"]  # Not sorted.
    assert found == {
        "z": None,
        "a": [None, 1 / 3, True, None],
        "numpy": [0.5, 3, [[1.0, None]]],
        "path": str(Path("out/\u00e9t\u00e9")),
        "time": "2026-01-01T00:00:00+00:00",
        "plan": {"actors": 3, "share": None},
        "7": "seven",
    }
    assert "\u00e9t\u00e9" in (tmp_path / "value.json").read_text(encoding="utf-8")


def test_a_path_that_is_no_utf8(tmp_path):
    write_json(tmp_path / "value.json", {"path": "\udce9t\udce9"})
    assert read(tmp_path / "value.json") == {"path": "\udce9t\udce9"}


def test_what_is_not_json_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "value.json", 1)
    with pytest.raises(TypeError, match="set"):
        write_json(tmp_path / "value.json", {1, 2})
    assert read(tmp_path / "value.json") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]


def test_a_missing_folder_is_explained(tmp_path):
    with pytest.raises(RunError, match=r"Cannot write .*value\.json: No such file"):
        write_json(tmp_path / "gone" / "value.json", 1)


def test_manifest(tmp_path):
    started = datetime(2026, 1, 1, 12, tzinfo=UTC)
    built = build_manifest(command=["raysim", "run", "x.yaml"], started=started, seed=3, plan=Plan(2, 0.5))
    write_json(tmp_path / "manifest.json", built)
    found = read(tmp_path / "manifest.json")
    assert found["started"] == "2026-01-01T12:00:00+00:00"
    assert found["command"] == ["raysim", "run", "x.yaml"]
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"].keys() >= {
        "python",
        "raysim",
        "ray",
        "torch",
        "torchvision",
        "timm",
        "medmnist",
        "pyarrow",
    }
    assert found["hardware"]["logical_cores"] >= 1
    assert found["hardware"]["memory_gb"] > 0
    assert found["hostname"]
    assert list(found)[-2:] == ["seed", "plan"]
    assert found["plan"] == {"actors": 2, "share": 0.5}


def test_outside_of_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert build_manifest()["git"] == {"commit": None, "modified": None}


def test_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert build_manifest()["git"] == {"commit": None, "modified": None}


def test_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert build_manifest()["hardware"]["cuda_devices"] == ["GPU 0", "GPU 1"]


def test_packages_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(manifest, "_PACKAGES", ("numpy", "no-such-package"))
    assert build_manifest()["versions"]["no-such-package"] is None
