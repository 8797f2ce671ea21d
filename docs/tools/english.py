"""Check of the English in docstrings, comments and documents.

    python -m docs.tools.english [FILE ...]

A docstring opens with a verb or a noun. Some phrases are never used, because a reader
has to unwind them; each has its replacement below. Messages and help texts are read
too; code, quoted names and fenced blocks are not. A sentence of the README has at most
30 words, a line of a page's code block fits a window of 1280 pixels, and all pages
together have at most 27,000 words.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
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
SETTINGS = (
    "configs/**/*.yaml",
    "sage_fast/**/*.yaml",
    "benchmarks/*.yaml",
    "mkdocs.yml",
    "Makefile",
)

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
    r"\bas [\w'. -]{1,40} (?:has|have) it\b": "name the thing: `diffusers weights`, `as in X`",
    r"\bwhich (?:is|are) what\b": "the verb alone",
    r"\bNone is (?!allowed\b)": "`None means`",
    r"\btakes? the place of\b": "`replaces`",
    r"\bin place of\b": "`instead of`",
    r"\bwould not do\b": "name the lack: `is not enough`, `does not work`",
    r"(?<!\bone[ \n])\b(?:forward|pass|prompt|GPU) (?:more|less)(?=[.,;:)]|$| (?:and|or|from|where|when|if)\b)": (
        "`one more X`, `one X less`"
    ),
    r"\bfor the (?:greater|most|whole) part\b": "`mostly`",
    r"\b(?:stands?|lies?) behind (?:it|this|that|the page)\b": "name the evidence",
    r"\bhears? of\b": "`sees`, `is given`",
    r"\b(?:is|are) taken to\b": "`is assumed to`",
    r"\bgoe?s? around the\b": "name the effect: `is not called`",
    r"(?:^|[.:;] )(?:None|Others|These) (?:has|have|says?|shows?|belongs?)\b": "name the subject",
    r"(?:^|[.;:] )What (?:is|are|was|were|ha[sd]|have|does|do|can|needs?|no|an?)\b(?![^.?]*\?)": "name the subject",
}
"""Pattern -> what to write."""


MAX_WORDS = 30
"""In a sentence of the README."""
MAX_TOTAL = 27_000
"""Of all pages together, without blocks of code and tables that `python -m benchmarks
report` writes.
"""
MAX_COLUMNS = 100
"""Of a line in a page's code block."""


def prose_of_code(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring, of every docstring, comment,
    message and help text.
    """
    for node in ast.walk(ast.parse(source)):
        yield from ((part.lineno, words(part), False) for part in messages(node))
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def messages(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the texts that a statement raises or logs, and the help that it gives an
    option.
    """
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from node.exc.args
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in (
            "warning",
            "info",
            "error",
        ):
            yield from node.args[:1]
        yield from (
            keyword.value
            for keyword in node.keywords
            if keyword.arg in ("help", "description", "epilog")
        )


def words(text: ast.expr) -> str:
    """Text of a literal, with an x for each value in it; empty for anything else."""
    if isinstance(text, ast.JoinedStr):
        return "".join(words(part) or "x" for part in text.values)
    return (
        text.value
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        else ""
    )


def long_sentences(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of each sentence of a page with too many words. A cell
    of a table is a sentence.
    """
    text = re.sub(r"<!--.*?-->|<img[^>]*>", "", prose_of_page(page))
    text = re.sub(r"`[^`\n]*`", "x", re.sub(r"\]\([^)\n]*\)", "", text))
    for match in re.finditer(
        r"(?:[^.?!|\n]|(?<=\w)[.?!](?=\w)|\n(?!\n|[#*|>]|\d\.))+", text
    ):
        found = re.findall(r"\S*\w\S*", match[0])
        if len(found) > MAX_WORDS:
            line = 1 + text.count("\n", 0, match.end() - len(match[0].lstrip()))
            yield (
                line,
                (
                    f"{len(found)} words in `{' '.join(found[:4])} ...`: at most "
                    f"{MAX_WORDS}"
                ),
            )


def wide_lines(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of each line of a code block that a window would cut
    off. Diagrams do not count.
    """
    blocks = re.sub(
        r"^```mermaid.*?^```",
        lambda match: "\n" * match[0].count("\n"),
        page,
        flags=re.DOTALL | re.MULTILINE,
    )
    fenced = False
    for number, line in enumerate(blocks.splitlines(), 1):
        fenced ^= line.startswith("```")
        if len(line) > MAX_COLUMNS and (fenced or line.startswith("    ")):
            yield (
                number,
                f"{len(line)} characters in a code block: at most {MAX_COLUMNS}",
            )


def prose_of_page(text: str) -> str:
    """Blank everything of a page but its prose, line by line."""
    text = re.sub(
        r"^```.*?^```",
        lambda match: re.sub(r"[^\n]", "", match[0]),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def complaints(text: str, *, opening: bool = False) -> Iterator[tuple[int, str]]:
    """Yield line of the text and complaint. Names in backticks and quoted words are not
    read.
    """
    text = re.sub(r"`[^`\n]*`|\"[^\"\n]*\"", lambda match: "x" * len(match[0]), text)
    if opening and (found := OPENING.match(text)):
        yield 0, f"a docstring opens with a verb or a noun, not with {found[1]!r}"
    for pattern, better in PHRASES.items():
        for match in re.finditer(
            re.sub(r"(?<!\[) ", r"\\s+", pattern), text, re.MULTILINE
        ):
            yield (
                text.count("\n", 0, match.start()),
                f"{' '.join(match[0].split())!r}: {better}",
            )


def check(path: Path) -> list[str]:
    """Complaints about one file, as `path:line: complaint`."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        parts = list(prose_of_code(text))
    elif path.suffix == ".md":
        parts = [(1, prose_of_page(text), False)]
    else:
        parts = [
            (n, line.partition("#")[2], False)
            for n, line in enumerate(text.splitlines(), 1)
            if "#" in line
        ]
    found = [
        (first + line, complaint)
        for first, part, opening in parts
        for line, complaint in complaints(part, opening=opening)
    ]
    if path.suffix == ".md":
        found += wide_lines(text)
    if path == ROOT / "README.md":
        found += long_sentences(text)
    return [
        f"{path.relative_to(ROOT)}:{line}: {complaint}"
        for line, complaint in sorted(found)
    ]


def pages() -> list[Path]:
    """The documents of the site."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Check the files given, or all. Exit status 1 if there is a complaint."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.tools.english", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="files and folders to read; all without one",
    )
    named = parser.parse_args(words).files
    given = [Path(name).resolve() for name in named]
    files = [
        file
        for path in given
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]
    files = files or sorted(
        {file for pattern in (*CODE, *PAGES, *SETTINGS) for file in ROOT.glob(pattern)}
    )
    found = [line for file in files for line in check(file)]
    if not named:
        texts = [page.read_text("utf-8") for page in pages()]
        written = [
            re.sub(r"<!-- benchmark .*?: begin.*?: end -->", "", text, flags=re.DOTALL)
            for text in texts
        ]
        total = sum(
            len(re.findall(r"\S*\w\S*", prose_of_page(page))) for page in written
        )
        found += [f"The pages have {total} words: at most {MAX_TOTAL}."] * (
            total > MAX_TOTAL
        )
    print("\n".join(found) or f"English: {len(files)} files read, nothing found.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
