from __future__ import annotations

import socket
import time

import pytest
import ray

from raysim.errors import ConfigError
from raysim.execution import ray_connection
from raysim.execution.ray_connection import connect
from raysim.execution.settings import ExecutionSettings


def test_an_address_where_nobody_answers_is_named_at_once(monkeypatch):
    """Ray alone takes minutes; here it is not even asked."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was asked"))
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        port = closed_soon.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"execution\.address: cannot reach Ray at 127\.0\.0\.1:{port}: .*refused"):
        connect(ExecutionSettings(address=f"127.0.0.1:{port}"))
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="RAY_ADDRESS: cannot reach Ray"):
        connect(ExecutionSettings())
    assert time.monotonic() - began < ray_connection.REACH_S


@pytest.mark.parametrize("address", ["auto", "ray://nowhere.invalid:10001", "local"])
def test_what_is_no_host_and_port_is_left_to_ray(monkeypatch, address):
    asked = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options["address"]))
    connect(ExecutionSettings(address=address))
    assert asked == [address]
