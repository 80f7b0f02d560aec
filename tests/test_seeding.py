from __future__ import annotations

import itertools

import torch

from raysim.seeding import Purpose, rng_for, torch_seeded_from


def test_streams_are_functions_of_their_arguments_and_all_different():
    keys = list(itertools.product((0, 1), Purpose, (0, 1, 2), (0, 1, 2)))
    draws = {
        key: tuple(rng_for(key[0], key[1], round_num=key[2], client_id=key[3]).integers(2**60, size=2)) for key in keys
    }
    assert len(set(draws.values())) == len(keys)
    again = tuple(rng_for(1, Purpose.LOCAL, round_num=2, client_id=1).integers(2**60, size=2))
    assert again == draws[(1, Purpose.LOCAL, 2, 1)]


def test_purposes_keep_their_numbers():
    assert {p.name: p.value for p in Purpose} == {
        "SPLIT": 1,
        "PARTITION": 2,
        "INIT": 3,
        "COHORT": 4,
        "LOCAL": 5,
        "SCORING": 6,
        "SUBSET": 7,
        "FUSION": 8,
    }


def test_torch_is_seeded_inside_and_untouched_outside():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch_seeded_from(rng_for(0, Purpose.LOCAL)):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with torch_seeded_from(rng_for(0, Purpose.LOCAL)):
        assert torch.equal(torch.rand(3), first)


def test_seeding_leaves_nothing_behind():
    """torch.manual_seed grows a list by a stack trace per call."""
    before = len(torch.cuda._queued_calls)
    for _ in range(3):
        with torch_seeded_from(rng_for(0, Purpose.LOCAL)):
            first = torch.rand(1)
    assert len(torch.cuda._queued_calls) == before
    torch.manual_seed(int(rng_for(0, Purpose.LOCAL).integers(2**63)))
    assert torch.rand(1) == first
