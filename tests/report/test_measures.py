from __future__ import annotations

import numpy as np
import pytest

from raysim.report import comparison, measures
from raysim.report.collect import Curve, Participation, collect
from raysim.report.study import study_of


def study(folder):
    return study_of(collect([folder])[0])


def test_accuracies_of_a_run_by_hand(tmp_path, make_run):
    """Tested every second round and in the last; the last five of six tests are 0.2, 0.6, 0.4, 0.5, 0.3."""
    make_run(tmp_path / "run", (0.1, None, 0.2, None, 0.6, None, 0.4, None, 0.5, 0.3))
    row = measures.run_rows(study(tmp_path))[0]
    assert (row["last"], row["last_round"], row["tested"]) == (0.3, 10, 6)
    assert row["last_five"] == pytest.approx(0.4)
    assert (row["best"], row["best_round"]) == (0.6, 5)
    assert row["at_best_validation"] is None


def test_accuracy_at_the_best_validation_round(tmp_path, make_run):
    """Round 4 validates best and was not tested; of the tested ones it is round 2, whose test accuracy is not the best."""
    make_run(tmp_path / "run", (0.1, 0.2, 0.6, 0.4))
    run = next(iter(study(tmp_path).runs.values()))
    curve = Curve(
        run.curve.round_num, np.array([0.1, 0.2, 0.6, np.nan]), np.array([0.3, 0.7, 0.5, 0.9]), run.curve.costs
    )
    row = measures.run_row(type(run)(**{**vars(run), "curve": curve}))
    assert (row["at_best_validation"], row["best_validation_round"]) == (0.2, 2)
    assert row["best"] == 0.6


def test_spread_by_hand():
    """Mean 2, squares 1 + 0 + 1 over n - 1 = 2."""
    assert measures.spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "sd": 1.0, "min": 1.0, "max": 3.0}
    assert measures.spread([1.0])["sd"] is None
    assert measures.spread([1.0, None]) is None


def test_rounds_to_a_target_censor_those_that_never_reach_it(tmp_path, make_run):
    for seed, accuracy in enumerate([(0.1, 0.5, 0.6), (0.5, 0.2, 0.5), (0.1, 0.2, 0.3)]):
        make_run(tmp_path / str(seed), accuracy, seed=seed)
    half, most = measures.target_rows(study(tmp_path), {"": [0.5, 0.55]})
    assert (half["reached"], half["n"], half["median"]) == (2, 3, 2)
    assert half["by_seed"] == {"0": 2, "1": 1, "2": None}
    assert (half["min"], half["max"]) == (1, None)
    assert (most["reached"], most["median"], most["rounds"]) == (1, None, 3)


def test_chosen_targets_are_what_all_and_what_half_of_the_runs_reach(tmp_path, make_run):
    for seed, best in enumerate((0.339, 0.5, 0.58)):
        make_run(tmp_path / str(seed), (0.1, best, 0.2), seed=seed)
    found = study(tmp_path)
    assert measures.chosen_targets(found, measures.run_rows(found)) == {"": [0.33, 0.5]}


def test_mean_rank_of_clients_by_hand():
    """Round 1: scores 3, 1 of clients 5, 7: ranks 2, 1 of 2: 0.75, 0.25. Round 2: 1, 2, 2 of 5, 7, 8: 1/6, 2/3, 2/3."""
    clients = Participation(np.array([1, 1, 2, 2, 2, 2]), np.array([5, 7, 5, 7, 8, 9]), np.zeros(0), np.zeros(0))
    ids, means = measures.mean_rank_of(clients, np.array([3.0, 1, 1, 2, 2, np.nan]))
    assert ids.tolist() == [5, 7, 8]
    assert means == pytest.approx([(0.75 + 1 / 6) / 2, (0.25 + 2 / 3) / 2, 2 / 3])


def test_associations(tmp_path, make_run):
    """Client k has k + 1 classes of equal size and the k-th largest score, so both go together exactly."""
    for seed in range(2):
        make_run(tmp_path / str(seed), seed=seed, clients=6)
    score, weight = measures.association_rows(study(tmp_path))
    assert (score["quantity"], score["n"]) == ("score", 12)
    assert score["entropy"]["spearman"]["value"] == pytest.approx(-1)
    assert weight["examples"]["kendall"]["value"] == pytest.approx(1)


def test_costs(tmp_path, make_run):
    """Rounds of 2, 3 and 4 s; four clients of 0.25 s and scores of 0.125 s."""
    make_run(tmp_path / "scored")
    make_run(tmp_path / "plain", weighting="uniform", scores=False)
    scored, plain = measures.cost_rows(study(tmp_path))
    assert (scored["method"], plain["method"]) == ("size", "uniform")
    assert (scored["round_s"], scored["client_train_s"], scored["client_score_s"]) == (3.0, 1.0, 0.5)
    assert (scored["scored_clients"], plain["client_score_s"]) == (4.0, None)
    assert (scored["seconds"]["mean"], scored["round_count"]) == (3.0, 3)


def test_the_order_of_runs_changes_nothing(tmp_path, make_run):
    rng = np.random.default_rng(0)
    for weighting in ("size", "fedvg", "uniform"):
        for seed in range(5):
            make_run(tmp_path / f"{weighting}{seed}", rng.uniform(size=1), seed=seed, weighting=weighting, clients=2)
    runs = collect([tmp_path])[0]
    found = []
    for order in (runs, runs[::-1]):
        one = study_of(order)
        rows = measures.run_rows(one)
        known = comparison.values_of(rows, "last")
        found.append(
            (rows, comparison.comparisons(one, known), comparison.ranks_of(one, known), measures.cost_rows(one))
        )
    assert found[0] == found[1]


def test_mean_ranks_need_methods_and_blocks(tmp_path, make_run):
    for weighting in ("size", "fedvg", "uniform"):
        for seed in range(4):
            make_run(tmp_path / f"{weighting}{seed}", (0.1,), seed=seed, weighting=weighting, clients=2)
    found = study(tmp_path)
    ranks, blocks, why = comparison.ranks_of(found, comparison.values_of(measures.run_rows(found), "last"))
    assert (ranks, len(blocks)) == (None, 4)
    assert why == "Mean ranks need at least 5 blocks (condition and seed) with all methods; there are 4."
