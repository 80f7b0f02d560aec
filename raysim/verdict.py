"""How much each client of a cohort counts: the weighting's verdict, and whether enough clients are left to ask for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from raysim.errors import RunError
from raysim.execution.base import Broadcast, Executor, Outcome
from raysim.preparation import Prepared
from raysim.subset import total_variation, weight_error
from raysim.weighting.base import KeptProbe, ScoringSettings, Tally, Weights


@dataclass(frozen=True)
class Verdict:
    """The weights of a cohort, None without any client.

    Attributes:
        weights: Of the outcomes that are ok.
        level: How far the subset that was scored has grown.
        error: Estimate of what the subset makes the weights err, in total variation; None if nothing was left out.
        movement: What the last images moved them by; None likewise.
        scored_images: Images that models were scored on; None: no model was.
    """

    weights: Weights | None
    level: int = 0
    error: float | None = None
    movement: float | None = None
    scored_images: int | None = None


def verdict_on(
    prepared: Prepared,
    executor: Executor,
    broadcast: Broadcast,
    outcomes: Sequence[Outcome],
    reference: Tally | None,
) -> Verdict:
    """The weighting's verdict on those that are ok; where the weights have to settle, after as many images as that takes."""
    subset, size = prepared.setup.scoring.subset, len(prepared.setup.validation)
    verdict = weigh(prepared, outcomes, reference, 0)
    if subset is None or subset.settle is None:
        return verdict
    for level in range(1, len(subset.totals(size))):
        if verdict.movement is None or verdict.movement < subset.settle:
            break
        usable = [outcome for outcome in outcomes if outcome.status == "ok"]
        reference = executor.score_more(broadcast, usable, level, reference)
        check_enough(prepared, broadcast.round_num, outcomes)
        verdict = weigh(prepared, outcomes, reference, level)
    for outcome in outcomes:
        outcome.sums = None  # Of the size of a model each.
    return verdict


def weigh(prepared: Prepared, outcomes: Sequence[Outcome], reference: Tally | None, level: int) -> Verdict:
    """Weights from what is known at a level of the subset, if any, and how far they differ between its parts."""
    setup, layout, size = prepared.setup, prepared.population.layout, len(prepared.setup.validation)
    subset, weighting = setup.scoring.subset, setup.weighting
    usable = [outcome for outcome in outcomes if outcome.status == "ok"]
    if not usable:
        return Verdict(None, level)
    reports = [outcome.report(prepared.class_counts[outcome.client_id]) for outcome in usable]
    weights = weighting.weights(reports, reference.total if reference else None, layout)
    if not weighting.needs_images:
        return Verdict(weights, level)
    fresh = weighting.reference_needs != "nothing" or any(outcome.score_age == 0 for outcome in usable)
    if subset is None:
        return Verdict(weights, level, scored_images=size if fresh else None)
    sums = (reference.parts if reference else None) or (None, None)
    first, second = (
        weighting.weights([report.of_half(i) for report in reports], sums[i], layout).parameters for i in (0, 1)
    )
    parts = subset.parts(size, level)
    # With as many images again, the weights moved; before that, the halves say how far they would.
    movement = total_variation(first, weights.parameters) if level else 0.5 * total_variation(first, second)
    error = weight_error(first, second, parts, size)
    return Verdict(weights, level, error, movement, sum(parts) if fresh else None)


def fresh_probes(scoring: ScoringSettings, round_num: int, usable: Sequence[Outcome]) -> dict[int, KeptProbe]:
    """The probes of a round that later rounds may keep."""
    if scoring.rescore_every == 1:
        return {}
    return {o.client_id: KeptProbe(round_num, o.probe) for o in usable if o.probe is not None and o.score_age == 0}


def check_enough(prepared: Prepared, round_num: int, outcomes: Sequence[Outcome]) -> None:
    """Refuse to go on with too few usable updates.

    Raises:
        RunError: Clients failed and fewer than `execution.min_clients` are usable, or one is not finite under
            `execution.on_nonfinite: abort`.
    """
    settings = prepared.config.execution
    lost = [o for o in outcomes if o.status == "excluded"]
    if lost and settings.on_nonfinite == "abort":
        raise RunError(
            f"round {round_num}: client {lost[0].client_id}: {lost[0].reason} (execution.on_nonfinite: abort)"
        )
    failed = [o for o in outcomes if o.status == "failed"]
    usable = sum(o.status == "ok" for o in outcomes)
    if failed and usable < settings.min_clients:
        reasons = Counter(o.reason for o in failed).most_common()
        raise RunError(
            f"round {round_num}: {usable} usable updates, execution.min_clients is {settings.min_clients}; failed: "
            + "; ".join(f"{count} x {reason}" for reason, count in reasons)
        )
