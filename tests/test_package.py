"""The package imports light, knows its version, describes its environment and leads
newcomers by make.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import sage_fast
import sage_kernels
from sage_fast.run.provenance import describe_environment, git_commit, write_environment

ROOT = Path(__file__).resolve().parents[1]


def test_import_loads_nothing_heavy():
    heavy = {
        "torch",
        "diffusers",
        "transformers",
        "numpy",
        "matplotlib",
        "av",
        "triton",
    }
    code = (
        f"import sys, sage_fast; print(sorted({heavy!r} & set(sys.modules)), "
        "sage_fast.__version__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == f"[] {sage_fast.__version__}"


def test_the_version_is_written_once_and_cited():
    assert re.fullmatch(r"\d+\.\d+\.\d+", sage_fast.__version__)
    assert sage_fast.__version__ not in (ROOT / "setup.py").read_text("utf-8")
    assert f"## {sage_fast.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"version: {sage_fast.__version__}" in (ROOT / "CITATION.cff").read_text(
        "utf-8"
    )
    assert sage_kernels.__version__ == sage_fast.__version__


def test_every_folder_of_the_kernels_is_packaged():
    text = (ROOT / "setup.py").read_text("utf-8")
    mapped = dict(re.findall(r'^    "(sage_kernels[.\w]*)": "([\w/]+)",$', text, re.M))
    folders = sorted(path.parent for path in (ROOT / "kernels").rglob("__init__.py"))
    assert sorted(ROOT / folder for folder in mapped.values()) == folders
    assert all(
        package.replace(".", "/") == folder.removeprefix("kernels/")
        for package, folder in mapped.items()
    )
    alone = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text("utf-8"))
    assert alone["tool"]["setuptools"]["packages"] == [*mapped]
    assert all(requirement in text for requirement in alone["project"]["dependencies"])


def ranges() -> dict[str, SpecifierSet]:
    """The releases of every package that setup.py admits."""
    found = re.findall(
        r"""^ *["']([\w.-]+)(?:\[\w+\])?([<>=!][^;"']*)""",
        (ROOT / "setup.py").read_text("utf-8"),
        re.M,
    )
    return {name.lower(): SpecifierSet(text) for name, text in found}


def test_the_ranges_admit_what_the_tests_run_with_and_nothing_that_is_known_not_to_run():
    admitted = ranges()
    pinned = dict(
        re.findall(
            r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M
        )
    )
    named = pinned.keys() & admitted.keys()
    assert {"torch", "diffusers", "transformers", "peft", "ftfy", "pillow"} <= named
    assert all(admitted[name].contains(pinned[name]) for name in named)
    # Wan's text encoder as it is published lacks its word embeddings there.
    assert not [
        release
        for release in ("5.0.0", "5.1.0", "5.2.0")
        if release in admitted["transformers"]
    ]


def test_the_lowest_releases_are_made_from_the_ranges(make):
    written = make("test-lowest", "--dry-run").stdout
    (command,) = [line for line in written.splitlines() if line.startswith("sed ")]
    shown = subprocess.run(
        ["bash", "-c", command.partition(">.venv")[0]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    lowest = dict(line.split("==") for line in shown)
    assert (
        lowest["transformers"] == "5.3"
        and lowest["diffusers"] == "0.38"
        and "jinja2" in lowest
    )
    assert not {"torch", "triton"} & lowest.keys() and all(
        ranges()[name.lower()].contains(lowest[name]) for name in lowest
    )


def dockerfile() -> dict[str, list[str]]:
    """Words of the Dockerfile by instruction; `copied` are the sources of its COPY."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", "")
    found: dict[str, list[str]] = {"copied": []}
    for line in text.splitlines():
        instruction, *words = line.split() or "#"
        if instruction == "COPY":
            found["copied"] += words[:-1]
        found.setdefault(instruction, []).extend(words)
    return found


def test_the_container_has_an_admitted_python_and_starts_the_program() -> None:
    found = dockerfile()
    assert found["FROM"] == ["python:3.12-slim"]
    assert '["sage-fast"]' in found["ENTRYPOINT"]
    text = (ROOT / "setup.py").read_text("utf-8")
    assert '"sage-fast = sage_fast.commands.cli:main"' in text
    (admitted,) = re.findall(r'python_requires="([^"]+)"', text)
    assert SpecifierSet(admitted).contains("3.12")
    assert not [name for name in found["copied"] if not (ROOT / name).exists()]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute of one core
def test_kernels_and_trainer_install_alone_and_side_by_side_and_run_from_an_empty_folder(
    tmp_path,
):
    """Both wheels hold sage_kernels: either serves it, the later one wins, and pip
    removes it with either.
    """
    tree = tmp_path / "tree"
    venv = tmp_path / "venv"
    away = tmp_path / "away"
    tree.mkdir()
    away.mkdir()
    # what the container is built from
    for name in dockerfile()["copied"]:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(
            ROOT / name, tree / name
        )

    def run(*words: object, ok: bool = True, **more: str) -> str:
        environment = {
            key: value for key, value in os.environ.items() if key != "PYTHONPATH"
        } | more
        done = subprocess.run(
            [*map(str, words)],
            cwd=away,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(
        *pip,
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        tmp_path,
        tree,
        tree / "kernels",
    )
    kernels, trainer = (
        next(tmp_path.glob(f"sage_{name}-*.whl")) for name in ("kernels", "fast")
    )
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin/python"
    site = next(venv.glob("lib/python*/site-packages"))
    # What the packages require is borrowed from the environment of the tests.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    into = [*pip, "--python", python]
    install = [*into, "install", "--no-deps", "--no-index"]

    where = (
        f"import sage_kernels; assert sage_kernels.__file__.startswith({str(site)!r}); "
    )
    parity = [python, "-m", "sage_kernels.parity", "--op", "gelu_tanh"]
    run(*install, kernels)
    run(
        python,
        "-c",
        where
        + (
            "import sys; assert not any(name.startswith('sage_fast') for name in "
            "sys.modules)"
        ),
    )
    assert re.search(
        r"gelu_tanh +(\d+) of \1 tensors", run(*parity, TRITON_INTERPRET="1")
    )
    (away / "typed.py").write_text(
        "from sage_kernels import adaln\nreveal_type(adaln)\n"
    )
    (away / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,triton.*]\nfollow_imports = "
        "skip\nignore_missing_imports = True\n"
    )
    seen = run(sys.executable, "-m", "mypy", "--python-executable", python, "typed.py")
    assert re.search(r"\(x: Any, .*eps: (builtins\.)?float", seen), seen

    run(*install, trainer)
    shipped = [
        path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*")
    ]
    assert not [
        path for path in shipped if not (site / "sage_fast/configs" / path).exists()
    ]
    shutil.rmtree(tree)
    shown = run(venv / "bin/sage-fast", "configs", "show", "toy_cpu")
    assert shown == (ROOT / "configs/toy_cpu.yaml").read_text("utf-8")
    small = [
        "training.num_updates=1",
        "rollout.batch_size=32",
        "evaluation.num_prompts=4",
        "evaluation.noises=2",
    ]
    commands = [
        ["train", "toy_cpu", *small],
        ["evaluate", "runs/toy_cpu", "--output_dir=scores", "--resamples=200"],
        [
            "generate",
            "runs/toy_cpu",
            "--prompt",
            "a red circle moving left",
            "--output_dir=videos",
        ],
    ]
    used = f"import sage_fast; assert sage_fast.__file__.startswith({str(site)!r})\n"
    run(
        python,
        "-c",
        (
            f"{where}{used}from sage_fast.commands.cli import main\nassert not "
            f"any(map(main, {commands}))"
        ),
    )
    assert (away / "videos/00-a-red-circle-moving-left.mp4").exists() and (
        away / "scores/evaluation.html"
    ).exists()
    run(*into, "uninstall", "-y", "sage-kernels")
    assert "No module named 'sage_kernels'" in run(
        python, "-c", "import sage_kernels", ok=False
    )
    run(*install, "--force-reinstall", trainer)
    run(python, "-c", where)


def test_environment_file_is_complete_and_names_no_host(tmp_path):
    path = write_environment(tmp_path / "run")
    environment = json.loads(path.read_text("utf-8"))
    assert path.name == "environment.json"
    assert environment == describe_environment()
    assert {"torch", "diffusers", "numpy"} <= set(environment["packages"])
    assert environment.keys() == {
        "sage_fast",
        "commit",
        "python",
        "system",
        "packages",
        "cpu",
        "gpu",
    }
    assert environment["system"] == f"{platform.system()} {platform.machine()}"
    assert str(ROOT) not in path.read_text("utf-8")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_commit_of_a_clean_a_changed_and_no_checkout(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        command = [
            "git",
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "commit.gpgsign=false",
            *arguments,
        ]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert git_commit(tmp_path) is None
    git("init", "-q")
    assert git_commit(tmp_path) is None
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "--no-verify", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"
    # A package installed below somebody's checkout is not part of it.
    monkeypatch.setenv("SAGE_FAST_COMMIT", "0123456789")
    assert git_commit(tmp_path / "below") == "0123456789"


@pytest.fixture
def make(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    # not that of `make test`
    own = {
        key: value for key, value in os.environ.items() if not key.startswith("MAKE")
    }

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", *words],
            cwd=tmp_path,
            env=own | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_make_needs_a_recent_python(make, tmp_path):
    refused = make("setup", "PYTHON=false")
    assert refused.returncode != 0
    assert "Python 3.11 or newer" in refused.stdout
    assert not (tmp_path / ".venv").exists()


def test_make_needs_no_python_beside_its_environment(make, tmp_path):
    """A ready one has its own, and no other environment is touched."""
    caches = [
        tmp_path / folder / "__pycache__"
        for folder in (".venv/lib", ".venv-newest", "env", "sage_fast")
    ]
    for folder in (tmp_path / ".venv/bin", *caches):
        folder.mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".venv/.ready").touch()
    jobs = (3 * (os.cpu_count() or 1) + 1) // 2
    assert (
        f"-m pytest -n {jobs} " in make("test", "--dry-run", PYTHON="python3.99").stdout
    )
    refused = make("test", "--dry-run", "PYTHON=python3.99").stderr
    assert "PYTHON=python3.99 does not run." in refused and "Delete" not in refused
    assert make("clean", "VENV=env").returncode == 0
    assert [folder.exists() for folder in caches] == [True, True, True, False]
