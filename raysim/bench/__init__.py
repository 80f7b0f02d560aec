"""What a machine or a cluster gives: `raysim bench` measures rounds, and what the framework adds to them."""

from __future__ import annotations

PARTS = {
    "startup": "seconds until actors are ready and round 1 is done",
    "efficiency": "rounds against the same arithmetic in bare PyTorch processes",
    "overlap": "scoring while others train against scoring afterwards",
    "traffic": "bytes through the driver's node",
    "suggestion": "which number of client and scorer actors is best",
    "scoring": "scored images per second with more and more scorers",
    "overhead": "milliseconds per client when nobody trains",
}
"""The parts of the benchmark, in the order in which they are measured; named here so that `--help` loads nothing heavy."""
