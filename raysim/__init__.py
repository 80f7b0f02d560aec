"""raysim: a federated-learning simulator on Ray.

    import raysim

    record = raysim.run("configs/quickstart.yaml", ["rounds=5"], progress=True)
    record.rounds.to_pandas()

`import raysim` loads nothing heavy; the functions below do when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysim.config import RunConfig, load_config
    from raysim.runrecord import RunRecord, load
    from raysim.simulation import Session, resume, run

__version__ = "0.1.0"
__all__ = ["RunConfig", "RunRecord", "Session", "__version__", "load", "load_config", "resume", "run"]

_HOMES = {
    "RunConfig": "raysim.config",
    "load_config": "raysim.config",
    "RunRecord": "raysim.runrecord",
    "load": "raysim.runrecord",
    "Session": "raysim.simulation",
    "resume": "raysim.simulation",
    "run": "raysim.simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raysim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
