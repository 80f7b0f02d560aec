"""`raysim report`: from folders to a folder with the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.errors import ConfigError
from raysim.recording.files import write_atomic
from raysim.recording.manifest import write_json
from raysim.report import MEASURES
from raysim.report.collect import Run, collect
from raysim.report.content import blocks_of
from raysim.report.document import mean_sd
from raysim.report.figures import MAX_MAPS, Drawing, draw_curves, draw_ranks, draw_weights
from raysim.report.numbers import Numbers, document_of, numbers_of
from raysim.report.pages import latex, markdown, web_page
from raysim.report.study import Study, study_of

if TYPE_CHECKING:
    from rich.table import Table

_MAP_CONDITIONS = 3


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        folder: Where.
        numbers: All numbers.
    """

    folder: Path
    numbers: Numbers


def write_report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    method_keys: Sequence[str] = (),
    measure: str = "last",
    targets: Sequence[float] = (),
) -> Report:
    """Read runs and write `report.md`, `.html`, `.tex`, `.json` and `figures/`.

    Args:
        folders: Run folders, or folders with run folders in them.
        out: The folder to write; None: `report` in the first of the folders.
        method_keys: What is compared, dotted keys or sections; none: algorithm, weighting and fusion.
        measure: What it is compared by, a key of `MEASURES`.
        targets: Accuracies to reach; none: chosen from the data.

    Raises:
        ConfigError: Nothing can be reported, or an argument does not fit the runs.
        RunError: A file cannot be written.
    """
    problems = []
    if measure not in MEASURES:
        problems.append(f"--measure: should be {' or '.join(MEASURES)}, got {measure!r}")
    problems += [
        f"--target: should be a share above 0 and up to 1, such as 0.9, got {t:g}" for t in targets if not 0 < t <= 1
    ]
    if problems:
        raise ConfigError(problems)
    runs, left_out = collect(folders)
    study = study_of(runs, method_keys)
    out = folders[0] / "report" if out is None else out
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot create {out / 'figures'}: {error.strerror}") from None

    numbers = numbers_of(study, left_out, measure, targets)
    drawings = _draw(numbers)
    for name, (drawing, _) in drawings.items():
        drawing.write(out / "figures", name)
    title = f"Report on {', '.join(folder.resolve().name for folder in folders)}"
    captions = {name: caption for name, (_, caption) in drawings.items()}
    blocks = blocks_of(numbers, captions)
    pictures = {name: drawing.svg for name, (drawing, _) in drawings.items()}
    write_json(out / "report.json", document_of(numbers, captions))
    for name, text in (
        ("report.md", markdown(title, blocks)),
        ("report.tex", latex(title, blocks)),
        ("report.html", web_page(title, blocks, pictures)),
    ):
        with write_atomic(out / name) as handle:
            handle.write(text.encode(errors="backslashreplace"))
    return Report(out, numbers)


def summary(numbers: Numbers) -> Table:
    """The results as a short table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="test accuracy in %, mean ± sd over seeds")
    conditions = any(numbers.study.conditions)
    for heading in (*(["condition"] if conditions else []), "method", "n", "last", "last five", "best (optimistic)"):
        shown.add_column(heading, justify="left" if heading in ("condition", "method") else "right")
    for row in numbers.results[:40]:
        cells = [str(row["n"]), *(mean_sd(row[name]) for name in ("last", "last_five", "best"))]
        # As text: rich would read a name in brackets as a style.
        names = [row["condition"], row["method"]] if conditions else [row["method"]]
        shown.add_row(*(Text(name) for name in names), *cells)
    if len(numbers.results) > 40:
        shown.caption = f"the first 40 of {len(numbers.results)} settings"
    return shown


def _draw(numbers: Numbers) -> dict[str, tuple[Drawing, str]]:
    """The figures and their captions, by name."""
    study = numbers.study
    means = {
        method: [row["last"]["mean"] for row in numbers.results if row["method"] == method] for method in study.methods
    }
    many = len(study.methods) > len(study.conditions) and len(study.methods) > 8
    order = sorted(study.methods, key=lambda m: -sum(means[m]) / len(means[m])) if many else list(study.methods)
    curves, extra = draw_curves(study, order)
    drawings = {
        "learning-curves": (
            curves,
            "Test accuracy of the global model by round. Line: mean over the seeds of a setting; band: one standard deviation "
            f"(n - 1) to either side, none for a single seed. Only rounds that all seeds tested.{extra}",
        )
    }
    if numbers.ranks is not None and len(study.methods) <= 40:
        drawings["mean-ranks"] = (
            draw_ranks(numbers.ranks, study.methods),
            f"Mean rank of each method over {numbers.ranks.blocks} blocks (condition and seed), 1 = best. Methods that share "
            "an orange bar differ by less than Nemenyi's critical difference at level 0.05 (Demsar 2006).",
        )
    for condition in study.conditions:
        maps = sum(name.startswith("weights") for name in drawings)
        shown = _maps(study, condition)
        if not shown or maps >= _MAP_CONDITIONS:
            continue
        left = sum(bool(study.of(condition, method)) for method in study.methods) - len(shown)
        more = f" {left} further method{'s are' if left > 1 else ' is'} not drawn." if left else ""
        beyond = len(study.conditions) - maps - 1 if maps + 1 == _MAP_CONDITIONS else 0
        more += f" {beyond} further condition{'s are' if beyond > 1 else ' is'} not drawn." if beyond else ""
        drawings[f"weights-{maps + 1}"] = (
            draw_weights(shown),
            f"Weight of each client in each round{f', {condition}' if condition else ''}, seed {shown[0][1].seed}. Relative "
            "to equal weights: white counts as much as the others of its cohort, orange more, purple less; grey was not "
            f"sampled or not used. Clients from skewed labels (top) to even ones.{more}",
        )
    return drawings


def _maps(study: Study, condition: str) -> list[tuple[str, Run]]:
    """Runs of the seed that most methods have, with the same partition; at most four."""
    by_seed: dict[int, list[tuple[str, Run]]] = {}
    for method in study.methods:
        for run in study.of(condition, method):
            if run.entropy is not None and len(run.clients.client_id):
                by_seed.setdefault(run.seed, []).append((method, run))
    if not by_seed:
        return []
    runs = max(by_seed.values(), key=len)
    return [(method, run) for method, run in runs if run.partition_hash == runs[0][1].partition_hash][:MAX_MAPS]
