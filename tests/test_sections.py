"""Configuration is passed as the section that is used: who may name the whole of it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "sage_fast"

# Loading it, running it, what looks at a run from outside, and what users import.
WHOLE = (
    "__init__.py",
    "config/",
    "run/",
    "commands/",
    "tools/",
    "planning/",
    "objectives/",
    "trainer.py",
)


def names_run_config(source: str) -> bool:
    """True if code names `RunConfig`: imported, as a name or attribute, or in an
    annotation that is a string.
    """
    for node in ast.walk(ast.parse(source)):
        named = {
            ast.Name: "id",
            ast.Attribute: "attr",
            ast.alias: "name",
            ast.Constant: "value",
        }.get(type(node))
        if named is not None and getattr(node, named) == "RunConfig":
            return True
    return False


def test_only_the_run_and_the_trainer_see_the_whole_configuration() -> None:
    files = {
        path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")
    }
    naming = {
        name
        for name, path in files.items()
        if names_run_config(path.read_text(encoding="utf-8"))
    }
    assert {"trainer.py", "run/run.py"} <= naming
    assert not {name for name in naming if not name.startswith(WHOLE)}
