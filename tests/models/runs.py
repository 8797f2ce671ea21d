"""Tiny runs that the tests of families share."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sage_fast.config.load import load_config
from sage_fast.run.run import Run
from tests.conftest import TINY_RUN
from tests.made_runs import numbers


def run_file(folder: Path, **sections: Any) -> str:
    """File of a run to `folder / "run"`, rewarded for brightness; sections: instead of
    those of `TINY_RUN`, or entries of theirs.
    """
    tree: dict[str, Any] = json.loads(json.dumps(TINY_RUN))
    tree |= {
        "output_dir": str(folder / "run"),
        "reward": {
            "rewards": ["tests.rewards.support:brightness"],
            "weights": {"brightness": 1.0},
        },
        "evaluation": {"every": 0},
    }
    for name, section in sections.items():
        tree[name] = tree[name] | section
    file = folder / "run.yaml"
    file.write_text(json.dumps(tree))
    return str(file)


def assert_resumes_to_the_bit(
    write: Callable[[Path], str], folder: Path, words: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Train two updates, and again with a stop between them: the same metrics, each
    update from a ratio of one, and the same adapters, which are returned.
    """
    names = ("whole", "parts")
    for name, ends in zip(names, ((2,), (1, 2)), strict=True):
        (folder / name).mkdir()
        file = write(folder / name)
        for end in ends:
            given = ["--resume=auto", "--evaluation.every=0"]
            given += [*words, f"--training.num_updates={end}"]
            Run(load_config(file, given)).train()
    whole, parts = (
        [row for row in numbers(folder / name / "run") if "grad_norm" in row]
        for name in names
    )
    assert whole == parts and len(whole) == 2
    for row in whole:
        assert row.get("ratio/first_max_deviation", 0.0) == 0.0 and row["grad_norm"] > 0
    first, second = (
        load_file(next((folder / name).glob("run/checkpoints/*2/lora/*.safetensors")))
        for name in names
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    return first
