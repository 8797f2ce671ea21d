"""What a user gets wrong on several ranks: one message, an exit status, nobody left waiting, nothing written."""

import re
import time
from pathlib import Path

import pytest

from sage_fast.config.errors import ConfigError
from sage_fast.distributed import launch
from sage_fast.distributed.world import World
from sage_fast.run import run
from tests.distributed.ranks import try_ranks
from tests.distributed.test_failures import run_file, sage_fast, terminal
from tests.run.test_run import MakeRun

SECONDS = 20.0
"""Within which all ranks have ended; the timeouts of the runs are longer."""


def own_words(log: str, words: list[str], per_rank: list[list[str]]) -> int:
    """The command line, with words of this rank's own."""
    return sage_fast(log, [*words, *per_rank[launch.rank()]])


def refusal(folder: Path, words: list[str], per_rank: list[list[str]]) -> str:
    """What the terminal shows of a command that all ranks refuse with status 2."""
    log, start = folder / "log", time.monotonic()
    results = try_ranks(own_words, len(per_rank), str(log), words, per_rank, timeout=SECONDS)
    text = terminal(log, len(per_rank))
    assert [code for _, code in results] == [2] * len(per_rank), text
    assert time.monotonic() - start < SECONDS
    assert "Traceback" not in text and "Warning" not in text, text
    assert not (folder / "run").exists()
    return text


def zero_file(folder: Path, text: str) -> str:
    file = folder / "zero.json"
    file.write_text(text)
    return f"--distributed.deepspeed_config={file}"


ZERO = "--distributed.engine=deepspeed"
WRONG = {
    "degrees": (["--distributed.dp_shard=3"], r"dp_replicate null, dp_shard 3 and sp 1 do not fit 2 process"),
    "heads": (
        ["--distributed.sp=3"],
        r"sp is 3, which does not divide .* 2 attention heads\. Set it to one of 1",
    ),
    "groups": (
        ["--rollout.batch_size=2"],
        r"batch_size 2 \* 3 .* = 6 videos .* multiple of .*num_generations = 4",
    ),
    "prompts": (["--data.prompts=nowhere.csv"], r"data\.prompts: nowhere\.csv: no such prompt file"),
    "folder": (["--output_dir=/proc/run"], r"output_dir '/proc/run' cannot be written by rank 0"),
    "key": (["--rollout.batchsize=2"], r"unknown key 'rollout\.batchsize'"),
    "no file": ([ZERO], r"deepspeed needs a JSON file"),
    "single pass": (
        [ZERO, "zero.json", "--training.update=single_pass"],
        r"single_pass .* deepspeed sums",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_all_ranks_meet_is_told_once(name: str, tiny_model: Path, tmp_path: Path) -> None:
    words, message = WRONG[name]
    words = [zero_file(tmp_path, '{"zero_optimization": {"stage": 2}}') if w == "zero.json" else w for w in words]
    ranks = 3 if name in ("heads", "groups") else 2
    file = run_file(tiny_model, tmp_path, rollout={"micro_batch_size": 1})
    text = refusal(tmp_path, ["train", str(file), *words], [[]] * ranks)
    assert len(re.findall(message, text)) == 1 and text.count("error: ") == 1, text


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ('{"zero_optimization": {"stage": 2,}}', "no valid JSON"),
        ('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}', "Set model.dtype to bfloat16, or bf16"),
    ],
)
def test_a_deepspeed_file_is_read_before_the_model(document: str, message: str, tmp_path: Path) -> None:
    """The model's folder does not exist, and is not what the message is about."""
    file = run_file(tmp_path / "no model", tmp_path)
    text = refusal(tmp_path, ["train", str(file), ZERO, zero_file(tmp_path, document)], [[], []])
    assert text.count("error: ") == 1 and message in text, text


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        ([], World(size=3, sp=3), "does not divide the model's 2 attention heads"),
        (["--rollout.batch_size=1", "--rollout.micro_batch_size=1"], World(size=3, dp_replicate=3), "= 3 videos"),
        (["--model.family=json:loads"], World(size=3, sp=3), "loading"),
    ],
    ids=["heads", "groups", "a family that says nothing"],
)
def test_what_does_not_fit_is_found_before_the_model_is_loaded(
    words: list[str], world: World, message: str, tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(*_: object) -> None:
        raise ConfigError("loading")

    monkeypatch.setattr(run, "open_components", loading)
    with pytest.raises(ConfigError, match=message):
        run.build_trainer(tiny_run(*words), world)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ("--seed=1", "different configurations: seed: 0 (rank 0), 1 (rank 1)"),
        ("--distributed.sp=2", "different configurations: distributed.sp: 1 (rank 0), 2 (rank 1)"),
        ("--resume=auto", "different configurations: resume: 'none' (rank 0), 'auto' (rank 1)"),
    ],
)
def test_ranks_with_different_configurations(one: str, message: str, tiny_model: Path, tmp_path: Path) -> None:
    text = refusal(tmp_path, ["train", str(run_file(tiny_model, tmp_path))], [[], [one]])
    assert text.count("error: ") == 1 and message in text, text


def test_nobody_waits_for_a_rank_that_has_ended_before_they_met(tiny_model: Path, tmp_path: Path) -> None:
    text = refusal(tmp_path, ["train", str(run_file(tiny_model, tmp_path))], [[], ["--rollout.batchsize=2"], []])
    assert len(re.findall(r"^\[rank 1\] error: .*unknown key", text, re.MULTILINE)) == 1, text
    assert len(re.findall(r"^error: Rank 1 has ended before the 3 processes met", text, re.MULTILINE)) == 1, text
    assert text.count("error: ") == 2, text


def stale_notice() -> list[int]:
    """Meet where a rank of an earlier attempt has said that it does not come."""
    from sage_fast.distributed.world import dist

    launch.connect_store(5.0).set(launch.STAYS_AWAY, f"1 {launch.STARTED - 1.0}")
    dist.init_process_group("gloo", **launch.meeting_place(SECONDS))
    return [dist.get_rank(), dist.get_world_size()]


def test_a_rank_that_ended_in_an_earlier_attempt_is_forgotten() -> None:
    assert try_ranks(stale_notice, 2, timeout=SECONDS) == [("value", [0, 2]), ("value", [1, 2])]


@pytest.mark.parametrize("command", ["generate", "evaluate", "profile"])
def test_commands_for_one_process_refuse_to_run_several_times(command: str, tiny_model: Path, tmp_path: Path) -> None:
    words = [command, str(run_file(tiny_model, tmp_path)), "--output", str(tmp_path / "output")]
    text = refusal(tmp_path, words, [[], []])
    assert text.count(f"error: {command} is for one process, but 2 were started") == 1, text
    assert text.count("error: ") == 1 and not (tmp_path / "output").exists()


def test_an_unreadable_slurm_step_is_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from sage_fast.commands import cli

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert cli.main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "error: This is a SLURM step of 4 tasks, but its environment cannot be read" in capfd.readouterr().err


def bad_words(log: str) -> int:
    try:
        return sage_fast(log, ["trian"])
    except SystemExit as end:
        return int(str(end.code))


def test_a_word_that_argparse_refuses_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert try_ranks(bad_words, 2, str(log)) == [("value", 2)] * 2
    text = terminal(log, 2)
    assert text.count("invalid choice: 'trian'") == 1 and text.count("usage: ") == 1, text


def test_listing_the_keys_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert [code for _, code in try_ranks(sage_fast, 2, str(log), ["train", "--keys"])] == [0, 0]
    assert terminal(log, 2).count("usage: ") == 1
