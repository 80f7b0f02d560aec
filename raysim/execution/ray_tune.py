"""Ray Tune around whole runs: each trial is a run whose actors live in the trial's placement group.

A trial's group has one bundle for the run's driver (which is Tune's trial actor), then one per scorer and one per client actor,
so that trials never take each other's processors, and a trial that does not fit waits instead of a run that has half started.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.util import get_current_placement_group

from raysim.errors import ConfigError, RunError
from raysim.execution.ray_connection import cluster_nodes, inside_group
from raysim.recording.records import RoundRecord

METRIC = "validation_accuracy"
"""What trials are compared by: of the global model, on the validation set."""
STOP_S = 120.0
"""Longest wait for a run that was told to stop: a round may take a while to notice."""

Report = Callable[[RoundRecord], None]
RunTrial = Callable[[Mapping[str, Any], str, Report], None]
"""Runs a trial, from its settings and its id, reporting every round that is committed."""


class Stopped(BaseException):
    """The search has no more use for the run."""


class Trial(tune.Trainable):  # type: ignore[misc]
    """One run, which goes on by one evaluated round whenever Tune asks for a step."""

    def setup(self, config: Mapping[str, Any], run_trial: RunTrial, rounds: int) -> None:
        """Begin the run, in a thread of its own: Tune's is needed to stop it."""
        self._rounds = rounds
        self._reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self._go_on, self._stop = threading.Semaphore(0), threading.Event()
        self._error: BaseException | None = None
        group, trial_id = get_current_placement_group(), self.trial_id

        def run() -> None:
            try:
                with inside_group(group):
                    self._wait()
                    run_trial(config, trial_id, self._report)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="run", daemon=True)
        self._thread.start()

    def step(self) -> dict[str, Any]:
        """The next round; of the last one after everything is written.

        Raises:
            RunError: The run failed.
        """
        self._go_on.release()
        while True:
            try:
                report = self._reports.get(timeout=1.0)
                break
            except queue.Empty:
                if not self._thread.is_alive():
                    raise RunError(str(self._error) or "the run ended early") from self._error
        if report["round"] < self._rounds:
            return report
        self._go_on.release()
        self._thread.join()
        if self._error is not None:
            raise RunError(str(self._error)) from self._error
        return {**report, "done": True}

    def cleanup(self) -> None:
        """Let the run end, if it has not: it writes its result and ends its actors."""
        self._stop.set()
        self._go_on.release()
        self._thread.join(STOP_S)

    def _report(self, record: RoundRecord) -> None:
        if record.validation_accuracy is not None:
            names = ("validation_accuracy", "validation_loss", "accuracy", "loss", "round_s")
            self._reports.put({"round": record.round_num, **{name: getattr(record, name) for name in names}})
            self._wait()

    def _wait(self) -> None:
        self._go_on.acquire()
        if self._stop.is_set():
            raise Stopped("stopped by the search: other settings promise more")


def search(
    run_trial: RunTrial,
    space: Mapping[str, Any],
    bundles: Sequence[Mapping[str, float]],
    *,
    name: str,
    storage: Path,
    rounds: int,
    grace: int,
    reduction: int,
    num_samples: int,
    max_concurrent: int | None,
    seed: int,
) -> list[str | None]:
    """Run trials under ASHA (Li et al., MLSys 2020).

    Args:
        run_trial: Runs one.
        space: Key -> what Tune draws its value from.
        bundles: Of a trial's placement group, that of its driver first.
        name: Of the search; folder of Tune's own files in `storage`.
        storage: Where Tune's files go; shared by all nodes.
        rounds: Of a trial that is not stopped.
        grace: Rounds before the first trial may be stopped.
        reduction: One of so many goes on at each rung.
        num_samples: Trials.
        max_concurrent: At a time; None: as many as fit.
        seed: Of the values that are drawn.

    Returns:
        Of each trial, why it failed, or None.

    Raises:
        ConfigError: A trial's bundles do not fit on the cluster, so it would wait for ever.
    """
    check_fit(bundles)
    trainable = tune.with_parameters(Trial, run_trial=run_trial, rounds=rounds)
    tuner = tune.Tuner(
        tune.with_resources(
            trainable, tune.PlacementGroupFactory([dict(bundle) for bundle in bundles], strategy="PACK")
        ),
        param_space=dict(space),
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            num_samples=num_samples,
            scheduler=ASHAScheduler(
                time_attr="round", max_t=rounds, grace_period=min(grace, rounds), reduction_factor=reduction
            ),
            search_alg=BasicVariantGenerator(max_concurrent=max_concurrent or 0, random_state=seed),
            reuse_actors=False,
            trial_name_creator=lambda trial: str(trial.trial_id),
            trial_dirname_creator=lambda trial: str(trial.trial_id),
        ),
        run_config=tune.RunConfig(name=name, storage_path=str(storage), verbose=0),
    )
    return [None if result.error is None else str(result.error) for result in tuner.fit()]


def domains_of(space: Mapping[str, Any]) -> dict[str, Any]:
    """Tune's own domains; a list is drawn from."""
    return {key: tune.choice(list(given)) if isinstance(given, list | tuple) else given for key, given in space.items()}


def example_of(domain: Any) -> Any:
    """One of the values that Tune may draw."""
    if isinstance(domain, Mapping) and "grid_search" in domain:
        return domain["grid_search"][0]
    return domain.sample() if hasattr(domain, "sample") else domain


def check_fit(bundles: Sequence[Mapping[str, float]]) -> None:
    """Refuse bundles that no placement on the cluster's nodes, were they empty, has room for."""
    nodes = [{"CPU": node.cpus, "GPU": node.gpus} for node in cluster_nodes()]
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda bundle: sorted(bundle.items()), reverse=True):
        node = max(
            (node for node in free if all(node.get(key, 0.0) >= amount - 1e-9 for key, amount in bundle.items())),
            key=lambda node: node["CPU"],
            default=None,
        )
        if node is None:
            raise ConfigError(
                f"execution: a trial needs {len(bundles)} bundles ({'; '.join(map(_show, bundles))}), the nodes have "
                f"{'; '.join(map(_show, nodes))}; lower execution.client_actors, execution.scorer_actors or what they reserve"
            )
        for key, amount in bundle.items():
            node[key] -= amount


def _show(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {key}" for key, amount in resources.items() if amount)
