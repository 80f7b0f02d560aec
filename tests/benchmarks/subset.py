"""What scoring on part of the validation set saves and costs: on the same models, beside exact scores.

    python tests/benchmarks/subset.py --root /usr/share/datasets/fashion-mnist [--rounds 30] [--images 512] [--scope last_block]

FedVG on Fashion-MNIST with LeNet-5, 20 clients (Dirichlet 0.1), 10 per round, one local epoch, 6,000 validation images. The
rounds go on with exact weights; every client model is scored on subsets as well (and, with `--scope`, on all images with the
gradients of the last layers only). All in one process with one thread. Printed per round and as medians over rounds: seconds
per score, Kendall's tau and total variation of the weights against the exact ones, and the total variation that the two halves
of the subset predict. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from raysim.config import load_config
from raysim.execution.base import Broadcast
from raysim.execution.serial import SerialExecutor
from raysim.execution.work import build_objective, probe_client
from raysim.preparation import Prepared, prepare
from raysim.recorder import RoundResult
from raysim.recording.progress import Silent
from raysim.simulation import run_round
from raysim.state import Arrays, RoundState
from raysim.subset import SubsetSettings, total_variation
from raysim.verdict import weigh


@dataclass(frozen=True)
class Row:
    """One round of one way to score.

    Attributes:
        exact_s: Seconds per exact score, median over clients.
        cheap_s: Seconds per cheaper score.
        speed_up: Their quotient.
        kendall: Tau of the weights against the exact ones.
        predicted_tv: The estimate; None if all images are scored.
        real_tv: Total variation between the weights.
    """

    exact_s: float
    cheap_s: float
    speed_up: float
    kendall: float
    predicted_tv: float | None
    real_tv: float


class Keeping(SerialExecutor):
    """Keeps what the clients of the last cohort sent."""

    def run_cohort(self, *args):
        outcomes, *others = super().run_cohort(*args)
        self.updates = {outcome.client_id: outcome.update for outcome in outcomes}
        return outcomes, *others


def rescored(cheap: Prepared, state: RoundState, exact: RoundResult, updates: dict[int, Arrays]) -> Row:
    """The models of a round, scored again in another way."""
    broadcast = Broadcast.of(state.round_num + 1, state.server, state.buffers)
    objective = build_objective(cheap.setup)
    usable = [outcome for outcome in exact.outcomes if outcome.status == "ok"]
    outcomes = []
    for outcome in usable:
        probe, seconds, _ = probe_client(
            cheap.setup, objective, broadcast, updates[outcome.client_id], None, client_id=outcome.client_id
        )
        outcomes.append(replace(outcome, probe=probe, score_seconds=seconds))
    verdict = weigh(cheap, outcomes, None, 0)
    assert exact.weights is not None
    assert verdict.weights is not None
    before, after = (statistics.median(o.score_seconds or 0.0 for o in found) for found in (usable, outcomes))
    pair = exact.weights.client, verdict.weights.client
    return Row(before, after, before / after, float(kendalltau(*pair).statistic), verdict.error, total_variation(*pair))


def medians(rows: list[Row]) -> Row:
    """Median of each number over rounds."""
    plain = [asdict(row) for row in rows]
    return Row(
        **{
            name: None if value is None else statistics.median(row[name] for row in plain)
            for name, value in plain[0].items()
        }
    )


def line(title: str, way: str, row: Row) -> list[str]:
    cells = [f"{1e3 * row.exact_s:.0f}", f"{1e3 * row.cheap_s:.0f}", f"{row.speed_up:.1f}", f"{row.kendall:.3f}"]
    return [title, way, *cells, "-" if row.predicted_tv is None else f"{row.predicted_tv:.4f}", f"{row.real_tv:.4f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="/usr/share/datasets/fashion-mnist", help="folder of Fashion-MNIST's files")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--images", type=int, nargs="*", default=[512])
    parser.add_argument("--scope", nargs="*", default=[], choices=["last_block", "last_module"])
    parser.add_argument("overrides", nargs="*", help="key.path=value, after --")
    args = parser.parse_args()
    config = load_config(
        "configs/fashion_mnist.yaml",
        [
            f"data.root={args.root}",
            f"rounds={args.rounds}",
            "partition.clients=20",
            "client.local_epochs=1",
            "execution.backend=serial",
            *args.overrides,
        ],
    )
    exact = prepare(config)
    setup, executor = exact.setup, Keeping(exact.setup)
    setups = {
        **{
            f"{m} images": replace(setup, scoring=replace(setup.scoring, subset=SubsetSettings(m))) for m in args.images
        },
        **{scope: replace(setup, weighting=replace(setup.weighting, scope=scope)) for scope in args.scope},
    }
    console = Console()
    console.width = max(console.width, 120)
    table = Table("round", "scored", "exact, ms", "cheaper, ms", "speed-up", "Kendall", "predicted TV", "real TV")
    rows: dict[str, list[Row]] = {way: [] for way in setups}
    state = exact.initial
    for _ in range(args.rounds):
        result = run_round(exact, state, executor, Silent())
        for way, other in setups.items():
            rows[way].append(rescored(replace(exact, setup=other), state, result, executor.updates))
            cells = line(str(result.state.round_num), way, rows[way][-1])
            table.add_row(*cells)
            console.print("  ".join(cells))
        state = result.state
    table.add_section()
    for way, found in rows.items():
        table.add_row(*line("median", way, medians(found)))
    console.print(table)
    summary = {way: asdict(medians(found)) for way, found in rows.items()}
    print(json.dumps({"rounds": args.rounds, "validation": len(setup.validation), "median": summary}))


if __name__ == "__main__":
    main()
