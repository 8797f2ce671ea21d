"""The page and the notebook of the Python API do what they show, and so does an installed wheel."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import matplotlib.pyplot
import pytest

from sage_fast import Callback
from sage_fast.tools.api import TrainedRun, train

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how_to/python.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NOTEBOOK = json.loads((ROOT / "docs/tutorials/notebook.ipynb").read_text("utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_page_names_what_there_is() -> None:
    options = set(re.findall(r"^\| `(\w+)=`", PAGE, re.M))
    assert options == set(train.__kwdefaults__ or ())
    fields = {
        name
        for row in re.findall(r"^\| (`.*?`) \|", PAGE, re.M)
        for name in re.findall(r"`(\w+)(?:\(\w+, |\(output|`)", row)
    }
    public = {name for name in dir(TrainedRun) if not name.startswith("_")} | set(TrainedRun.__dataclass_fields__)
    assert public <= fields
    assert {name for name in vars(Callback) if name.startswith("on_")} <= set(re.findall(r"`(on_\w+)`", PAGE))


MYPY = """
[mypy]
strict = true
disallow_untyped_defs = false
follow_imports = silent
[mypy-torch.*,numpy.*,diffusers.*,transformers.*,peft.*,safetensors.*,triton.*]
follow_imports = skip
"""
"""The types of SAGE-Fast; reading those of torch takes minutes."""


@pytest.mark.slow
def test_the_page_is_typed_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings but for the size of a rollout and an evaluation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text("\n".join(BLOCKS))
    (tmp_path / "mypy.ini").write_text(MYPY)
    environment = os.environ | {"MYPYPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels"))}
    subprocess.run([sys.executable, "-m", "mypy", "page.py"], env=environment, check=True)
    small = '"evaluation.num_prompts": 6, "evaluation.noises": 2, "rollout.batch_size": 32}'
    assert BLOCKS[0].count('"evaluation.num_prompts": 6}') == 1
    exec(BLOCKS[0].replace('"evaluation.num_prompts": 6}', small), {"__name__": "documented"})
    assert (tmp_path / "runs/toy_cpu/generated/00-a-red-circle-moving-left.mp4").stat().st_size > 0
    exec(BLOCKS[1], {"__name__": "documented"})
    exec(BLOCKS[2], {"__name__": "documented"})


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings but for the numbers of updates and noises."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matplotlib.pyplot, "show", lambda: None)
    notebook = {"__name__": "notebook"}
    assert CELLS[0].count('"training.num_updates": 4') == 1
    for code in (CELLS[0].replace('num_updates": 4', 'num_updates": 2, "evaluation.noises": 2'), *CELLS[1:]):
        exec(code, notebook)
    assert (tmp_path / "runs/notebook/scores/evaluation.html").exists()


@pytest.mark.slow
def test_a_wheel_runs_from_an_empty_folder(tmp_path: Path) -> None:
    """The wheel is unpacked and put before everything else, so that nothing of the repository can be found."""
    source, wheels, unpacked, empty = (tmp_path / name for name in ("source", "wheels", "unpacked", "empty"))
    ignore = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    words = ["wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), "--quiet"]
    subprocess.run([*pip, *words], check=True)
    shutil.rmtree(source)
    (wheel,) = wheels.glob("sage_fast-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    shipped = [p.relative_to(ROOT / "configs") for p in (ROOT / "configs").rglob("*")]
    assert not [path for path in shipped if not (unpacked / "sage_fast/configs" / path).exists()]
    empty.mkdir()
    environment = os.environ | {"PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"}

    def call(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=empty, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    assert call("-m", "sage_fast", "configs", "show", "toy_cpu") == (ROOT / "configs/toy_cpu.yaml").read_text()
    small = [
        "--training.num_updates=1",
        "--rollout.batch_size=32",
        "--evaluation.num_prompts=4",
        "--evaluation.noises=2",
    ]
    commands = [
        ["train", "toy_cpu", *small],
        ["evaluate", "runs/toy_cpu", "--output_dir=scores", "--resamples=200"],
        ["generate", "runs/toy_cpu", "--prompt", "a red circle moving left", "--output_dir=videos"],
    ]
    code = (
        "import sage_fast, sage_kernels\nfrom sage_fast.commands.cli import main\n"
        f"assert not any(map(main, {commands}))\nprint(sage_fast.__file__, sage_kernels.__file__)\n"
    )
    assert call("-c", code).splitlines()[-1].count(str(unpacked)) == 2
    assert (empty / "videos/00-a-red-circle-moving-left.mp4").exists() and (empty / "scores/evaluation.html").exists()
