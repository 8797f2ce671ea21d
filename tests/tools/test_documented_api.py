"""The page and the notebook of the Python API do what they show."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot
import pytest

from examples import demo_controls
from sage_fast import Callback, load_config
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.tools.api import TrainedRun, train

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how_to/python.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NOTEBOOK = json.loads((ROOT / "docs/tutorials/notebook.ipynb").read_text("utf-8"))
CELLS = [
    "".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"
]


def test_the_page_names_what_there_is() -> None:
    options = set(re.findall(r"^\| `(\w+)=`", PAGE, re.M))
    assert options == set(train.__kwdefaults__ or ())
    fields = {
        name
        for row in re.findall(r"^\| (`.*?`) \|", PAGE, re.M)
        for name in re.findall(r"`(\w+)(?:\(\w+, |\(output|`)", row)
    }
    public = {name for name in dir(TrainedRun) if not name.startswith("_")} | set(
        TrainedRun.__dataclass_fields__
    )
    assert public <= fields
    assert {name for name in vars(Callback) if name.startswith("on_")} <= set(
        re.findall(r"`(on_\w+)`", PAGE)
    )


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
def test_the_page_is_typed_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings but for the size of a rollout and an evaluation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text("\n".join(BLOCKS))
    (tmp_path / "mypy.ini").write_text(MYPY)
    environment = os.environ | {
        "MYPYPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels"))
    }
    subprocess.run(
        [sys.executable, "-m", "mypy", "page.py"], env=environment, check=True
    )
    small = '"evaluation.num_prompts": 6, "evaluation.noises": 1, '
    small += '"rollout.batch_size": 16, "rollout.micro_batch_size": 16}'
    assert BLOCKS[0].count('"evaluation.num_prompts": 6}') == 1
    exec(
        BLOCKS[0].replace('"evaluation.num_prompts": 6}', small),
        {"__name__": "documented"},
    )
    assert (
        tmp_path / "runs/toy_cpu/generated/00-a-red-circle-moving-left.mp4"
    ).stat().st_size > 0
    exec(BLOCKS[1], {"__name__": "documented"})
    exec(BLOCKS[2], {"__name__": "documented"})


@pytest.mark.slow
def test_the_block_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings but for the size of a rollout and the noises of an evaluation."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
    )
    assert code.count('"num_prompts": 6}') == 1
    rollout = '"rollout": {"batch_size": 16, "micro_batch_size": 16}'
    code = code.replace(
        '"num_prompts": 6}', '"num_prompts": 6, "noises": 1}, ' + rollout
    )
    exec(code, {"__name__": "documented"})
    assert (tmp_path / "exported/adapter_model.safetensors").exists() or list(
        (tmp_path / "exported").glob("*.safetensors")
    )


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_the_controls_of_the_demo(
    tiny_run: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a tiny model."""
    settings = {"evaluation.every": 20, "checkpoint.every": 20}
    file = tmp_path / "tiny.yaml"
    file.write_text(
        dump_config(
            tiny_run(
                "--training.num_updates=20", "--data.prompts=prompts/toy_train.csv"
            )
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        demo_controls,
        "load_config",
        lambda preset, keys: load_config(file, keys | settings),
    )
    monkeypatch.setattr(
        demo_controls,
        "train",
        lambda config, **options: train(
            file if config == "toy_cpu" else config, **options
        ),
    )
    demo_controls.main(["3"])
    printed = capsys.readouterr().out
    assert printed.index("trained by shuffled rewards") < printed.index(
        "not trained, guidance 2"
    )
    kept = json.loads(
        (tmp_path / "runs/shuffled-3/evaluation/update-000020.json").read_text("utf-8")
    )
    assert (
        kept["scores"].keys() >= {"shuffled", "VQ"}
        and not (tmp_path / "runs/guided-3/checkpoints").exists()
    )


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings but for the numbers of updates, noises and videos of a rollout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matplotlib.pyplot, "show", lambda: None)
    notebook = {"__name__": "notebook"}
    first = CELLS[0]
    small = {'num_updates": 4': 'num_updates": 2, "evaluation.noises": 1'}
    small |= {
        '"rollout.batch_size": 32': '"rollout.batch_size": 16, "rollout.micro_batch_size": 16'
    }
    for words, others in small.items():
        assert first.count(words) == 1
        first = first.replace(words, others)
    for code in (first, *CELLS[1:]):
        exec(code, notebook)
    assert (tmp_path / "runs/notebook/scores/evaluation.html").exists()
