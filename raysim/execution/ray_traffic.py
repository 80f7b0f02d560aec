"""Counting the bytes of vectors that the driver sends to other nodes and gets from them."""

from __future__ import annotations

from typing import Any

import ray
from ray.experimental import get_object_locations

from raysim.execution.ray_pool import Done
from raysim.state import num_bytes


class Traffic:
    """Puts and fetches of the driver, counted as they cross the network.

    What the driver puts goes once to every other node at most; what it fetches is counted if no copy lies on its own node.
    Updates that stay where they were made, or go from node to node, do not count.
    """

    def __init__(self) -> None:
        self._here = ray.get_runtime_context().get_node_id()
        self._others = 0
        self._bytes = 0

    def put(self, value: Any) -> Any:
        """`ray.put`."""
        self._others = sum(node["Alive"] and node["NodeID"] != self._here for node in ray.nodes())
        self._bytes += num_bytes(value) * self._others
        return ray.put(value)

    def fetched(self, ref: Any) -> None:
        """The driver is about to get the object."""
        if self._others:
            found = get_object_locations([ref])[ref]
            if self._here not in found["node_ids"]:
                self._bytes += found["object_size"] or 0

    def returned(self, done: Done) -> None:
        """The driver got what a unit made."""
        if done.place is not None and done.place.node != self._here:
            self._bytes += num_bytes(done.value)

    def take(self) -> int:
        """Bytes since the last call."""
        taken, self._bytes = self._bytes, 0
        return taken
