"""MkDocs hook: pages made from the source, and links to files of the repository.

The documents link to files as they lie in the repository, for readers of a checkout.
The site has a page for each of these files, so it needs neither the repository nor a
network.
"""

import json
import posixpath
import re
import sys
import textwrap
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from docs.tools import reference  # noqa: E402  (the site is made of this checkout, whatever is installed)

DOCUMENTS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "kernels/README.md": "kernels.md",
}
"""Documents outside docs/, and their pages."""

NOTEBOOKS = {"docs/tutorials/notebook.ipynb": "tutorials/notebook.md"}
"""Notebooks, and the pages that show them with their outputs."""

LINK = re.compile(
    r"(?:(?<=\]\()|(?<=<img src=\"))(?!https?:|mailto:|data:|#)([^)\"#\s]+)"
)
"""Target of a link or picture, without its anchor."""

LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".json": "json",
    ".sh": "bash",
    ".sbatch": "bash",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents outside docs/, the reference pages, and every other file that
    a document links to.
    """
    pages = {page: (ROOT / path).read_text("utf-8") for path, page in DOCUMENTS.items()}
    pages |= {
        "reference/commands.md": reference.commands(),
        "reference/configuration.md": reference.configuration(),
    }
    pages |= {page: _notebook_page(ROOT / path) for path, page in NOTEBOOKS.items()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for target in sorted(
        {path for page, text in texts.items() for path in _outside(page, text)}
    ):
        file = ROOT / target
        if file.suffix == ".png":
            files.append(File.generated(config, _place(target), abs_src_path=str(file)))
        elif file.exists():
            files.append(
                File.generated(config, _place(target), content=_source_page(file))
            )
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Points links at the pages of the site."""
    here = page.file.src_uri

    def relative(match: re.Match[str]) -> str:
        return posixpath.relpath(
            _place(_target(here, match[1])), posixpath.dirname(here) or "."
        )

    return LINK.sub(relative, markdown)


def _path_of(page: str) -> str:
    """The file of the repository that a page was made of."""
    return next(
        (path for path, made in DOCUMENTS.items() if made == page), f"docs/{page}"
    )


def _target(page: str, link: str) -> str:
    """The file of the repository that a link on a page points at."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_path_of(page)), link))


def _place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if place := (DOCUMENTS | NOTEBOOKS).get(path):
        return place
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".png") else f"source/{path}.md"


def _outside(page: str, text: str) -> set[str]:
    """Files of the repository that a page links to and that are not documents."""
    found = {_target(page, link) for link in LINK.findall(text)}
    return {
        path for path in found if path not in DOCUMENTS and not path.startswith("docs/")
    }


def _notebook_page(path: Path) -> str:
    """A notebook as Markdown: its texts, its code, and the texts and pictures that the
    code has printed.
    """
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(
            source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        )
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if picture := data.get("image/png"):
                parts.append(
                    f"![Output](data:image/png;base64,{''.join(picture).strip()})"
                )
            elif text := output.get("text") or data.get("text/plain"):
                lines = (
                    textwrap.fill(line, 110)
                    for line in "".join(text).rstrip().splitlines()
                )
                parts.append("```text\n{}\n```".format("\n".join(lines)))
    return "\n\n".join(parts) + "\n"


def _source_page(path: Path) -> str:
    """A file or folder of the repository as a page, which the search leaves out."""
    return "---\nsearch: {exclude: true}\n---\n" + _listing(path)


def _listing(path: Path) -> str:
    name = path.relative_to(ROOT)
    if path.is_dir():
        listed = sorted(
            str(file.relative_to(path))
            for file in path.rglob("*")
            if "__pycache__" not in file.parts
        )
        return f"# {name}/\n\n" + "".join(f"* `{entry}`\n" for entry in listed)
    return (
        "# "
        f"{name}\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text('utf-8')}`````\n"
    )
