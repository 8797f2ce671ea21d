"""Wrong use on several ranks: a message of each, an exit status, nobody left waiting, nothing written."""

import re
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from sage_fast.config.errors import ConfigError
from sage_fast.distributed import start
from sage_fast.distributed.world import World
from sage_fast.run import run
from tests.distributed.ranks import run_ranks, try_ranks
from tests.distributed.test_failures import run_file, sage_fast, terminal
from tests.run.test_run import MakeRun

SECONDS = 20.0
"""Within which all ranks have ended; the timeouts of the runs are longer."""


def own_words(log: str, words: list[str], per_rank: list[list[str]]) -> int:
    """The command line, with words of this rank's own."""
    return sage_fast(log, [*words, *per_rank[start.rank()]])


def refusal(folder: Path, words: list[str], per_rank: list[list[str]]) -> str:
    """The terminal of a command that all ranks refuse with status 2."""
    log, begin = folder / "log", time.monotonic()
    results = try_ranks(own_words, len(per_rank), str(log), words, per_rank, timeout=SECONDS)
    text = terminal(log, len(per_rank))
    assert [code for _, code in results] == [2] * len(per_rank), text
    assert time.monotonic() - begin < SECONDS
    assert "Traceback" not in text and "Warning" not in text, text
    assert not (folder / "run").exists()
    return text


ZERO = "--distributed.zero_stage=2"
WRONG = {
    "degrees": (["--distributed.dp_shard=3"], r"dp_replicate null, dp_shard 3 and sp 1 do not fit 2 process"),
    "heads": (["--distributed.sp=3"], r"sp is 3, which does not divide .* 2 attention heads\. Set it to one of 1"),
    "groups": (["--rollout.batch_size=2"], r"batch_size 2 \* 3 .* = 6 videos .* multiple of .*num_generations = 4"),
    "prompts": (["--data.prompts=nowhere.csv"], r"data\.prompts: nowhere\.csv: cannot be read as a prompt file"),
    "folder": (["--output_dir=/proc/run"], r"output_dir '/proc/run' cannot be written"),
    "key": (["--rollout.batchsize=2"], r"unknown key 'rollout\.batchsize'"),
    "muon": ([ZERO], r"optimizer\.name is 'muon', but distributed\.zero_stage 2"),
    "single pass": ([ZERO, "--optimizer.name=adamw", "--training.update=single_pass"], r"single_pass .*zero_stage 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_all_ranks_say_what_all_of_them_meet(name: str, tiny_model: Path, tmp_path: Path) -> None:
    words, message = WRONG[name]
    ranks = 3 if name in ("heads", "groups") else 2
    file = run_file(tiny_model, tmp_path, rollout={"micro_batch_size": 1}, optimizer={"name": "muon"})
    text = refusal(tmp_path, ["train", str(file), *words], [[]] * ranks)
    assert len(re.findall(message, text)) == text.count("error: ") == ranks, text


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
        ("--seed=1", "The ranks differ in config seed: 0 (rank 0), 1 (rank 1)"),
        ("--distributed.sp=2", "The ranks differ in config distributed.sp: 1 (rank 0), 2 (rank 1)"),
        ("--resume=auto", "The ranks differ in config resume: 'none' (rank 0), 'auto' (rank 1)"),
    ],
)
def test_ranks_with_different_configurations(one: str, message: str, tiny_model: Path, tmp_path: Path) -> None:
    text = refusal(tmp_path, ["train", str(run_file(tiny_model, tmp_path))], [[], [one]])
    assert text.count("error: ") == 2 and message in text, text


def differ(name: str) -> str:
    """The message of ranks of which the last has another value, or the same GPU as the first."""
    from types import SimpleNamespace

    from sage_fast.distributed.failure import check_same_everywhere

    rank = start.rank()
    dist.init_process_group("gloo")
    gpu = SimpleNamespace(uuid=f"GPU-{rank % 2 if name == 'device' else rank}")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as error:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        check_same_everywhere({"torch": "2.13", name: str(rank // 2)} if name != "device" else {}, torch.device("cuda"))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prompts", "The ranks differ in prompts: 0 (ranks 0-1), 1 (rank 2)."),
        ("device", "ranks 0, 2 share one GPU."),
    ],
)
def test_ranks_that_have_loaded_other_files_or_share_a_gpu(name: str, message: str) -> None:
    texts = run_ranks(differ, 3, name)
    assert all(text.startswith(message) for text in texts), texts


@pytest.mark.parametrize("command", ["generate", "evaluate", "profile"])
def test_commands_for_one_process_refuse_to_run_several_times(command: str, tiny_model: Path, tmp_path: Path) -> None:
    words = [command, str(run_file(tiny_model, tmp_path)), "--output", str(tmp_path / "output")]
    text = refusal(tmp_path, words, [[], []])
    assert text.count(f"error: {command} is for one process, but 2 were started") == 2, text
    assert not (tmp_path / "output").exists()


def test_listing_the_keys_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert [code for _, code in try_ranks(sage_fast, 2, str(log), ["train", "--keys"])] == [0, 0]
    assert terminal(log, 2).count("  --output_dir  (") == 1
