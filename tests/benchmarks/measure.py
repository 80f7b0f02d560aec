"""What benchmarks look at from outside: memory of processes, Ray's object stores, one line of JSON at the end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray._private.internal_api import node_stats

from raysim.config import RunConfig
from raysim.preparation import prepare
from raysim.recorder import Recorder, RoundResult
from raysim.recording.progress import Silent
from raysim.simulation import make_executor, rounds

MB = 2**20


@dataclass(frozen=True)
class StoreUse:
    """Bytes of an object store.

    Attributes:
        used: In shared memory.
        spilled: Written to disk so far.
        objects: Number of objects in shared memory.
    """

    used: int
    spilled: int
    objects: int


def store_use() -> StoreUse:
    """The object stores of all nodes that are alive, as their raylets count them."""
    used = spilled = objects = 0
    for node in ray.nodes():
        if node["Alive"]:
            stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
            store = stats.store_stats
            used += store.object_store_bytes_used
            spilled += store.spilled_bytes_total
            objects += store.num_local_objects
    return StoreUse(used, spilled, objects)


@dataclass(frozen=True)
class ProcessUse:
    """A process at one moment.

    Attributes:
        rss: Bytes in memory; what it sees of the object store is part of it.
        private: The same without shared memory.
        fds: Open file descriptors.
    """

    rss: int
    private: int
    fds: int


def process_use(pid: int | None = None) -> ProcessUse:
    """Of this process, or of another one. Reads /proc, so it runs on Linux only."""
    place, page = Path(f"/proc/{pid or os.getpid()}"), os.sysconf("SC_PAGE_SIZE")
    _, resident, shared, *_ = (page * int(pages) for pages in (place / "statm").read_text().split())
    return ProcessUse(resident, resident - shared, len(os.listdir(place / "fd")))


def ray_servers() -> dict[str, int]:
    """Process ids of the raylet and of the GCS of a Ray that this process has started."""
    found: dict[str, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            name = Path((place / "cmdline").read_text().split("\0")[0]).name
        except OSError:  # It has ended.
            continue
        if parent == os.getpid() and name in ("raylet", "gcs_server"):
            found[name] = int(place.name)
    return found


class Peaks(threading.Thread):
    """Looks at this process and at the object store several times a second, and keeps the largest numbers.

    Attributes:
        rss: Bytes of this process, with what it has mapped of the object store.
        private: Bytes of this process without anything shared.
        store: Bytes used in the object stores.
        total: The largest sum of `private` and `store` at one moment: every byte counts once.
    """

    def __init__(self, every_s: float = 0.25) -> None:
        super().__init__(daemon=True)
        self.rss = self.private = self.store = self.total = 0
        self._every_s, self._ended = every_s, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            own, store = process_use(), store_use().used
            self.rss, self.private = max(self.rss, own.rss), max(self.private, own.private)
            self.store, self.total = max(self.store, store), max(self.total, own.private + store)

    def close(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()


class WatchingRecorder(Recorder):
    """A recorder that remembers which client states and actors there are, and how long the last checkpoint took."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.digests: Mapping[int, str] = {}
        self.actors: dict[int, str] = {}
        self.checkpoint_seconds = 0.0

    def commit(self, result: RoundResult, *rest: Any) -> Any:
        self.digests = dict(result.state.client_checksums)
        places = [place for outcome in result.outcomes for place in (outcome.actor, outcome.scorer) if place]
        self.actors |= {place.pid: place.actor for place in places}
        return super().commit(result, *rest)

    def _checkpoint(self, *args: Any) -> None:
        clock = time.perf_counter()
        super()._checkpoint(*args)
        self.checkpoint_seconds = time.perf_counter() - clock


@contextmanager
def running(config: RunConfig) -> Iterator[tuple[Any, WatchingRecorder, dict[str, Any]]]:
    """A run, round by round: its rounds up to the commit, its recorder and its plan."""
    prepared = prepare(config)
    config.folder.mkdir(parents=True)
    with ExitStack() as stack:
        executor = stack.enter_context(closing(make_executor(prepared, Silent())))
        recorder = stack.enter_context(closing(WatchingRecorder(prepared, executor, datetime.now(UTC), None)))
        yield rounds(prepared, prepared.initial, executor, recorder, Silent()), recorder, executor.describe()


def finish(result: Mapping[str, Any]) -> None:
    """The last line: one JSON object."""
    print(json.dumps(result), flush=True)
