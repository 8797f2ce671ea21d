"""Faults of a run: each ends in one clear message and an intact output directory."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_fast.checkpoint import list_checkpoints
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError, RewardError, TrainingError
from sage_fast.config.schema import RunConfig
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Sample
from sage_fast.run.run import Run, build_trainer

MakeRun = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("nothing_drawn")


# ------------------------------------------------------------------------------------------ rewards


class FaultyReward:
    """Scores brightness; fails in a chosen way on the videos of some prompts."""

    def __init__(self, fault: str, word: str = "red") -> None:
        self.fault = fault
        self.word = word

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        bad = torch.tensor([self.word in p for p in prompts])
        if bad.any() and self.fault == "raise":
            raise ConnectionError("the scoring server is gone")
        return {"brightness": videos.float().mean((1, 2, 3, 4)).masked_fill(bad, float("nan"))}


def faulty(tiny_run: MakeRun, fault: str, on_failure: str) -> RunConfig:
    config = tiny_run(
        "--evaluation.every=0",
        "--evaluation.num_prompts=null",
        f"--reward.rewards=['{__name__}:FaultyReward']",
        f"--reward.options={{'{__name__}:FaultyReward': {{fault: {fault}}}}}",
        "--reward.weights={brightness: 1}",
        f"--reward.on_failure={on_failure}",
    )
    config.data.prompts = ["a red circle moving left", "a blue square moving up"]
    return config


@pytest.mark.parametrize(
    ("fault", "expected"), [("raise", "ConnectionError: the scoring server is gone"), ("nan", "brightness = nan")]
)
def test_a_failed_reward_stops_the_run_and_names_the_prompt(tiny_run: MakeRun, fault: str, expected: str) -> None:
    run = Run(faulty(tiny_run, fault, "stop"))
    before = {n: p.detach().clone() for n, p in run.trainer.parameters.items()}
    with pytest.raises(RewardError, match=r"'a red circle moving left'\), sample 0") as error:
        run.train()
    assert expected in str(error.value)
    assert all(torch.equal(before[n], p) for n, p in run.trainer.parameters.items())
    assert not list_checkpoints(run.checkpoints)


def test_a_dropped_group_takes_no_part_in_the_gradient(tiny_run: MakeRun, tmp_path: Path) -> None:
    """The gradient is that of a run on the other prompt alone."""
    both = build_trainer(faulty(tiny_run, "nan", "drop_group"))
    alone = tmp_path / "one.csv"
    alone.write_text("prompt,index\na blue square moving up,1\n")
    config = faulty(tiny_run, "nan", "stop")
    config.data.prompts = str(alone)
    config.rollout.batch_size = config.rollout.micro_batch_size = 2
    record = both.iterate()
    assert record["reward/dropped_groups"] == 1
    assert record["grad_norm"] == pytest.approx(build_trainer(config).iterate()["grad_norm"], rel=1e-4)


def test_every_group_dropped_is_an_error(tiny_run: MakeRun) -> None:
    config = faulty(tiny_run, "nan", "drop_group")
    config.reward.options[f"{__name__}:FaultyReward"]["word"] = "moving"
    with pytest.raises(TrainingError, match="failed in every group"):
        Run(config).train()


def test_scores_that_come_and_go_are_refused(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tiny_run("--rollout.micro_batch_size=2"))
    score, missing = trainer.reward.score, ["manifold_distance"]

    def fickle(videos: Tensor, samples: Sequence[Sample]) -> dict[str, Tensor]:
        left_out = missing.pop() if missing else None
        return {name: values for name, values in score(videos, samples).items() if name != left_out}

    monkeypatch.setattr(trainer.reward, "score", fickle)
    with pytest.raises(RewardError, match="every video needs the same"):
        trainer.iterate()


# ------------------------------------------------------------------------------------------ memory, checkpoints


def test_out_of_memory_says_what_to_lower_and_how_to_go_on(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nlong advice")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(GuidedPolicy, "velocity", exhausted)
    for words, advice in (
        (["train"], ["rollout.micro_batch_size", "--resume auto"]),
        (["generate", "--checkpoint=none", "--output=v"], ["evaluation.batch_size", "The same command goes on"]),
    ):
        assert main([*words, str(config_file)]) == 1
        errors = capsys.readouterr().err
        assert "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB." in errors
        assert all(part in errors for part in advice) and "Traceback" not in errors


def test_prompts_that_changed_since_the_checkpoint(tiny_run: MakeRun, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("a red circle moving left\na blue square moving up\n")
    given = (f"--evaluation.prompts={prompts}", "--evaluation.num_prompts=2")
    Run(tiny_run(*given)).train()
    prompts.write_text("a red circle moving left\na blue square moving down\n")
    with pytest.raises(ConfigError, match=r"evaluation\.prompts: a file has changed"):
        Run(tiny_run(*given, "--resume=auto"))
