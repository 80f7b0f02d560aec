"""Randomness as a pure function of (seed, purpose, round, client).

No code of raysim keeps a generator from one unit of work to the next, and no code seeds a global one: a unit that is run
again, on another machine, after others or before them, draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What a stream of random numbers is for. The values are part of the numerics: never reuse or renumber one."""

    SPLIT = 1
    """Taking the validation set out of the training data."""
    PARTITION = 2
    """Dealing the training data out to clients."""
    INIT = 3
    """Initial parameters of the global model."""
    COHORT = 4
    """Which clients take part in a round."""
    LOCAL = 5
    """A client's local work: order of the examples, dropout."""
    SCORING = 6
    """The fixed batches of the validation set."""
    SUBSET = 7
    """Which part of the training data a run uses."""
    FUSION = 8
    """The server's own training: order of the validation examples."""


def rng_for(seed: int, purpose: Purpose, *, round_num: int = 0, client_id: int = 0) -> np.random.Generator:
    """The generator of one purpose, round and client; equal arguments give equal draws."""
    return np.random.default_rng(np.random.SeedSequence([seed, int(purpose), round_num, client_id]))


@contextmanager
def torch_seeded_from(rng: np.random.Generator, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generators from `rng` for the duration of the block, then put their state back.

    Module initialisers and dropout know no other source of randomness; this is the only place that touches it.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    seed = int(rng.integers(2**63))
    with torch.random.fork_rng(devices=devices):
        # Not torch.manual_seed: without a GPU it keeps every call with its stack, in case one is initialised later.
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield
