"""What may import what: read from the source, so that a lazy import counts too."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sage_fast"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "sage_fast"}


GRAPH = {module_name(p): imports(p) for p in PACKAGE.rglob("*.py")}


def reachable(start: str) -> set[str]:
    seen, todo = set(), [start]
    while todo:
        module = todo.pop()
        if module in GRAPH and module not in seen:
            seen.add(module)
            todo += GRAPH[module]
    return seen


@pytest.mark.parametrize(
    "module", ["sage_fast.trainer", "sage_fast.run.run", "sage_fast.commands.cli", "sage_fast.rollout"]
)
def test_nothing_of_the_toy_world_is_reachable(module: str) -> None:
    assert len(reachable(module)) > 5 or module == "sage_fast.rollout"
    assert not [m for m in reachable(module) if "toy" in m]


def test_no_branch_on_toy() -> None:
    """Outside the toy's own files, only the registry's table and the config's default know the word."""
    files = [p for p in PACKAGE.rglob("*.py") if "toy" not in p.relative_to(PACKAGE).as_posix()]
    naming = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare | ast.Match) and "toy" in ast.unparse(node):
                naming.append(f"{path.name}:{node.lineno}")
    assert not naming


def test_dependencies_point_one_way() -> None:
    layers = {
        "sage_fast.sde": {"sage_fast.trainer", "sage_fast.rollout", "sage_fast.config.schema", "sage_fast.objective"},
        "sage_fast.noise": {"sage_fast.trainer", "sage_fast.rollout", "sage_fast.config.schema"},
        "sage_fast.objective": {"sage_fast.trainer", "sage_fast.rollout", "sage_fast.config.schema"},
        "sage_fast.rollout": {"sage_fast.trainer", "sage_fast.run.run"},
        "sage_fast.models.hunyuan15.velocity": {"sage_fast.trainer", "sage_fast.rollout", "sage_fast.run.run"},
        "sage_fast.rewards.composite": {"sage_fast.trainer", "sage_fast.run.run"},
        "sage_fast.trainer": {"sage_fast.run.run", "sage_fast.commands.cli"},
    }
    for module, forbidden in layers.items():
        assert not reachable(module) & forbidden, module


def names_imported(path: Path) -> set[str]:
    """Every module that a file imports, with the names taken from it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_kernels_stand_on_torch_and_triton_alone() -> None:
    """sage_kernels is of use to other projects, and its references work where Triton has no build."""
    files = sorted((ROOT / "kernels/sage_kernels").rglob("*.py"))
    assert len(files) > 10
    third_party = {"torch", "triton"}
    for path in files:
        foreign = {name.split(".")[0] for name in names_imported(path)} - sys.stdlib_module_names - {"sage_kernels"}
        allowed = {"torch"} if path.parent.name == "reference" else third_party
        assert foreign <= allowed, path


def test_one_module_meets_the_kernels() -> None:
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    meeting = {
        module
        for module, path in files.items()
        if any(name.split(".")[0] == "sage_kernels" for name in names_imported(path))
        or "torch.ops.sage_kernels" in path.read_text("utf-8")
    }
    assert meeting == {"sage_fast.kernels"}


def test_the_seam_stands_below_the_algorithm() -> None:
    assert GRAPH["sage_fast.kernels"] - {"sage_fast.config.errors.ConfigError"} == {"sage_fast.config.errors"}
