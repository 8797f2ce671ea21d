"""The package imports light, knows its version, describes its environment and leads newcomers by make."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sage_fast
from sage_fast.run.provenance import describe_environment, git_commit, write_environment

ROOT = Path(__file__).resolve().parents[1]


def test_import_loads_nothing_heavy():
    heavy = {"torch", "diffusers", "transformers", "numpy", "matplotlib", "av", "triton"}
    code = f"import sys, sage_fast; print(sorted({heavy!r} & set(sys.modules)), sage_fast.__version__)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"[] {sage_fast.__version__}"


def test_the_version_is_written_once_and_cited():
    assert re.fullmatch(r"\d+\.\d+\.\d+", sage_fast.__version__)
    assert sage_fast.__version__ not in (ROOT / "setup.py").read_text("utf-8")
    assert f"## {sage_fast.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"version: {sage_fast.__version__}" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_every_folder_of_the_kernels_is_packaged():
    text = (ROOT / "setup.py").read_text("utf-8")
    mapped = dict(re.findall(r'^    "(sage_kernels[.\w]*)": "([\w/]+)",$', text, re.M))
    folders = sorted(path.parent for path in (ROOT / "kernels").rglob("__init__.py"))
    assert sorted(ROOT / folder for folder in mapped.values()) == folders
    assert all(package.replace(".", "/") == folder.removeprefix("kernels/") for package, folder in mapped.items())


def test_environment_file_is_complete_and_names_no_host(tmp_path):
    path = write_environment(tmp_path / "run")
    environment = json.loads(path.read_text("utf-8"))
    assert path.name == "environment.json"
    assert environment == describe_environment()
    assert {"torch", "diffusers", "numpy"} <= set(environment["packages"])
    assert environment.keys() == {"sage_fast", "commit", "python", "system", "packages", "cpu", "gpu"}
    assert environment["system"] == f"{platform.system()} {platform.machine()}"
    assert str(ROOT) not in path.read_text("utf-8")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_commit_of_a_clean_a_changed_and_no_checkout(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

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


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_needs_a_recent_python(tmp_path):
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "setup", "PYTHON=false"]
    own = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # not that of `make test`
    refused = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "Python 3.11 or newer" in refused.stdout
    assert not (tmp_path / ".venv").exists()
