"""Plant small defects in a copy of the tree, one at a time, and see that a test catches
each.

    python tests/mutants/run.py                   every mutant of mutants.yaml
    python tests/mutants/run.py sde.py clip-low   those of a file, or by name
    python tests/mutants/run.py --check           only that each text still stands in its file once

A test may be deleted when every mutant that it catches is still caught. Not part of
`make test`: about a minute for ten mutants. Exit status 1 if a mutant lives or no
longer applies.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 300

Mutant = tuple[str, str, str, str, list[str]]
"""Name, file, text, what replaces it, tests."""


def read_mutants(wanted: list[str]) -> list[Mutant]:
    """Mutants whose name or file is wanted; all without a wish."""
    table = yaml.safe_load((ROOT / "tests/mutants/mutants.yaml").read_text("utf-8"))
    return [
        (name, file, before, after, tests or entry["tests"])
        for file, entry in table.items()
        for name, (before, after, *tests) in entry["mutants"].items()
        if not wanted or any(word == name or file.endswith(word) for word in wanted)
    ]


def occurrences(before: str, text: str) -> list[re.Match[str]]:
    """Where a mutant's text stands in a file, however the formatter breaks its lines:
    spaces do not count, nor does a comma before a closing bracket.
    """
    parts = re.findall(r"\w+|\n|[^\w\s]", before)
    pattern = re.escape(parts[0]) if parts[0] != "\n" else r"\n"
    for part in parts[1:]:
        if part == "\n":
            pattern += r"[ ,]*\n"
        elif part in ")]}":
            pattern += r"\s*,?\s*" + re.escape(part)
        else:
            pattern += r"\s*" + re.escape(part)
    if before.startswith("    "):
        pattern = r"(?m:^) *" + pattern
    return list(re.finditer(pattern, text))


def first_failure(tree: Path, tests: list[str]) -> str | None:
    """The test that fails first in the tree; None if all pass.

    In a fork of this process, which has imported the large libraries: that saves most
    of a short test's time.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, sys.stdout.fileno())
        os.dup2(writing, sys.stderr.fileno())
        os.chdir(tree)
        sys.path[:0] = [str(tree), str(tree / "kernels")]
        os.environ["PYTHONPATH"] = f"{tree}:{tree / 'kernels'}"
        import pytest

        options = [
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-m",
            "not slow",
        ]
        os._exit(int(pytest.main([*options, f"--timeout={TIMEOUT_SECONDS}", *tests])))
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
        output = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return None
    if found := re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M):
        return found[1]
    return f"exit status {status}: " + " ".join(output.split()[-30:])


def main(words: list[str]) -> int:
    """Report every mutant; 0 if all are caught."""
    mutants = read_mutants([word for word in words if word != "--check"])
    stale = [
        f"{file} {name}"
        for name, file, before, *_ in mutants
        if len(occurrences(before, (ROOT / file).read_text("utf-8"))) != 1
    ]
    print(f"{len(mutants)} mutants, {len(stale)} do not apply", *stale, sep="\n  ")
    if "--check" in words or not mutants:
        return int(bool(stale) or not mutants)
    # as tests/conftest.py does, which comes after the imports here
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import diffusers  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        tracked = subprocess.run(
            ["git", "ls-files", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in filter(None, tracked.split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        sound: dict[tuple[str, ...], str | None] = {}
        for name, file, before, after, tests in mutants:
            text = (ROOT / file).read_text("utf-8")
            if tuple(tests) not in sound:
                sound[tuple(tests)] = first_failure(tree, tests)
            if failed := sound[tuple(tests)]:
                alive.append(f"{file} {name}: {failed} fails without it")
                continue
            found = occurrences(before, text)
            if len(found) != 1:
                continue
            mutated = text[: found[0].start()] + after + text[found[0].end() :]
            (tree / file).write_text(mutated, "utf-8")
            caught = first_failure(tree, tests)
            (tree / file).write_text(text, "utf-8")
            alive += [] if caught else [f"{file} {name}"]
            print(f"{file} {name}: {caught or 'LIVES'}", flush=True)
    print(
        f"{len(mutants) - len(alive) - len(stale)} caught, {len(alive)} live",
        *alive,
        sep="\n  ",
    )
    return int(bool(alive or stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
