"""Which module of a network feeds which, read off a symbolic trace."""

from __future__ import annotations

import warnings

from torch import nn


def module_edges(network: nn.Module) -> tuple[tuple[str, str], ...]:
    """Pairs (from, to) of modules with parameters between which data flows directly or through what has none.

    Additions, reshapes, activations and pooling are passed through, so a residual connection is an edge. A parameter that a
    module with submodules uses itself (a class token, a layer scale) counts as that module. Empty if the network's control
    flow depends on its input, which cannot be traced.
    """
    from torch import fx

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return not any(True for _ in module.children()) or super().is_leaf_module(module, name)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = Tracer().trace(network)
    except Exception:
        return ()
    modules, parameters = dict(network.named_modules()), {name for name, _ in network.named_parameters()}
    feeding: dict[fx.Node, frozenset[str]] = {}
    edges: dict[tuple[str, str], None] = {}
    for node in graph.nodes:
        sources = frozenset[str]().union(*(feeding[before] for before in node.all_input_nodes))
        name = str(node.target)
        if node.op == "get_attr" and name in parameters:
            sources = frozenset([name.rpartition(".")[0] or name])
        if node.op == "call_module" and any(True for _ in modules[name].parameters()):
            edges |= dict.fromkeys((source, name) for source in sorted(sources))
            sources = frozenset([name])
        feeding[node] = sources
    return tuple(edges)
