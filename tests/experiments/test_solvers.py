"""Both solvers' evaluations, in miniature."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import solvers
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.run.run import build_trainer


def test_the_experiment_in_miniature(
    tiny_run: Callable[..., RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(tiny_run()))
    words = ["--config", str(file), "--noises", "2", "--steps", "2", "3"]
    solvers.main(words)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["solver"], row["num_steps"]) for row in rows] == [
        ("euler", 2),
        ("unipc", 2),
        ("euler", 3),
        ("unipc", 3),
    ]
    for euler, unipc in (rows[:2], rows[2:]):
        assert (euler["prompts"], euler["noises"]) == (4, 2)
        assert euler["gain"] == euler["stderr"] == 0
        found = unipc["reward"] - euler["reward"]
        assert unipc["gain"] == pytest.approx(found, abs=2e-4)
    asked = ["--evaluation.noises=2", "--evaluation.num_steps=3"]
    trainer = build_trainer(tiny_run(*asked, "--evaluation.solver=unipc"))
    reward = trainer.evaluate().reward
    assert rows[3]["reward"] == pytest.approx(sum(reward) / 4, abs=1e-4)
