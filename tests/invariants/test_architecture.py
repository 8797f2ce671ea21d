"""Order of imports, places of names, and paths to find things: read from the source.

An import inside a function counts as much as one at the top.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from sage_fast.config.registry import MODEL_FAMILIES, REWARDS, TRANSFORMERS, UPDATES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sage_fast"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")

SURFACE = {"sage_fast", "sage_fast.__main__"}
"""The Python API and the command line's entry, which stand above everything."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {
    module: ast.parse(path.read_text(encoding="utf-8"))
    for module, path in FILES.items()
}


def names_imported(tree: ast.AST) -> set[str]:
    """Every module that a file imports, with the names taken from it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules_imported(module: str) -> set[str]:
    """Modules of the package that one of them imports. Its version is a string in
    `__init__`, and no dependency.
    """
    names = names_imported(TREES[module]) - {"sage_fast.__version__"}
    return {
        name if name in FILES else name.rpartition(".")[0] for name in names
    } & FILES.keys() - {module}


GRAPH = {module: modules_imported(module) for module in FILES}


def reachable(*starts: str) -> set[str]:
    seen = set()
    todo = [*starts]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += GRAPH[module]
    return seen


def lies_in(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


# --------------------------------------------------------------------------------------
# arrows


BLOCK = re.search(r"reads this list\.\n\n((?:    .*\n)+)", CONTRIBUTING)
assert BLOCK is not None
LAYERS = [
    [f"sage_fast.{name}" for name in line.split()] for line in BLOCK[1].splitlines()
]
"""The lines of CONTRIBUTING's list, from the top to the bottom."""


def layer_of(module: str) -> int:
    """Number of a module's line; the longest name that it lies in decides."""
    found = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if lies_in(module, name)
    ]
    assert found, f"CONTRIBUTING.md has no line for {module}"
    return max(found)[1]


def test_every_arrow_points_down_the_list_of_contributing() -> None:
    arrows = [(a, b) for a in sorted(FILES.keys() - SURFACE) for b in sorted(GRAPH[a])]
    assert len(arrows) > 200
    assert not [
        f"{a} -> {b}" for a, b in arrows if b in SURFACE or layer_of(a) > layer_of(b)
    ]
    # Nor does the list name a module that is gone.
    assert not [
        name
        for names in LAYERS
        for name in names
        if not any(lies_in(module, name) for module in FILES)
    ]


def test_no_module_imports_itself_in_a_circle() -> None:
    assert not [
        module for module in sorted(FILES) if module in reachable(*GRAPH[module])
    ]


def folder_of(module: str) -> str:
    """The folder of a module that lies in one; a module of the top level is by itself."""
    parts = FILES[module].parent.relative_to(PACKAGE).parts
    return ".".join(parts) or module


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Pairs of folders that import each other. The error classes, which everything
    raises, lie under all of them.
    """
    arrows = {
        (folder_of(module), folder_of(other))
        for module, imported in graph.items()
        for other in imported
        if module not in SURFACE and other != "sage_fast.config.errors"
    }
    return sorted(
        f"{a} <-> {b}"
        for a, b in arrows
        if a < b and (b, a) in arrows and "sage_fast." not in a + b
    )


def test_no_two_folders_import_each_other() -> None:
    assert not circles(GRAPH)
    planted = {
        **GRAPH,
        "sage_fast.models.family": GRAPH["sage_fast.models.family"]
        | {"sage_fast.policy.lora"},
    }
    assert circles(planted) == ["models <-> policy"]
    # The sections do not depend on the algorithm that reads them.
    config = {module for module in FILES if lies_in(module, "sage_fast.config")}
    assert {other for module in config for other in GRAPH[module]} <= config


OWN = {
    prefix
    for target in (*MODEL_FAMILIES.values(), *REWARDS.values())
    for module in [target.partition(":")[0]]
    # A folder, or a file among those of other rewards.
    for prefix in [module if module.count(".") == 2 else module.rpartition(".")[0]]
}


def test_the_algorithm_and_what_serves_it_reach_no_family_and_no_reward() -> None:
    serving = {f"sage_fast.{name}" for name in ("run", "tools", "planning", "commands")}
    algorithm = {
        module
        for module in FILES
        if module.count(".") == 1 and FILES[module].name != "__init__.py"
    } - SURFACE
    assert "sage_fast.trainer" in algorithm and len(OWN) > 3
    start = [
        module for module in FILES if any(lies_in(module, prefix) for prefix in serving)
    ]
    assert not [
        m
        for m in sorted(reachable(*start))
        if any(lies_in(m, prefix) for prefix in OWN)
    ]
    assert not [
        m
        for m in sorted(reachable(*algorithm))
        if any(lies_in(m, prefix) for prefix in OWN | serving)
    ]


# --------------------------------------------------------------------------------------
# names


def strings(module: str) -> Iterator[tuple[int, str]]:
    """Line and text of the strings of a module that its code uses: no docstrings, no
    examples of a command's help.
    """
    skipped = {
        id(node.value) for node in ast.walk(TREES[module]) if isinstance(node, ast.Expr)
    }
    for node in ast.walk(TREES[module]):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.lineno, node.value


OBJECTIVES = "sage_fast.objectives"


@pytest.mark.parametrize(
    ("names", "own"),
    [({*MODEL_FAMILIES, *REWARDS}, OWN), (UPDATES, {OBJECTIVES})],
    ids=["families and rewards", "objectives"],
)
def test_only_the_registry_names(names: Collection[str], own: set[str]) -> None:
    """The sections of a configuration have defaults, which are names. A name before a
    full stop is that of a section (`forward_process.levels`).
    """
    words = re.compile(rf"\b({'|'.join(names)})\b(?!\.)")
    allowed = {f"sage_fast.config.{name}" for name in ("registry", "sections")}
    named = [
        f"{module}:{line}: {text!r}"
        for module in FILES
        if module not in allowed and not any(lies_in(module, prefix) for prefix in own)
        for line, text in strings(module)
        if words.search(text)
    ]
    assert not named


def family_classes() -> set[str]:
    """Classes of other libraries whose names say of which family they are, as the
    families' folders import them.
    """
    folders = {
        folder.rpartition(".")[2]
        for folder in OWN
        if folder.startswith("sage_fast.models.")
    } - {"toy"}
    known = {
        name.rpartition(".")[2]
        for module in FILES
        if any(lies_in(module, own) for own in OWN)
        for name in names_imported(TREES[module])
        if name.startswith(("diffusers", "transformers"))
    }
    stems = tuple(re.sub(r"\W|\d+$", "", folder) for folder in folders)
    return {
        name for name in known if any(stem in name.lower() for stem in stems)
    } | set(TRANSFORMERS)


FAMILY_CLASSES = family_classes()


def named_classes(text: str) -> set[str]:
    """Classes of a family that code names, outside docstrings and comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return FAMILY_CLASSES & {*re.findall(r"\w+", ast.unparse(tree))}


def test_a_class_of_a_family_is_named_in_its_folder_and_in_the_registry_alone() -> None:
    assert {"HunyuanVideo15Transformer3DModel", "AutoencoderKLWan"} < FAMILY_CLASSES
    for module, path in FILES.items():
        own = any(lies_in(module, prefix) for prefix in OWN)
        if not own and module != "sage_fast.config.registry":
            assert not named_classes(path.read_text("utf-8")), module
    assert named_classes("import diffusers\ndiffusers.AutoencoderKLWan")
    assert named_classes("NAME = 'a WanPipeline'")


# --------------------------------------------------------------------------------------
# files


def test_the_top_level_is_the_algorithm_alone() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 15


def test_a_folder_has_three_files_or_is_one() -> None:
    sizes = Counter(
        str(path.parent.relative_to(ROOT))
        for path in FILES.values()
        if path.name != "__init__.py"
    )
    assert {str(path.parent.relative_to(ROOT)) for path in FILES.values()} == set(sizes)
    assert not {folder: size for folder, size in sizes.items() if size < 3}


# --------------------------------------------------------------------------------------
# places


def test_where_to_find_it_is_true() -> None:
    steps = re.findall(
        r"`([^`]+\.py)`: ((?:`\w+`(?:, )?)+)",
        CONTRIBUTING.split("## Where to find it\n")[1],
    )
    assert len(steps) >= 9
    for path, names in steps:
        code = (ROOT / path).read_text("utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^ *(def|class) {name}\b|^{name}\b.* = ", code, re.M), (
                path,
                name,
            )


# --------------------------------------------------------------------------------------
# sage_kernels


def test_kernels_stand_on_torch_and_triton_alone() -> None:
    """sage_kernels is of use to other projects, and its references work where Triton
    has no build.
    """
    files = sorted((ROOT / "kernels/sage_kernels").rglob("*.py"))
    assert len(files) > 10
    third_party = {"torch", "triton"}
    for path in files:
        used = names_imported(ast.parse(path.read_text(encoding="utf-8")))
        foreign = (
            {name.split(".")[0] for name in used}
            - sys.stdlib_module_names
            - {"sage_kernels"}
        )
        allowed = {"torch"} if path.parent.name == "reference" else third_party
        assert foreign <= allowed, path


def test_one_module_meets_the_kernels() -> None:
    meeting = {
        module
        for module, path in FILES.items()
        if any(
            name.split(".")[0] == "sage_kernels"
            for name in names_imported(TREES[module])
        )
        or "torch.ops.sage_kernels" in path.read_text("utf-8")
    }
    assert meeting == {"sage_fast.kernels"}
