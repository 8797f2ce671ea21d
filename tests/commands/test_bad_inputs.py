"""Mistakes of a user, and faults that a run survives: each ends in one clear message and an intact output directory."""

import json
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_fast.checkpoint import CheckpointData, CheckpointWriter, list_checkpoints, verify_checkpoint
from sage_fast.checkpoint.folder import describe_files, write_manifest
from sage_fast.commands import cli
from sage_fast.config.errors import CheckpointError, ConfigError, RewardError, TrainingError
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Sample
from sage_fast.run.metrics import read_metrics
from sage_fast.run.run import Run, build_trainer

MakeRun = Callable[..., RunConfig]


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


# ------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("gone.csv", None, ["data.prompts", "gone.csv", "cannot be read as a prompt file"]),
        ("empty.txt", "", ["data.prompts", "no prompts"]),
        ("columns.csv", "words\na red circle moving left\n", ["columns.csv:1", "prompt", "words"]),
        ("twice.csv", "prompt,index\na red circle moving up,1\na red circle moving up,1\n", ["twice.csv:3", "index 1"]),
        ("bad.jsonl", '{"prompt": "a red circle moving up"}\n{"prompt"\n', ["bad.jsonl:2"]),
        ("latin.txt", "caf\xe9\n".encode("latin-1"), ["latin.txt", "UTF-8"]),
        ("words.txt", "a crimson circle moving left\n", ["crimson", "red"]),
    ],
    ids=["missing", "empty", "no-column", "duplicate-index", "bad-json", "not-utf8", "unknown-word"],
)
def test_a_bad_prompt_file_names_the_place(
    tiny_run: MakeRun, tmp_path: Path, name: str, content: str | bytes | None, expected: Sequence[str]
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        build_trainer(tiny_run(f"--data.prompts={file}", "--evaluation.every=0", "--evaluation.num_prompts=null"))
    assert all(part in message(error) for part in expected), message(error)


# ------------------------------------------------------------------------------------------ rewards


class FaultyReward:
    """Scores brightness; fails in a chosen way on the videos of some prompts."""

    def __init__(self, fault: str, word: str = "red") -> None:
        self.fault = fault
        self.word = word

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        values = videos.float().mean((1, 2, 3, 4))
        bad = torch.tensor([self.word in p for p in prompts])
        if bad.any():
            if self.fault == "raise":
                raise ConnectionError("the scoring server is gone")
            if self.fault == "shape":
                values = values[:, None]
            if self.fault in ("nan", "inf"):
                values = values.masked_fill(bad, float(self.fault))
        return {"brightness": values}


def faulty(tiny_run: MakeRun, tmp_path: Path, fault: str, on_failure: str) -> RunConfig:
    prompts = tmp_path / "two.txt"
    prompts.write_text("a red circle moving left\na blue square moving up\n")
    return tiny_run(
        f"--data.prompts={prompts}",
        "--evaluation.every=0",
        "--evaluation.num_prompts=null",
        f"--reward.rewards=['{__name__}:FaultyReward']",
        f"--reward.options={{'{__name__}:FaultyReward': {{fault: {fault}}}}}",
        "--reward.weights={brightness: 1}",
        f"--reward.on_failure={on_failure}",
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("raise", "ConnectionError: the scoring server is gone"), ("nan", "brightness = nan"), ("inf", "brightness = inf"),
     ("shape", "shape (4, 1)")],
)  # fmt: skip
def test_a_failed_reward_stops_the_run_and_names_the_prompt(
    tiny_run: MakeRun, tmp_path: Path, fault: str, expected: str
) -> None:
    run = Run(faulty(tiny_run, tmp_path, fault, "stop"))
    before = {n: p.detach().clone() for n, p in run.trainer.parameters.items()}
    with pytest.raises(RewardError) as error:
        run.train()
    assert expected in message(error)
    if fault != "shape":
        assert "a red circle moving left" in message(error) and "sample 0" in message(error)
    assert all(torch.equal(before[n], p) for n, p in run.trainer.parameters.items())
    assert not list_checkpoints(run.checkpoints)


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_a_failed_reward_drops_its_group_alone(tiny_run: MakeRun, tmp_path: Path, fault: str) -> None:
    trainer = Run(faulty(tiny_run, tmp_path, fault, "drop_group")).trainer
    record = trainer.iterate()
    assert record["reward/dropped_groups"] == 1
    assert record["advantage/abs_mean"] > 0.5 and record["grad_norm"] > 0
    scored = trainer._score(trainer._rollout(), {})
    assert scored.trained.sum() == 2 and torch.all(scored.advantages[~scored.trained] == 0)


def test_a_dropped_group_takes_no_part_in_the_gradient(tiny_run: MakeRun, tmp_path: Path) -> None:
    """The gradient is that of a run on the other prompt alone."""
    both = build_trainer(faulty(tiny_run, tmp_path, "nan", "drop_group"))
    alone = tmp_path / "one.csv"
    alone.write_text("prompt,index\na blue square moving up,1\n")
    config = faulty(tiny_run, tmp_path, "nan", "stop")
    config.data.prompts = str(alone)
    config.rollout.batch_size = config.rollout.micro_batch_size = 2
    assert both.iterate()["grad_norm"] == pytest.approx(build_trainer(config).iterate()["grad_norm"], rel=1e-4)


def test_a_reward_that_fails_in_the_evaluation_does_not_cost_the_update(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_run("--reward.on_failure=drop_group"))
    evaluate = run.evaluation.run

    def failing() -> dict[str, float]:
        if run.trainer.update:
            raise RewardError("the scoring server is gone")
        return evaluate()

    monkeypatch.setattr(run.evaluation, "run", failing)
    with pytest.raises(RewardError, match="server is gone"):
        run.train()
    assert [r["update"] for r in read_metrics(run.directory / "metrics.jsonl")] == [0, 1, 2]
    assert list_checkpoints(run.checkpoints)[-1].name == "update-000002"


def test_scores_that_come_and_go_are_refused(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tiny_run("--rollout.micro_batch_size=2"))
    score = trainer.reward.score
    calls: list[int] = []

    def fickle(videos: Tensor, samples: Sequence[Sample]) -> dict[str, Tensor]:
        calls.append(1)
        scores = score(videos, samples)
        return scores if len(calls) > 1 else {k: v for k, v in scores.items() if k != "manifold_distance"}

    monkeypatch.setattr(trainer.reward, "score", fickle)
    with pytest.raises(RewardError, match="every video needs the same"):
        trainer.iterate()


def test_every_group_dropped_is_an_error(tiny_run: MakeRun, tmp_path: Path) -> None:
    config = faulty(tiny_run, tmp_path, "nan", "drop_group")
    config.reward.options[f"{__name__}:FaultyReward"]["word"] = "moving"
    with pytest.raises(TrainingError, match="failed in every group"):
        Run(config).train()


# ------------------------------------------------------------------------------------------ numbers, memory


def test_a_nan_loss_keeps_the_last_checkpoint_and_names_the_prompt(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_run("--training.num_updates=4", "--evaluation.every=0"))
    velocity = GuidedPolicy.velocity

    def poisoned(self: GuidedPolicy, *rest: object, **options: object) -> Tensor:
        v = velocity(self, *rest, **options)
        return v * float("nan") if torch.is_grad_enabled() and run.trainer.update == 2 else v

    monkeypatch.setattr(GuidedPolicy, "velocity", poisoned)
    with pytest.raises(TrainingError, match=r"Update 3: the loss of prompt \d+ \('a .*not finite"):
        run.train()
    newest = list_checkpoints(run.checkpoints)[-1]
    verify_checkpoint(newest)
    assert newest.name == "update-000002"
    assert [r["update"] for r in read_metrics(run.directory / "metrics.jsonl")] == [1, 2]
    monkeypatch.undo()
    assert Run(tiny_run("--training.num_updates=4", "--evaluation.every=0", "--resume=auto")).train().update == 4


def test_out_of_memory_says_what_to_lower(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nlong advice")

    monkeypatch.setattr(GuidedPolicy, "velocity", exhausted)
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(tiny_run()))
    assert cli.main(["train", str(file)]) == 1
    errors = capsys.readouterr().err
    assert "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB." in errors
    assert "rollout.micro_batch_size" in errors and "--resume auto" in errors and "Traceback" not in errors


def test_what_the_out_of_memory_message_advises_can_be_done(tiny_run: MakeRun) -> None:
    Run(tiny_run()).train()
    advice = ["--rollout.micro_batch_size=2", "--evaluation.batch_size=2", "--model.checkpointing=selective"]
    advice += ["--training.guidance=split", "--model.forward=fused"]
    assert Run(tiny_run("--resume=auto", "--training.num_updates=3", *advice)).train().update == 3


# ------------------------------------------------------------------------------------------ directories, disks


def test_an_output_directory_that_cannot_be_made(tiny_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"output_dir .*file/run.* cannot be written"):
        Run(tiny_run(f"--output_dir={tmp_path / 'file' / 'run'}")).train()
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_read_only_output_directory(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refused)  # root may write anywhere, so permissions alone prove nothing
    with pytest.raises(ConfigError, match="cannot be written.*Permission denied.*write permission"):
        Run(tiny_run()).train()


def test_a_directory_with_a_run_is_not_overwritten(tiny_run: MakeRun) -> None:
    run = Run(tiny_run()).train().output_dir
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="already holds a run.*--resume auto"):
        Run(tiny_run("--seed=5"))
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_full_disk_during_a_checkpoint_loses_nothing(tiny_run: MakeRun) -> None:
    """The size limit of the process stands in for a full disk: both fail in the middle of a write."""
    run = Run(tiny_run("--training.num_updates=3", "--evaluation.every=0"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    iterate = run.trainer.iterate

    def limited() -> dict[str, float]:
        if run.trainer.update == 2:
            deadline = time.monotonic() + 20
            while not (run.checkpoints / "update-000002").exists() and time.monotonic() < deadline:
                time.sleep(0.01)  # it is being written while training goes on
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        return iterate()

    run.trainer.iterate = limited  # type: ignore[method-assign]
    try:
        with pytest.raises((CheckpointError, OSError)) as error:
            run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "update-000003" in message(error) and "--resume auto" in message(error)
    for checkpoint in list_checkpoints(run.checkpoints):
        verify_checkpoint(checkpoint)
    assert not list(run.checkpoints.glob(".*partial"))
    resumed = Run(tiny_run("--training.num_updates=3", "--evaluation.every=0", "--resume=auto")).train()
    assert resumed.update == 3


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_missing_checkpoint(tiny_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder .*nothing"):
        Run(tiny_run(f"--resume={tmp_path / 'nothing'}"))


def test_a_damaged_checkpoint_named_by_the_user_is_refused(tiny_run: MakeRun) -> None:
    run = Run(tiny_run()).train().output_dir
    newest = list_checkpoints(run / "checkpoints")[-1]
    (shard,) = (newest / "shards").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing, truncated or altered"):
        Run(tiny_run(f"--resume={newest}"))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("--lora.rank=4", "lora.rank: 2 in the checkpoint, 4 now"),
        ("--training.mode=full", "training.mode: 'lora' in the checkpoint, 'full' now"),
        ("--rollout.eta=0.7", "rollout.eta: 0.5 in the checkpoint, 0.7 now"),
        ("--reward.weights={VQ: 1}", "reward.weights"),
    ],
)
def test_a_checkpoint_of_another_configuration(tiny_run: MakeRun, override: str, key: str) -> None:
    run = Run(tiny_run()).train().output_dir
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError) as error:
        Run(tiny_run("--resume=auto", override)).train()
    assert key in message(error)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_prompts_that_changed_since_the_checkpoint(tiny_run: MakeRun, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("a red circle moving left\na blue square moving up\n")
    given = (f"--evaluation.prompts={prompts}", "--evaluation.num_prompts=2")
    Run(tiny_run(*given)).train()
    prompts.write_text("a red circle moving left\na blue square moving down\n")
    with pytest.raises(ConfigError, match=r"evaluation\.prompts: a file has changed"):
        Run(tiny_run(*given, "--resume=auto"))


def test_a_checkpoint_of_another_model(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = Run(tiny_run()).train().output_dir
    newest = list_checkpoints(run / "checkpoints")[-1]
    other = tmp_path / "other"
    shutil.copytree(newest, other)
    state = json.loads((other / "state.json").read_text())
    config = tiny_run("--lora.rank=4", f"--output_dir={tmp_path / 'second'}", f"--resume={other}")
    state["config"] = json.loads(json.dumps(state["config"]))
    state["config"]["lora"]["rank"] = 4
    (other / "state.json").write_text(json.dumps(state))
    (other / "manifest.json").unlink()
    write_manifest(other, 2, describe_files((p for p in other.rglob("*") if p.is_file()), other))
    with pytest.raises(CheckpointError, match=r"does not fit this run: .*of shape"):
        Run(config)
    assert not (tmp_path / "second").exists()


def test_generate_without_a_checkpoint(tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(tiny_run()))
    assert cli.main(["generate", str(file), "--output", str(tmp_path / "v")]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    assert (
        cli.main(["generate", str(file), "--checkpoint", "none", "--output", str(tmp_path / "v"), "--sampler", "x"])
        == 2
    )
    assert "--sampler is 'x'" in capsys.readouterr().err


def test_saving_over_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    data = CheckpointData(tensors={"weights": {"w": torch.ones(1)}}, state={})
    with (
        pytest.raises(CheckpointError, match="Could not write checkpoint"),
        CheckpointWriter(tmp_path / "checkpoints", keep_last=1) as writer,
    ):
        writer.save(1, data)
