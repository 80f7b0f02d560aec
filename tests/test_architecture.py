"""The layers of the package: who may import whom, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import raysim
from raysim.algorithms import ALGORITHMS
from raysim.data import SOURCES
from raysim.weighting import WEIGHTINGS

ROOT = Path(raysim.__file__).parent

LEVELS = [
    {"vector", "seeding", "state", "errors", "fields"},
    {"objective", "local", "evaluation", "data", "models"},
    {"algorithms", "cohort", "weighting", "fusion", "subset"},
    {"recording", "execution"},
    {
        "config",
        "configfile",
        "preparation",
        "simulation",
        "recorder",
        "verdict",
        "resuming",
        "runrecord",
        "sweep",
        "report",
        "bench",
    },
    {"cli"},
]
NUMERICS = (
    "raysim.vector",
    "raysim.state",
    "raysim.weighting",
    "raysim.algorithms",
    "raysim.cohort",
    "raysim.subset",
    "raysim.execution.work",
    "raysim.evaluation",
)
FAMILIES = {"algorithms", "weighting", "fusion"}
# The bare loop is what raysim is measured against: plain PyTorch on purpose.
WITH_LAYERS_OF_TORCH = {"raysim.objective", "raysim.evaluation", "raysim.bench.bare"}
WITH_RAY = {
    f"raysim.execution.ray_{part}"
    for part in ("actors", "backend", "cohort", "connection", "executor", "light", "traffic")
}


@dataclass(frozen=True)
class Import:
    """One imported module, the names taken from it, and whether only the type checker sees it."""

    target: str
    names: tuple[str, ...]
    typing_only: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCE = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
PACKAGES = {module_name(path) for path in ROOT.rglob("__init__.py")}
LAYERED = sorted(SOURCE.keys() - {"raysim", "raysim.__main__"})


def imports_of(tree: ast.AST, typing_only: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for inner in child.body:
                yield from imports_of(ast.Module([inner], []), typing_only=True)
            for inner in child.orelse:
                yield from imports_of(ast.Module([inner], []), typing_only)
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, (), typing_only)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield Import(str(child.module), tuple(alias.name for alias in child.names), typing_only)
        else:
            yield from imports_of(child, typing_only)


def reached(item: Import) -> set[str]:
    """Modules of raysim that an import reaches: `from raysim.models import small` is raysim.models and raysim.models.small."""
    return ({item.target} | {f"{item.target}.{name}" for name in item.names}) & SOURCE.keys()


def level(module: str) -> int:
    part = module.split(".")[1]
    found = [number for number, names in enumerate(LEVELS) if part in names]
    assert len(found) == 1, f"{module}: say in LEVELS which level it is on"
    return found[0]


@pytest.mark.parametrize("module", LAYERED)
def test_imports_go_down_or_sideways(module):
    for item in imports_of(SOURCE[module]):
        for target in reached(item) - {"raysim"}:
            assert level(target) <= level(module), f"{module} imports {target}, which is above it"


def test_imports_have_no_circle():
    graph = {
        module: {
            target
            for item in imports_of(SOURCE[module])
            if not item.typing_only
            for target in reached(item)
            # A package's own file runs before its members and may gather them.
            if target not in (module, "raysim") and not (target in PACKAGES and module.startswith(f"{target}."))
        }
        for module in LAYERED
    }
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")
    assert set(order) == set(LAYERED)


@pytest.mark.parametrize(
    "module", [name for name in LAYERED if name.split(".")[1] in FAMILIES and name.count(".") == 2]
)
def test_members_of_a_family_know_base_but_no_sibling(module):
    family = module.rpartition(".")[0]
    own = {target for item in imports_of(SOURCE[module]) for target in reached(item) if target.startswith(family)}
    assert own <= {f"{family}.base"}


@pytest.mark.parametrize("module", sorted(SOURCE))
def test_torch_layers_and_ray_stay_where_they_belong(module):
    for item in imports_of(SOURCE[module]):
        if item.target.startswith("torch.nn") or (item.target == "torch" and "nn" in item.names):
            assert module in WITH_LAYERS_OF_TORCH or module.startswith("raysim.models"), f"torch.nn in {module}"
        if item.target.partition(".")[0] == "ray":
            assert module in WITH_RAY, f"ray in {module}"


@pytest.mark.parametrize("module", sorted(SOURCE))
def test_no_print_and_no_bare_except(module):
    for node in ast.walk(SOURCE[module]):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{module}:{node.lineno}: bare except"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "exit", "quit"), f"{module}:{node.lineno}: {node.func.id}"


@pytest.mark.parametrize("registry", [ALGORITHMS, WEIGHTINGS], ids=["algorithms", "weightings"])
def test_a_registry_calls_its_members_by_their_own_names(registry: Mapping[str, type]):
    for key, member in registry.items():
        assert member.name == key, f"{member.__name__} is registered as {key} and calls itself {member.name}"


@pytest.mark.parametrize("registry", [ALGORITHMS, WEIGHTINGS], ids=["algorithms", "weightings"])
def test_a_registry_holds_every_member_of_its_family(registry: Mapping[str, type]):
    family = next(iter(registry.values())).__module__.rpartition(".")[0]
    files = {name for name in SOURCE if name.startswith(f"{family}.")} - {f"{family}.base"}
    assert files == {member.__module__ for member in registry.values()}


def test_every_source_of_data_is_a_documented_reader():
    for key, reader in SOURCES.items():
        assert reader.__name__ == f"read_{key}"
        assert ast.get_docstring(SOURCE[reader.__module__]), reader.__module__


@pytest.mark.parametrize("module", sorted(SOURCE))
def test_every_module_says_what_it_is(module):
    assert ast.get_docstring(SOURCE[module])


@pytest.mark.parametrize("member", [*ALGORITHMS.values(), WEIGHTINGS["fedvg"]], ids=lambda member: member.name)
def test_methods_name_their_paper(member: type):
    assert "\nReference: " in str(import_module(member.__module__).__doc__)


@pytest.mark.parametrize("module", [name for name in LAYERED if name.startswith(NUMERICS)])
def test_no_blas_in_the_numerics(module):
    """numpy hands these to a BLAS whose bits depend on the number of threads, which differs between processes."""
    for node in ast.walk(SOURCE[module]):
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)), f"{module}:{node.lineno}: @"
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("np.linalg", "np.dot", "np.einsum", "np.inner", "np.vdot"), module
