"""Ray's job server, seen through four calls: list, submit, log, stop. None of them waits for long."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from raysim.errors import ConfigError, RunError
from raysim.execution.jobs import Driver, Job, Unreachable

LIMITS_S = (5.0, 60.0)
"""Longest times to connect to the job server, and between two bytes of its answer."""


class _Client(JobSubmissionClient):  # type: ignore[misc]
    """Ray's client, which itself would wait for ever for a server that does not answer."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, **{"timeout": LIMITS_S, **options})


class Jobs:
    """The job server of a cluster.

    Args:
        address: Like `http://head:8265`.

    Raises:
        ConfigError: It cannot be reached, or refuses us.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"--submit: {address} is no address of a dashboard, like http://head:8265")
        try:
            with _plain_environment():
                self._client = _Client(address)
        except AuthenticationError as error:
            raise ConfigError(f"--submit: {address} demands a token (RAY_AUTH_MODE=token): {_line(error)}") from None
        except (OSError, RuntimeError, ValueError) as error:  # Those of requests are OSErrors.
            raise ConfigError(f"--submit: no Ray dashboard answers at {address}: {_line(error)}") from None

    def list(self) -> list[Job]:
        """All submitted jobs that the cluster remembers."""
        with self._explained():
            return [
                Job(job.submission_id, str(job.status), job.entrypoint, job.message or "", job.driver_exit_code)
                for job in self._client.list_jobs()
                if job.submission_id
            ]

    def submit(self, job: str, entrypoint: str, runtime_env: Mapping[str, Any], driver: Driver) -> None:
        """Submit a job under an id that was never used."""
        with self._explained():
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=job,
                runtime_env=dict(runtime_env),
                entrypoint_num_cpus=driver.cpus,
                entrypoint_memory=driver.memory,
                entrypoint_resources=dict(driver.resources) if driver.resources else None,
            )

    def log(self, job: str) -> str:
        """What the job has printed."""
        with self._explained():
            text: str = self._client.get_job_logs(job)
            return text

    def stop(self, job: str) -> None:
        """Tell a job to end; it gets SIGTERM, and 3 seconds later SIGKILL."""
        with self._explained():
            self._client.stop_job(job)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except requests.exceptions.RequestException as error:
            raise Unreachable(f"the head at {self.address} does not answer: {_line(error)}") from None
        except AuthenticationError as error:
            raise RunError(f"{self.address}: {_line(error)}") from None
        except (RuntimeError, ValueError) as error:
            raise RunError(f"{self.address}: {_line(error)}") from None


@contextmanager
def _plain_environment() -> Iterator[None]:
    """Ray lets these variables win over the address it is given."""
    taken = {key: os.environ.pop(key) for key in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS") if key in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."
