from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.errors import ConfigError
from raysim.execution.ray_plan import (
    ACTOR_MEMORY,
    ACTORS_PER_GPU,
    Demand,
    Node,
    Plan,
    better_split,
    local_nodes,
    make_plan,
    memory_line,
    parts_of,
    proposed_share,
    starts_ray,
)
from raysim.execution.settings import ActorSettings, ExecutionSettings, gpu_share

GIB = 2**30


def node(cpus: float = 2, gpus: float = 0, memory: float = 64 * GIB, name: str = "n") -> Node:
    return Node(name, cpus, gpus, memory)


def demand(cohort: int = 10, clients: int = 100, scoring_ratio: float = 3.0, model_bytes: int = 200_000) -> Demand:
    return Demand(cohort, clients, scoring_ratio, model_bytes)


def execution(client: ActorSettings | None = None, scorer: ActorSettings | None = None, **fields) -> ExecutionSettings:
    return ExecutionSettings(client=client or ActorSettings(), scorer=scorer or ActorSettings(), **fields)


def sizes(plan: Plan) -> tuple[int, int]:
    return plan.client_actors, plan.scorer_actors


def refused(*args) -> str:
    with pytest.raises(ConfigError) as info:
        make_plan(*args)
    assert info.value.exit_status == 2
    return str(info.value)


def fits(plan: Plan, per_actor_memory: float) -> bool:
    """Pack the plan anew, device by device: scorers first, each actor on the node with the most free CPUs."""
    cpus = [n.cpus for n in plan.nodes]
    memory = [n.memory for n in plan.nodes]
    devices = [[Fraction(1)] * int(n.gpus) for n in plan.nodes]
    actors = [(plan.scorer_cpus, plan.scorer_gpus)] * plan.scorer_actors
    actors += [(plan.client_cpus, plan.client_gpus)] * plan.client_actors
    for need_cpu, need_gpu in actors:
        for i in sorted(range(len(cpus)), key=lambda i: -cpus[i]):
            if need_gpu >= 1:
                chosen = [d for d, free in enumerate(devices[i]) if free == 1][: int(need_gpu)]
                enough = len(chosen) == need_gpu
            else:  # One device holds the whole share: the fullest that can.
                able = [(free, d) for d, free in enumerate(devices[i]) if free >= need_gpu]
                chosen = [min(able)[1]] if able and need_gpu else []
                enough = bool(able) or need_gpu == 0
            if enough and cpus[i] >= need_cpu - 1e-6 and memory[i] >= per_actor_memory:
                cpus[i] -= need_cpu
                memory[i] -= per_actor_memory
                for d in chosen:
                    devices[i][d] -= min(need_gpu, Fraction(1))
                break
        else:
            return False
    return True


# ---- CPUs ----


def test_two_cores_hold_two_clients_and_two_scorers_while_scoring_is_the_larger_work():
    plan = make_plan(execution(), [node(2)], demand(scoring_ratio=3.0))
    assert sizes(plan) == (2, 2)
    assert plan.binding == "CPU-bound"
    assert (plan.client_gpus, plan.scorer_gpus) == (0, 0)


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, (2, 2)), (0.3, (3, 1)), (1.0, (2, 2)), (100.0, (2, 2))])
def test_the_split_follows_the_work(ratio, expected):
    assert sizes(make_plan(execution(), [node(2)], demand(scoring_ratio=ratio))) == expected


@pytest.mark.parametrize("cores", [2, 4, 8, 64])
def test_no_fewer_scorers_than_cores_while_scoring_is_the_larger_work(cores):
    plan = make_plan(execution(), [node(cores)], demand(cohort=500, clients=500, scoring_ratio=1.5))
    assert plan.scorer_actors == cores
    assert plan.client_actors == cores


def test_a_large_cluster_gives_every_client_of_the_cohort_its_own_actor():
    plan = make_plan(execution(), [node(64)], demand(cohort=10))
    assert sizes(plan) == (10, 10)  # More scorers than models have nothing to do.
    assert plan.binding == "cohort-bound"


def test_one_core_holds_one_of_each():
    assert sizes(make_plan(execution(), [node(1)], demand())) == (1, 1)


def test_given_numbers_are_kept():
    plan = make_plan(execution(client_actors=3, scorer_actors=1), [node(2)], demand())
    assert sizes(plan) == (3, 1)
    assert plan.binding == "as configured"


def test_given_numbers_that_do_not_fit_are_refused():
    text = refused(execution(client_actors=4, scorer_actors=1), [node(2)], demand())
    assert "execution.client_actors: 4 needs 4 x 0.5 CPU" in text
    assert "only 3 fit on 1 node(s) with 2 CPUs" in text
    assert "CPU-bound" in text
    text = refused(execution(scorer_actors=5), [node(2)], demand())
    assert "execution.scorer_actors: 5 needs 5 x 0.5 CPU" in text
    assert "only 4 fit" in text


def test_scorers_that_leave_no_room_for_a_client_are_refused():
    text = refused(execution(scorer_actors=4), [node(2)], demand())
    assert "execution.client_actors: auto needs 1 x 0.5 CPU" in text
    assert "beside 4 x 0.5 CPU for scorers only 0 fit" in text


def test_per_client_gives_every_client_of_the_run_an_actor():
    plan = make_plan(execution(client_actors="per_client"), [node(64)], demand(cohort=5, clients=20))
    assert plan.client_actors == 20
    assert plan.per_client
    assert plan.binding == "one per client"


def test_per_client_with_very_many_clients_is_refused_with_both_sides_of_the_sum():
    text = refused(execution(client_actors="per_client"), [node(2)], demand(cohort=50, clients=500))
    assert "execution.client_actors: per_client needs 500 x 0.5 CPU and 171.3 GiB" in text
    assert "only 2 fit on 1 node(s) with 2 CPUs, 0 GPUs and 64.0 GiB" in text


def test_very_many_clients_share_a_few_actors():
    assert sizes(make_plan(execution(), [node(2)], demand(cohort=50, clients=500))) == (2, 2)


def test_actors_without_cpus_are_bound_by_memory():
    none = ActorSettings(num_cpus=0)
    plan = make_plan(
        execution(none, none, scorer_actors=2), [node(2, memory=5.5 * ACTOR_MEMORY)], demand(model_bytes=0)
    )
    assert sizes(plan) == (3, 2)
    assert plan.binding == "memory-bound"


def test_memory_binds_and_counts_the_model():
    roomy = make_plan(execution(), [node(8, memory=4 * GIB)], demand(cohort=20, model_bytes=4_000_000))
    tight = make_plan(execution(), [node(8, memory=4 * GIB)], demand(cohort=20, model_bytes=100_000_000))
    assert roomy.binding == tight.binding == "memory-bound"
    assert sum(sizes(tight)) < sum(sizes(roomy)) == 11
    assert fits(tight, ACTOR_MEMORY + 4 * 100_000_000)


def test_too_little_memory_is_an_error_that_says_so():
    text = refused(execution(), [node(2, memory=0.2 * GIB)], demand())
    assert "memory-bound" in text
    assert "0.2 GiB" in text


# ---- F28 and F29: what can never fit ----


@pytest.mark.parametrize(
    ("settings", "key", "asked"),
    [
        (execution(ActorSettings(num_cpus=4)), "execution.client.num_cpus", "4 asked for"),
        (execution(ActorSettings(num_gpus=1)), "execution.client.num_gpus", "1 asked for"),
        (execution(scorer=ActorSettings(num_cpus=3)), "execution.scorer.num_cpus", "3 asked for"),
        (execution(ActorSettings(num_gpus="1/2")), "execution.client.num_gpus", "0.5 asked for"),
    ],
)
def test_an_actor_larger_than_every_node_is_refused(settings, key, asked):
    text = refused(settings, [node(2), node(2)], demand())
    assert text.startswith(f"{key}: {asked}")
    total, largest = ("4", "2") if "cpus" in key else ("0", "0")
    assert f"the cluster has {total} in all and the largest node {largest}" in text
    assert f"lower {key}" in text


def test_both_roles_are_listed():
    text = refused(execution(ActorSettings(num_cpus=4), ActorSettings(num_gpus=1)), [node(2)], demand())
    assert "execution.client.num_cpus" in text
    assert "execution.scorer.num_gpus" in text


def test_actors_that_fit_one_by_one_but_not_together_are_refused():
    text = refused(execution(ActorSettings(num_cpus=1.5), ActorSettings(num_cpus=1)), [node(2)], demand())
    assert "execution.client_actors: auto needs 1 x 1.5 CPU" in text
    assert "beside 1 x 1 CPU for scorers only 0 fit" in text


def test_automatic_scorers_leave_room_for_a_client_that_is_larger_than_they_are():
    assert sizes(make_plan(execution(ActorSettings(num_cpus=1.5)), [node(2)], demand())) == (1, 1)
    assert sizes(make_plan(execution(ActorSettings(num_cpus=3)), [node(4)], demand())) == (1, 2)


def test_an_actor_whose_parts_lie_on_two_nodes_is_refused():
    text = refused(execution(ActorSettings(num_cpus=2, num_gpus=1)), [node(8), node(1, gpus=1)], demand())
    assert "execution.client_actors: auto needs 1 x 2 CPU + 1 GPU" in text


def test_a_cluster_without_nodes_is_refused():
    assert "the cluster has 0 in all" in refused(execution(), [], demand())


# ---- GPUs ----


@pytest.mark.parametrize(
    ("given", "share"),
    [
        (0, Fraction(0)),
        (1, Fraction(1)),
        (2.0, Fraction(2)),
        (0.5, Fraction(1, 2)),
        ("1/3", Fraction(1, 3)),
        (0.3333, Fraction(1, 3)),
        (0.125, Fraction(1, 8)),
        ("auto", None),
    ],
)
def test_shares_of_a_gpu(given, share):
    assert gpu_share(given) == share


@pytest.mark.parametrize("given", [0.6, 0.3, 0.667, 1.5, -1, "x", "2/3", "1/0", ""])
def test_shares_that_leave_a_remainder_are_refused(given):
    with pytest.raises(ValueError, match=r"auto, a whole number or 1/k"):
        gpu_share(given)


@pytest.mark.parametrize(("gpus", "parts"), [(1, 2), (2, 2), (3, 2), (2, 3), (8, 3), (1, 5)])
def test_runs_that_share_a_cluster_fit_beside_each_other(gpus, parts):
    whole = node(cpus=32, gpus=gpus)
    (share,) = parts_of([whole], parts)
    plan = make_plan(execution(), [share], demand())
    assert plan.client_gpus == plan.scorer_gpus > 0
    actors = sum(sizes(plan)) * parts
    # On devices of Ray's, each holds a whole number of actors.
    assert actors <= gpus * (1 // plan.client_gpus)
    assert actors * plan.client_cpus <= whole.cpus
    assert actors * ACTOR_MEMORY <= whole.memory


def test_the_whole_is_one_part_and_parts_keep_their_labels():
    nodes = [Node("a", 4, 2, 8 * GIB, GIB, {"raysim-role": "scorer"}), node()]
    assert parts_of(nodes, 1) == nodes
    assert [part.labels for part in parts_of(nodes, 2)] == [part.labels for part in nodes]


def test_halves_of_two_gpus():
    half = ActorSettings(num_gpus="1/2")
    plan = make_plan(execution(half, half, scorer_actors=1), [node(8, gpus=2)], demand())
    assert sizes(plan) == (3, 1)
    assert plan.binding == "GPU-bound"


def test_a_third_and_a_half_do_not_straddle_devices():
    plan = make_plan(
        execution(ActorSettings(num_gpus="1/2"), ActorSettings(num_gpus="1/3"), scorer_actors=3),
        [node(8, gpus=2)],
        demand(),
    )
    # The scorers fill the first GPU and leave the second to the clients.
    assert sizes(plan) == (2, 3)


def test_whole_gpus_need_free_ones():
    whole = ActorSettings(num_gpus=2)
    plan = make_plan(execution(whole, ActorSettings(num_gpus="1/2"), scorer_actors=1), [node(8, gpus=4)], demand())
    assert sizes(plan) == (1, 1)  # Three free GPUs hold one pair.
    assert plan.binding == "GPU-bound"


@pytest.mark.parametrize(
    ("gpus", "cpus", "cohort", "k"),
    [
        (1, 64, 10, 8),  # 20 actors wanted, at most 8 on a GPU
        (4, 64, 10, 5),  # 20 actors on 4 GPUs
        (4, 64, 9, 5),  # 18 actors on 4 GPUs
        (8, 4, 10, 1),  # the CPUs hold 8 actors
        (1, 2, 10, 4),  # the CPUs hold 4 actors
        (2, 64, 1, 1),  # one client, one scorer
    ],
)
def test_the_automatic_share_is_an_equal_unit_fraction(gpus, cpus, cohort, k):
    plan = make_plan(execution(), [node(cpus, gpus=gpus)], demand(cohort=cohort))
    assert plan.client_gpus == plan.scorer_gpus == Fraction(1, k)
    assert k <= ACTORS_PER_GPU
    assert sum(sizes(plan)) <= k * gpus
    assert fits(plan, ACTOR_MEMORY)


def test_the_automatic_share_serves_given_numbers():
    plan = make_plan(execution(client_actors=4, scorer_actors=2), [node(16, gpus=1)], demand(cohort=2))
    assert sizes(plan) == (4, 2)
    assert plan.client_gpus == Fraction(1, 6)


def test_the_lines_name_pools_shares_and_binding():
    plan = make_plan(execution(), [node(4, gpus=1), node(2)], demand(cohort=20))
    cluster, clients, scorers, store = plan.lines()
    assert cluster == "cluster: 2 node(s), 6 CPUs, 1 GPUs, 128.0 GiB"
    assert clients == f"client actors: {plan.client_actors} x 0.5 CPU + 1/8 GPU (GPU-bound)"
    assert scorers == f"scorer actors: {plan.scorer_actors} x 0.5 CPU + 1/8 GPU"
    assert store == "object store: inf GiB, a round keeps 0 GiB there"
    assert plan.as_dict()["client"] == {"num_cpus": 0.5, "num_gpus": "1/8"}


def labelled(cpus: float, **labels: str) -> Node:
    return replace(node(cpus), labels={key.replace("_", "-"): value for key, value in labels.items()})


SCORER = ActorSettings(label={"role": "scorer"})


def test_a_label_keeps_scorers_on_the_nodes_that_have_it():
    """By hand: half a CPU each, scoring is the larger work, so as many scorers as their two cores; clients take the rest."""
    nodes = [labelled(4), labelled(2, role="scorer"), labelled(2, role="client")]
    plan = make_plan(execution(scorer=SCORER), nodes, demand(cohort=20))
    assert sizes(plan) == (14, 2)
    assert plan.lines()[2] == "scorer actors: 2 x 0.5 CPU on nodes with role=scorer"
    assert sizes(make_plan(execution(), nodes, demand(cohort=20))) == (8, 8)
    kept = execution(replace(SCORER, label={"role": "client"}), SCORER)
    plan = make_plan(kept, nodes, demand(cohort=20))
    assert sizes(plan) == (4, 2)
    assert plan.binding == "CPU-bound"
    assert better_split(plan, 1.0, 9.0, 9.0, 20) is None, "they cannot take each other's place"


def test_more_scorers_than_the_labelled_nodes_hold_are_refused():
    text = refused(execution(scorer=SCORER, scorer_actors=5), [labelled(8), labelled(2, role="scorer")], demand())
    assert "5 x 0.5 CPU on nodes with role=scorer" in text
    assert "only 4 fit" in text
    text = refused(execution(scorer=replace(SCORER, num_cpus=3)), [labelled(8), labelled(2, role="scorer")], demand())
    assert "execution.scorer.num_cpus: 3 asked for, but what is on nodes with role=scorer has 2 in all" in text


def test_a_label_that_no_node_has_is_refused_with_those_that_there_are():
    text = refused(execution(SCORER), [labelled(2, role="scorers"), labelled(2)], demand())
    assert "execution.client.label: no node has role=scorer, role=scorers of that kind on 2 node(s)" in text
    assert "ray start --labels role=scorer" in text
    assert "nothing of that kind" in refused(execution(SCORER), [node(2)], demand())


@pytest.mark.parametrize("label", [{"role": "!scorer"}, {"role": "in(a, b)"}, {"role": ""}, {"a b": "c"}, {"x": "-y"}])
def test_what_is_no_label_is_refused(label):
    with pytest.raises(ValueError, match="is no label of a node"):
        ActorSettings(label=label)
    assert ActorSettings(label={"ray.io/accelerator-type": "H100"}).label == {"ray.io/accelerator-type": "H100"}


def test_a_round_that_does_not_fit_into_the_object_stores_is_warned_of():
    nodes = [Node("a", 2, 0, 64 * GIB, 3 * GIB), Node("b", 2, 0, 64 * GIB, 7 * GIB)]
    fits = make_plan(execution(), nodes, replace(demand(), store_bytes=8 * GIB))
    assert fits.warning is None
    assert fits.lines()[3] == "object store: 10.0 GiB, a round keeps 8 GiB there"
    full = make_plan(execution(), nodes, replace(demand(), store_bytes=9 * GIB))
    assert full.warning.startswith("a round keeps 9.0 GiB in object stores of 10.0 GiB: Ray will move objects to disk")
    assert full == fits, "the same pools: a session may keep them"


def test_the_object_store_of_a_ray_of_our_own_grows_with_the_need_up_to_half_of_the_memory():
    (small,), (large,), (huge,) = (local_nodes(execution(), need) for need in (0, 1e9, 1e15))
    assert small.store == pytest.approx(0.3 * (small.memory + small.store), rel=0.02)
    assert small.store <= large.store
    assert huge.store == pytest.approx(huge.memory, rel=0.02)
    (given,) = local_nodes(execution(object_store_memory_mb=100), 1e15)
    assert given.store == 100 * 2**20


@pytest.mark.parametrize(
    ("pools", "train", "score", "elapsed", "better"),
    [
        ((4, 4), 6.0, 6.0, 1.6, None),  # As it should be.
        ((4, 4), 2.0, 6.0, 1.6, (2, 6)),  # Scorers all busy for 1.5 s, clients for 0.5: with 2 and 6 both for 1.0.
        ((6, 2), 6.0, 2.0, 1.1, None),
        ((2, 6), 6.0, 2.0, 3.1, (6, 2)),
        ((4, 4), 2.0, 6.0, 1.05, None),  # 8 s of work in 1.05 s on 8 cores: nothing to gain.
        ((4, 4), 0.0, 6.0, 1.6, None),  # Nothing was trained.
    ],
)
def test_a_better_split_is_found_by_hand_checked_numbers(pools, train, score, elapsed, better):
    actor = ActorSettings(num_cpus=1)
    settings = execution(actor, actor, client_actors=pools[0], scorer_actors=pools[1])
    plan = make_plan(settings, [node(8)], demand())
    assert better_split(plan, train, score, elapsed, cohort=10) == better
    few = better_split(plan, train, score, elapsed, cohort=4)
    assert few is None or max(few) <= 4


# ---- several nodes ----


def test_a_head_node_without_cpus_holds_nothing():
    head = node(0, name="head")
    assert sizes(make_plan(execution(), [head, node(2)], demand())) == sizes(
        make_plan(execution(), [node(2)], demand())
    )
    assert "largest node 0" in refused(execution(), [head], demand())


def test_cpus_of_several_nodes_do_not_add_up_for_one_actor():
    two = ActorSettings(num_cpus=2)
    plan = make_plan(execution(two, two), [node(3), node(3), node(1)], demand())
    assert sizes(plan) == (1, 1)


def test_nodes_of_different_size_are_filled_by_their_own_resources():
    nodes = [node(2, memory=64 * GIB), node(16, memory=4.5 * ACTOR_MEMORY), node(4, gpus=0)]
    plan = make_plan(execution(scorer_actors=4), nodes, demand(cohort=40, model_bytes=0))
    assert sizes(plan) == (12, 4)  # 4 + 4 (memory) + 8


amounts = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0])
shares = st.sampled_from(["auto", 0, 1, 2, "1/2", "1/3", "1/8"])
pools = st.sampled_from(["auto", 1, 2, 3, 7])


@settings(max_examples=400, deadline=None)
@given(
    nodes=st.lists(
        st.builds(
            node,
            cpus=st.sampled_from([0, 1, 2, 3, 4, 16]),
            gpus=st.sampled_from([0, 0, 1, 2, 4]),
            memory=st.sampled_from([0.3, 1.0, 3.0, 32.0]).map(lambda g: g * GIB),
        ),
        max_size=4,
    ),
    client=st.builds(ActorSettings, num_cpus=amounts, num_gpus=shares),
    scorer=st.builds(ActorSettings, num_cpus=amounts, num_gpus=shares),
    client_actors=st.one_of(pools, st.just("per_client")),
    scorer_actors=pools,
    cohort=st.integers(1, 30),
    ratio=st.sampled_from([0.0, 0.1, 0.9, 1.0, 3.0, 50.0]),
)
def test_a_plan_fits_and_has_one_of_each(nodes, client, scorer, client_actors, scorer_actors, cohort, ratio):
    asked = execution(client, scorer, client_actors=client_actors, scorer_actors=scorer_actors)
    try:
        plan = make_plan(asked, nodes, demand(cohort=cohort, clients=40, scoring_ratio=ratio))
    except ConfigError:
        return
    assert fits(plan, ACTOR_MEMORY + 4 * 200_000)
    assert min(sizes(plan)) >= 1
    most = {"auto": cohort, "per_client": 40}.get(client_actors, client_actors)
    assert plan.client_actors <= most
    assert plan.client_actors == most or (
        client_actors == "auto" and plan.binding in ("CPU-bound", "GPU-bound", "memory-bound")
    )
    if scorer_actors == "auto":
        assert plan.scorer_actors <= cohort
    else:
        assert plan.scorer_actors == scorer_actors


@settings(max_examples=100, deadline=None)
@given(
    cpus=st.integers(1, 16),
    client=st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0]),
    scorer=st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0]),
    ratio=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_automatic_pools_exist_whenever_one_of_each_fits(cpus, client, scorer, ratio):
    asked = execution(ActorSettings(num_cpus=client), ActorSettings(num_cpus=scorer))
    try:
        make_plan(asked, [node(cpus)], demand(scoring_ratio=ratio))
    except ConfigError:
        assert client + scorer > cpus


# ---- a Ray of our own ----


def test_this_machine_as_a_node(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setattr("raysim.execution.ray_plan._available_memory", lambda: 10.0 * GIB)
    (auto,) = local_nodes(ExecutionSettings(num_gpus=0))
    assert (auto.cpus, auto.gpus, auto.memory) == (6, 0, 7 * GIB)
    (given,) = local_nodes(ExecutionSettings(num_cpus=3, num_gpus=2, object_store_memory_mb=1024))
    assert (given.cpus, given.gpus, given.memory) == (3, 2, 9 * GIB)


def test_available_memory_is_that_of_the_machine():
    (here,) = local_nodes(ExecutionSettings(num_gpus=0))
    assert 0.05 * GIB < here.memory < 64 * 1024 * GIB


def test_when_raysim_starts_a_ray_of_its_own(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert starts_ray(ExecutionSettings())
    assert not starts_ray(ExecutionSettings(backend="serial"))
    assert not starts_ray(ExecutionSettings(address="10.0.0.1:6379"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert not starts_ray(ExecutionSettings())
    monkeypatch.delitem(sys.modules, "ray")
    assert starts_ray(ExecutionSettings())
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not starts_ray(ExecutionSettings())


# ---- memory of GPUs ----


@given(st.integers(0, 100 * GIB), st.integers(1, 200 * GIB), st.integers(1, GIB))
def test_the_proposed_share_is_the_smallest_that_fits(peak, total, context):
    k = proposed_share(peak, total, context)
    assert k == 1 or k * (peak + context) <= 0.9 * total
    assert (k + 1) * (peak + context) > 0.9 * total * (1 - 1e-12)


def test_the_share_that_would_fit_in_words():
    assert proposed_share(GIB, 80 * GIB, GIB) == 36
    assert proposed_share(200 * GIB, 80 * GIB) == 1, "it is there, so one fits"
    peak = int(1.2 * GIB)
    words = "client actors peak at 1.2 GiB of 79 GiB: execution.client.num_gpus: 1/39 would fit"
    assert memory_line(peak, 79 * GIB, Fraction(1, 2)) == words
    assert memory_line(peak, 79 * GIB, Fraction(1, 39)) is None, "as it is"
    assert memory_line(60 * GIB, 79 * GIB, Fraction(1, 2)).endswith("num_gpus: 1 would fit")
