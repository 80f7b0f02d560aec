from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from runs import TINY, run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of three rounds; copied by those who change it."""
    return run(tmp_path_factory.mktemp("runs"), "tiny", *TINY, rounds=3, backend="serial").folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "läuft noch"
    shutil.copytree(finished, copy)
    return copy
