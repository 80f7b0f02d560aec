from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from raysim.recording.records import ClientRecord, RoundRecord

START = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


@pytest.fixture
def make_round() -> Callable[..., RoundRecord]:
    """A round that took 1.8 s; keyword arguments replace or add fields."""

    def make(round_num: int = 1, **fields: Any) -> RoundRecord:
        started = START + timedelta(seconds=10 * round_num)
        times = {"started": started, "finished": started + timedelta(seconds=1.8), "round_s": 1.8}
        states = ("params", "buffers", "server", "clients")
        checksums = {f"{state}_checksum": "0123456789abcdef" for state in states}
        return RoundRecord(round_num=round_num, **{**times, **checksums, **fields})

    return make


@pytest.fixture
def make_client() -> Callable[..., ClientRecord]:
    """A client whose update was used; keyword arguments replace or add fields."""

    def make(client_id: int = 0, round_num: int = 1, **fields: Any) -> ClientRecord:
        return ClientRecord(
            **{"round_num": round_num, "client_id": client_id, "position": client_id, "status": "ok", **fields}
        )

    return make
