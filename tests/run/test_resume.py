"""Where a run begins, what it keeps, and that a reason to stop which comes back can be
dealt with.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sage_fast.checkpoint.folder import list_checkpoints, read_best
from sage_fast.config.errors import CheckpointError, ConfigError, RewardError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.rewards.toy import ToyReward
from sage_fast.run.directory import RunDirectory, read_metrics
from sage_fast.run.resume import abandon_after, keep_videos
from sage_fast.run.run import Run
from sage_fast.run.run_status import Callback, StopRun
from tests.made_runs import numbers

MakeRun = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("nothing_drawn")
QUIET = "--evaluation.every=0"


def contents(run: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()
    }


@pytest.fixture
def own_copy(finished_run: Path, tmp_path: Path) -> Path:
    """The finished run, in the directory that `tiny_run` names."""
    return shutil.copytree(finished_run, tmp_path / "run")


def killed(run: Run) -> None:
    """Train, and die in the first update."""
    run.trainer.iterate = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.train()


# --------------------------------------------------------------------------------------
# what may change


def test_a_change_that_is_allowed_takes_effect_and_goes_on_record(
    tiny_run: MakeRun, own_copy: Path
) -> None:
    key = "optimizer.learning_rate"
    words = (QUIET, "--training.num_updates=3", "--resume=auto", f"--{key}=5e-4")
    with pytest.raises(
        ConfigError,
        match=r"learning_rate: 0.001 in .*--allow-changes optimizer\.learning_rate\.",
    ):
        Run(tiny_run(*words))
    Run(tiny_run(*words), allow_changes=[key]).train()
    last, said, row = read_metrics(own_copy / "metrics.jsonl")[-3:]
    assert (last["update"], said["update"], row["update"]) == (2, 2, 3)
    assert said["config/changes"] == f"{key} 0.001 -> 0.0005"
    assert (last["learning_rate"], row["learning_rate"]) == (1e-3, 5e-4)
    # From here on it is the run's own value.
    assert Run(tiny_run(*words)).checkpoint is not None


def test_an_average_and_an_anchor_may_come_later(tiny_run: MakeRun) -> None:
    """The average begins with the weights of the checkpoint; a fixed anchor is the
    model that the run started from.
    """
    words = (QUIET, "--optimizer.learning_rate=0.05")
    first = Run(tiny_run(*words, "--objective.kl_mode=none"))
    start = {name: p.detach().clone() for name, p in first.trainer.parameters.items()}
    first.train()
    before = first.trainer.parameters
    new = (
        "--training.ema_decay=0.5",
        "--objective.kl_mode=fixed",
        "--training.num_updates=3",
        "--resume=auto",
    )
    second = Run(
        tiny_run(*words, *new), allow_changes=["training.ema_decay,objective.kl_mode"]
    )
    second.train()
    assert (
        second.trainer.ema is not None and second.trainer.objective.anchor is not None
    )
    for name, weight in second.trainer.parameters.items():
        assert torch.equal(second.trainer.objective.anchor.values[name], start[name])
        # after so few updates the decay is 3 / 12
        average = before[name].lerp(weight, 0.75)
        torch.testing.assert_close(second.trainer.ema.values[name], average.detach())
    assert any(not torch.equal(before[name], start[name]) for name in start)


def test_updates_per_rollout_divide_what_is_left(
    tiny_run: MakeRun, finished_run: Path
) -> None:
    key = "training.updates_per_rollout"
    words = ("--training.num_updates=4", f"--{key}=2")
    odd, even = (
        tiny_run(*words, f"--resume={finished_run}/checkpoints/update-00000{update}")
        for update in (1, 2)
    )
    assert Run(even, allow_changes=[key]).checkpoint is not None
    with pytest.raises(
        ConfigError,
        match="updates_per_rollout is 2, but .* has 1 updates, not a multiple",
    ):
        Run(odd, allow_changes=[key])


# --------------------------------------------------------------------------------------
# a run's history is kept


@pytest.mark.parametrize("sign", ["finished", "evaluated", "resumed", None])
def test_a_short_run_whose_checkpoints_are_gone_is_not_started_over(
    tiny_run: MakeRun, own_copy: Path, sign: str | None
) -> None:
    """It ends before its second checkpoint would be due, and has left one sign that
    there was a first.
    """
    run = own_copy
    shutil.rmtree(run / "checkpoints")
    if sign != "finished":
        (run / "status.json").unlink()
    if sign != "evaluated":
        text = (run / "metrics.jsonl").read_text()
        first, rest = text.split("\n", 1)
        (run / "metrics.jsonl").write_text(first + "\n" + rest.replace("eval/", "was/"))
    if sign == "resumed":
        (run / "environment-update-000001.json").touch()
    words = ("--checkpoint.every=9", "--resume=auto")
    if sign is None:
        assert Run(tiny_run(*words)).checkpoint is None
    else:
        with pytest.raises(
            CheckpointError, match=r"reached update 2, but its checkpoints are gone"
        ):
            Run(tiny_run(*words))


@pytest.mark.parametrize("how", ["damaged", "deleted"])
def test_a_run_without_a_usable_checkpoint_is_not_started_over(
    tiny_run: MakeRun, own_copy: Path, how: str
) -> None:
    for checkpoint in list_checkpoints(own_copy / "checkpoints"):
        if how == "deleted":
            shutil.rmtree(checkpoint)
        else:
            (shard,) = (checkpoint / "shards").glob("*.distcp")
            os.truncate(shard, 100)
    before = contents(own_copy)
    with pytest.raises(
        CheckpointError, match=r"reached update 2, but .*--resume restart"
    ):
        Run(tiny_run("--resume=auto"))
    assert contents(own_copy) == before
    aside = own_copy / "previous-1"
    if how == "deleted":  # of an earlier restart
        aside.mkdir()
        aside = own_copy / "previous-2"
    assert Run(tiny_run("--resume=restart")).train().finished
    assert numbers(own_copy) == numbers(aside)
    moved = contents(aside)
    assert {name: before[name] for name in moved} == moved
    assert {
        "metrics.jsonl",
        "config.yaml",
        "environment.json",
        "evaluation/update-000002.json",
    } <= moved.keys()
    assert any(name.startswith("checkpoints/update") for name in moved) == (
        how == "damaged"
    )
    assert any(name.startswith("samples/") for name in moved)
    assert "resume: auto" in (own_copy / "config.yaml").read_text()


# --------------------------------------------------------------------------------------
# metrics and evaluations


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("evaluation/update-000000.json", cut),
        ("evaluation/update-000002.json", Path.unlink),
        ("samples/update-000000.png", cut),
        ("metrics.jsonl", cut),
        ("metrics.jsonl", Path.unlink),
    ],
    ids=[
        "baseline-cut",
        "scores-deleted",
        "frames-cut",
        "metrics-cut",
        "metrics-deleted",
    ],
)
def test_what_happens_to_a_file_beside_the_checkpoints_changes_no_result(
    tiny_run: MakeRun,
    finished_run: Path,
    own_copy: Path,
    name: str,
    harm: Callable[[Path], None],
) -> None:
    run = own_copy
    harm(run / name)
    result = Run(tiny_run("--resume=auto")).train()
    assert result.test is not None and result.test.count == 4
    expected = json.loads((finished_run / "evaluation/result.json").read_text())
    assert (
        json.loads((run / "evaluation/result.json").read_text()) == expected
        and expected["before"] == 0
    )
    for update in (0, 2):
        file = f"evaluation/update-{update:06d}.json"
        assert (run / file).read_text() == (finished_run / file).read_text()
    assert numbers(run)[-1] == numbers(finished_run)[-1]


# --------------------------------------------------------------------------------------
# reasons that come back


@pytest.fixture
def fails_on(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Prompts that the reward fails on: empty, to be filled by the test."""
    bad: set[str] = set()
    score = ToyReward.score

    def picky(self: ToyReward, videos: torch.Tensor, prompts: list[str]) -> Any:
        if bad & set(prompts):
            raise ValueError("no eyes for this")
        return score(self, videos, prompts)

    monkeypatch.setattr(ToyReward, "score", picky)
    return bad


def test_an_evaluation_that_fails_again_leaves_the_prompt_out_and_says_so(
    tiny_run: MakeRun,
    fails_on: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The evaluation after update 2 fails on one of four prompts that the run is not
    trained on.
    """
    words = (
        "--evaluation.prompts=configs/prompts/toy_eval.csv",
        "--training.num_updates=4",
    )
    run = Run(tiny_run(*words))
    iterate = run.trainer.iterate

    def then_fail() -> dict[str, float]:
        fails_on.add(run.trainer.eval_prompts[1].text)
        return iterate()

    monkeypatch.setattr(run.trainer, "iterate", then_fail)
    with pytest.raises(
        RewardError,
        match=r"no eyes.*evaluation at update 2: --reward.on_failure=drop_group",
    ):
        run.train()
    assert [row["update"] for row in numbers(run.directory)] == [0, 1, 2]
    result = Run(
        tiny_run(*words, "--resume=auto", "--reward.on_failure=drop_group")
    ).train()
    assert result.finished and result.test is not None and result.test.count == 3
    assert (
        "Paired evaluation: 3 prompts of 4 (the others could not be scored)"
        in capsys.readouterr().out
    )
    rows = {row["update"]: row for row in numbers(run.directory)}
    assert (
        list(rows) == [0, 1, 2, 3, 4]
        and rows[2]["eval/pairs"] == rows[4]["eval/pairs"] == 3
    )
    after = run.evaluation.load(4)
    assert after is not None and after.left_out == [1] and len(after.reward) == 3


def test_an_evaluation_that_left_out_every_prompt_does_not_advise_to_leave_them_out(
    tiny_run: MakeRun, fails_on: set[str]
) -> None:
    run = Run(tiny_run("--reward.on_failure=drop_group"))
    fails_on |= {prompt.text for prompt in run.trainer.eval_prompts}
    with pytest.raises(RewardError, match="evaluation at update 0: --evaluation.every"):
        run.train()


def test_a_launcher_does_not_repeat_what_would_fail_again(
    tiny_run: MakeRun, fails_on: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of the run's own; not a collective that failed, and not a start by
    hand.
    """
    run = Run(tiny_run(QUIET))
    fails_on.add(run.trainer.schedule.take(2, 1)[0].text)
    with pytest.raises(RewardError, match="no eyes"):
        run.train()
    for launcher in ("TORCHELASTIC", "SLURM"):
        with (
            monkeypatch.context() as patch,
            pytest.raises(
                ConfigError, match="after update 1 by its own error.*no eyes"
            ),
        ):
            patch.setenv(f"{launcher}_RESTART_COUNT", "1")
            patch.setattr("sage_fast.run.run.build_trainer", None)  # nothing is loaded
            Run(tiny_run(QUIET, "--resume=auto"))
    again = Run(tiny_run(QUIET, "--resume=auto"))
    again.trainer.iterate = Mock(side_effect=RuntimeError("Connection closed by peer"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="closed by peer"):
        again.train()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert Run(tiny_run(QUIET, "--resume=auto")).checkpoint is not None


# --------------------------------------------------------------------------------------
# from another run's adapter


def test_a_run_starts_from_the_adapter_of_another(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    words = (QUIET, "--optimizer.learning_rate=0.05")
    first = Run(tiny_run(*words))
    first.train()
    trained = {name: p.detach().clone() for name, p in first.trainer.parameters.items()}
    lora = list_checkpoints(first.checkpoints)[-1] / "lora"
    given = (
        f"--output_dir={tmp_path / 'second'}",
        f"--model.adapter={lora}",
        "--objective.kl_mode=fixed",
    )
    for word, message in (
        ("--lora.rank=4", "does not fit .*Set lora.rank"),
        ("--training.mode=full", "no other mode"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.adapter.*{message}"):
            Run(tiny_run(*given, word))
    second = Run(tiny_run(*given))
    assert all(
        torch.equal(p, trained[name]) for name, p in second.trainer.parameters.items()
    )
    assert second.trainer.objective.anchor is not None
    for name, value in second.trainer.objective.anchor.tensors().items():
        assert torch.equal(value, trained[name])
    after = first.trainer.evaluate()
    assert second.train().test is not None
    # "Before" is the model that this run starts from: the adapter's.
    assert second.evaluation.baseline == after


def test_a_run_keeps_its_videos_on_other_ranks(tiny_run: MakeRun) -> None:
    config = tiny_run("--rollout.micro_batch_size=1")
    assert [
        keep_videos(config, 8, ranks).rollout.batch_size for ranks in (1, 2, 4, 8)
    ] == [8, 4, 2, 1]
    with pytest.raises(
        ConfigError,
        match="8 videos per rollout, which 3 data-parallel ranks cannot share evenly",
    ):
        keep_videos(config, 8, 3)


# --------------------------------------------------------------------------------------
# back, and from another run


def test_a_return_to_an_earlier_update_renames_what_came_later_and_deletes_nothing(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path)

    def make(text: str, *updates: int) -> None:
        files = [run.result, run.before_after]
        for update in updates:
            files += [
                run.checkpoints / f"update-{update}/state.json",
                run.environment_after(update),
            ]
            files += [
                run.evaluation(update),
                run.sample_folder(update) / "00.mp4",
                run.sheet(update),
            ]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def pin(update: int) -> None:
        (run.checkpoints / "best.json").write_text(
            json.dumps({"update": update, "score": 0.5})
        )

    make("first", 999_999, 1_000_000, 1_000_001)
    (run.checkpoints / "update-1000001-mine").mkdir()
    (run.checkpoints / "update-1000001-mine/state.json").write_text(
        "a copy of the user's"
    )
    pin(1_000_001)
    before = contents(tmp_path)
    abandon_after(run, 1_000_000)
    make("second", 1_000_001)
    assert read_best(run.checkpoints) is None, (
        "the part that was left must not vouch for what is made again"
    )
    pin(1_000_000)
    abandon_after(run, 1_000_000)
    assert read_best(run.checkpoints) == (1_000_000, 0.5)
    after = contents(tmp_path)
    made_again = 0
    assert {re.sub("abandoned-(2-)?", "", name) for name in after} == before.keys()
    for name, content in after.items():
        later = re.search("1000001(?!-mine)|result|before_after", name) is not None
        assert ("abandoned-" in name) == later or "best.json" in name
        if later:
            assert content == (b"second" if "abandoned-2-" in name else b"first")
            made_again += "abandoned-2-" in name
    assert made_again == 7
    abandon_after(run, 1_000_000)
    assert contents(tmp_path) == after, "there is nothing to leave"


def test_a_run_goes_back_once_and_takes_nothing_of_what_came_later_for_its_own(
    tiny_run: MakeRun, own_copy: Path
) -> None:
    run = own_copy
    words = (
        "--optimizer.learning_rate=0.05",
        "--evaluation.every=4",
        "--training.num_updates=4",
    )
    back = tiny_run(*words, f"--resume={run / 'checkpoints/update-000001'}")
    stopped = Run(
        back, allow_changes=["optimizer.learning_rate"], callbacks=[Stops()]
    ).train()
    assert stopped.update == 2 and stopped.test is None
    assert (
        not (run / "evaluation/result.json").exists()
        and not (run / "before_after.png").exists()
    )
    assert (
        list(RunDirectory(run).evaluations()) == [0]
        and read_best(run / "checkpoints") is None
    )
    assert load_config(run / "config.yaml").resume == "auto", (
        "or the next start would go back again"
    )
    assert [row["update"] for row in numbers(run)] == [0, 1, 1, 2]


class Stops(Callback):
    """Ends a run after its first rollout."""

    def on_rollout(self, record: Any) -> None:
        raise StopRun("that is enough")


@pytest.mark.parametrize("kind", ["another", "abandoned"])
def test_a_checkpoint_of_other_records_is_not_mixed_into_a_run(
    tiny_run: MakeRun, finished_run: Path, own_copy: Path, tmp_path: Path, kind: str
) -> None:
    run = own_copy
    own = run / "checkpoints/update-000002"
    given = finished_run / "checkpoints/update-000001"
    if kind == "abandoned":
        given = own.rename(own.with_name("abandoned-update-000002"))
    before = contents(run)
    with pytest.raises(
        ConfigError,
        match=rf"already holds a run, and {given} is not one of .*another output_dir",
    ):
        Run(tiny_run(f"--resume={given}"))
    assert contents(run) == before
    (tmp_path / "link").symlink_to(run / "checkpoints/update-000001")
    assert Run(tiny_run(f"--resume={tmp_path / 'link'}")).checkpoint is not None, (
        "its own, by another name"
    )
    assert (
        Run(
            tiny_run(f"--resume={given}", f"--output_dir={tmp_path / 'new'}")
        ).checkpoint
        is not None
    )


def test_a_run_that_begins_at_another_runs_checkpoint_goes_on_from_there_after_a_kill(
    tiny_run: MakeRun, finished_run: Path, tmp_path: Path
) -> None:
    given = finished_run / "checkpoints/update-000001"
    words = (
        "--training.num_updates=3",
        "--checkpoint.every=9",
        "--evaluation.every=9",
        "--optimizer.learning_rate=5e-4",
    )
    branch = Run(
        tiny_run(*words, f"--resume={given}"), allow_changes=["optimizer.learning_rate"]
    )
    killed(branch)
    Run(tiny_run(*words, "--resume=auto")).train()
    whole = (f"--output_dir={tmp_path / 'whole'}", f"--resume={given}")
    Run(tiny_run(*words, *whole), allow_changes=["optimizer.learning_rate"]).train()
    rows = numbers(branch.directory)
    assert rows == numbers(tmp_path / "whole")
    baseline = "evaluation/update-000000.json"
    given_run = given.parent.parent
    assert (branch.directory / baseline).read_text() == (
        given_run / baseline
    ).read_text()
    shutil.rmtree(branch.checkpoints)
    with pytest.raises(CheckpointError, match="its checkpoints are gone"):
        Run(tiny_run(*words, "--resume=auto"))


@pytest.mark.parametrize("scored", [False, True], ids=["in-the-baseline", "after-it"])
def test_a_branch_that_is_killed_before_its_checkpoint_begins_there_again(
    tiny_run: MakeRun, finished_run: Path, monkeypatch: pytest.MonkeyPatch, scored: bool
) -> None:
    words = ("--training.num_updates=3", "--evaluation.every=9")
    branch = Run(
        tiny_run(*words, f"--resume={finished_run / 'checkpoints/update-000001'}")
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            *(branch, "_save") if scored else (branch.evaluation, "run"),
            Mock(side_effect=KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            branch.train()
    with pytest.raises(CheckpointError, match="Repeat its --resume PATH"):
        Run(tiny_run(*words, "--resume=auto"))
    kept = load_config(branch.directory / "config.yaml")
    assert kept.resume.endswith("update-000001")
    again = Run(kept)
    assert again.train().finished and [
        row["update"] for row in numbers(again.directory)
    ] == [0, 2, 3]
    assert load_config(branch.directory / "config.yaml").resume == "auto"


def test_every_change_that_led_to_a_checkpoint_is_on_record_once(
    tiny_run: MakeRun, finished_run: Path
) -> None:
    key = "optimizer.learning_rate"
    words = ("--training.num_updates=3", QUIET)
    given = f"--resume={finished_run / 'checkpoints/update-000001'}"
    found = []
    # The first one saves the checkpoint that the run begins with; the last one changes
    # nothing.
    for resume, rate in (
        (given, "5e-4"),
        *(("--resume=auto", rate) for rate in ("3e-4", "2e-4", "5e-4")),
    ):
        run = Run(tiny_run(*words, resume, f"--{key}={rate}"), allow_changes=[key])
        killed(run)
        rows = read_metrics(run.files.metrics)
        found.append([row["config/changes"] for row in rows if "config/changes" in row])
    first = f"{key} 0.001 -> 0.0005"
    assert found == [
        [first],
        [first, f"{key} 0.0005 -> 0.0003"],
        [first, f"{key} 0.0005 -> 0.0002"],
        [first],
    ]
