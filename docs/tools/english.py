"""Check of the English in docstrings, comments and documents: `python -m docs.tools.english [FILE ...]`.

A docstring opens with a verb or a noun. Some phrases are never used, because a reader has to unwind them; each has its
replacement below. Code, quoted names and fenced blocks are not read.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "sage_fast/**/*.py",
    "kernels/**/*.py",
    "benchmarks/**/*.py",
    "tests/**/*.py",
    "examples/*.py",
    "docs/tools/*.py",
    "setup.py",
)
PAGES = ("*.md", "docs/**/*.md", "kernels/*.md", "benchmarks/*.md")
SETTINGS = ("configs/**/*.yaml", "sage_fast/**/*.yaml", "benchmarks/*.yaml", "mkdocs.yml", "Makefile")

OPENING = re.compile(r"\s*(What|Whether|Who|Whose|Those|Which)\b(?!.*\?\s*$)")
PHRASES = {
    # "There is no", "is no longer", "is no larger than" read well.
    r"(?<![Tt]here[ \n])\b(?:is|are) no (?!one\b|\w+er\b|more\b|less\b|worse\b|matter\b)": "`is not a X`",
    r"\b(?:told|untold)\b": "`measured`, `known`, `distinguished`, or name who is informed",
    r"\banew\b": "`again`, or `a new`",
    r"\b(?:is|are|was|were) to (?!the\b|an?\b|its\b|this\b|that\b|one\b)[a-z]": "`must`, `should`, or the verb alone",
    r"\bbesides\b": "`also`, `apart from`",
    # "Of its own forward" reads well.
    r"\bof (?:its|their) own(?=[.,;:)]|$| (?:and|or|that|so|in|on|with|for|to|from|where|as|by)\b)": "`its own X`",
    r"(?:^|[.;:] )What (?:is|are|was|were|ha[sd]|have|does|do|can|needs?|no|an?)\b(?![^.?]*\?)": "name the subject",
}
"""Pattern -> what to write."""


def prose_of_code(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring, of every docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def prose_of_page(text: str) -> str:
    """Blank everything of a page but its prose, line by line."""
    text = re.sub(r"^```.*?^```", lambda match: re.sub(r"[^\n]", "", match[0]), text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def complaints(text: str, *, opening: bool = False) -> Iterator[tuple[int, str]]:
    """Yield line of the text and complaint. Names in backticks and quoted words are not read."""
    text = re.sub(r"`[^`\n]*`|\"[^\"\n]*\"", lambda match: "x" * len(match[0]), text)
    if opening and (found := OPENING.match(text)):
        yield 0, f"a docstring opens with a verb or a noun, not with {found[1]!r}"
    for pattern, better in PHRASES.items():
        for match in re.finditer(re.sub(r"(?<!\[) ", r"\\s+", pattern), text, re.MULTILINE):
            yield text.count("\n", 0, match.start()), f"{' '.join(match[0].split())!r}: {better}"


def check(path: Path) -> list[str]:
    """Complaints about one file, as `path:line: complaint`."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        parts = list(prose_of_code(text))
    elif path.suffix == ".md":
        parts = [(1, prose_of_page(text), False)]
    else:
        parts = [(n, line.partition("#")[2], False) for n, line in enumerate(text.splitlines(), 1) if "#" in line]
    found = [
        (first + line, complaint)
        for first, part, opening in parts
        for line, complaint in complaints(part, opening=opening)
    ]
    return [f"{path.relative_to(ROOT)}:{line}: {complaint}" for line, complaint in sorted(found)]


def main(words: list[str]) -> int:
    """Check the files given, or all. Exit status 1 if there is a complaint."""
    given = [Path(word).resolve() for word in words]
    files = [file for path in given for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    files = files or sorted({file for pattern in (*CODE, *PAGES, *SETTINGS) for file in ROOT.glob(pattern)})
    found = [line for file in files for line in check(file)]
    print("\n".join(found) or f"English: {len(files)} files read, nothing found.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
