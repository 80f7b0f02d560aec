from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from raysim.data.arrays import ImageSet

# Two threads that wait for each other on a busy machine make a small convolution take a hundred times as long.
torch.set_num_threads(1)

# A shell starts its background jobs with SIGINT ignored; what tests start then would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine an example may take long; a test has its own time limit.
settings.register_profile("raysim", deadline=None)
settings.load_profile("raysim")

# Local Rays of the tests talk to themselves only; without this each would write a token into the home folder.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.pop("RAY_ADDRESS", None)

# What Ray, torch and raysim.execution set themselves when they start.
OWN_VARIABLES = (
    "THP_",
    "RAY_",
    "CUDA_",
    "OMP_",
    "KMP_",
    "PYTEST_",
    "TORCH",
    "PYTHON",
    "TF_",
    "SETUPTOOLS_",
    "GRPC_",
    "CRC32C_",
    "COLUMNS",
    "LINES",
)


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """A test leaves the environment as it was."""
    before = dict(os.environ)
    yield
    changed = {
        key
        for key in before.keys() | os.environ.keys()
        if before.get(key) != os.environ.get(key) and not key.startswith(OWN_VARIABLES)
    }
    assert not changed, f"environment variables changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def handler_of_sigterm() -> Iterator[None]:
    """Commands set one for their process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One local Ray of two CPUs and two GPUs that exist in its books only, for all tests that need one."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@pytest.fixture
def images() -> ImageSet:
    """40 random grey images of 10 classes, each class four times."""
    rng = np.random.default_rng(0)
    return ImageSet(rng.integers(0, 256, (40, 1, 28, 28), dtype=np.uint8), np.repeat(np.arange(10), 4))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference-table",
        action="store_true",
        help="print each reference number, the test that meets it and how well",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--reference-table"):
        from quadratic import EXAMPLES, MET

        terminalreporter.section("reference numbers")
        for key in EXAMPLES:
            test, difference = MET.get(key, ("-", float("nan")))
            terminalreporter.write_line(f"{key:70s} {difference:8.1e}  {test}")
