from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from raysim.report.collect import collect
from raysim.report.figures import cliques, draw_curves, draw_ranks, draw_weights
from raysim.report.statistics import mean_ranks
from raysim.report.study import study_of


def check(drawing, width=(1000, 2400), height=(400, 3000)):
    assert drawing.png[:8] == b"\x89PNG\r\n\x1a\n"
    across, down = struct.unpack(">II", drawing.png[16:24])
    assert width[0] <= across <= width[1]
    assert height[0] <= down <= height[1]
    assert drawing.pdf.startswith(b"%PDF-")
    assert b"</svg>" in drawing.svg


def test_cliques_by_hand():
    """1 to 2.4 spans 1.4; 1.9 to 3 spans 1.1; 2.4 to 3 lies within the second."""
    assert cliques([1.0, 1.9, 2.4, 3.0], 1.45) == [(0, 2), (1, 3)]
    assert cliques([1.0, 3.0], 1.0) == []
    assert cliques([1.0, 2.0], 1.0) == [(0, 1)]


@pytest.mark.slow
def test_curves_and_weights(tmp_path, make_run):
    for name in ("_size", "$a$ & <b>"):
        for seed in range(2):
            make_run(tmp_path / f"{name[:2]}{seed}", (0.1, None, 0.3), seed=seed, weighting=name)
    study = study_of(collect([tmp_path])[0])
    first, extra = draw_curves(study, study.methods)
    check(first)
    assert extra == ""
    assert draw_curves(study, study.methods)[0] == first, "the same numbers give the same bytes"
    check(draw_weights([(method, study.of("", method)[0]) for method in study.methods]))
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("k", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_ranks(k):
    values = np.random.default_rng(k).normal(size=(10, k))
    check(draw_ranks(mean_ranks(values), [f"method {'with a very long name ' * (i % 2)}{i}" for i in range(k)]))
