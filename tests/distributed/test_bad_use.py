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

SECONDS = 60.0
"""Within which all ranks have ended, on busy cores too; the timeout of a run is ten times as long."""


def own_words(log: str, words: list[str], per_rank: list[list[str]]) -> int:
    """The command line, with words of this rank's own."""
    return sage_fast(log, [*words, *per_rank[start.rank()]])


def refusal(folder: Path, words: list[str], per_rank: list[list[str]]) -> str:
    """The terminal of a command that all ranks refuse with status 2."""
    log, begin = folder / "log", time.monotonic()
    words = [*words, "--distributed.timeout_seconds=600"]
    results = try_ranks(own_words, len(per_rank), str(log), words, per_rank, timeout=SECONDS)
    text = terminal(log, len(per_rank))
    assert [code for _, code in results] == [2] * len(per_rank), text
    assert time.monotonic() - begin < SECONDS
    assert "Traceback" not in text and "Warning" not in text, text
    assert not (folder / "run").exists()
    return text


WRONG = {
    "degrees": (2, ["--distributed.dp_shard=3"], r"dp_replicate null, dp_shard 3 and sp 1 do not fit 2 process"),
    "heads": (3, ["--distributed.sp=3"], r"sp is 3, which does not divide .* 2 attention heads\. Set it to one of 1"),
    "folder": (2, ["--output_dir=/proc/run"], r"output_dir '/proc/run' cannot be written"),
    "command": (2, ["generate"], r"generate is for one process, but 2 were started"),
}


@pytest.mark.parametrize("name", WRONG)
def test_all_ranks_say_what_all_of_them_meet(name: str, tiny_model: Path, tmp_path: Path) -> None:
    ranks, words, message = WRONG[name]
    command, file = "train", run_file(tiny_model, tmp_path, rollout={"micro_batch_size": 1})
    if name == "command":
        command, words = words[0], ["--output", str(tmp_path / "run")]
    text = refusal(tmp_path, [command, str(file), *words], [[]] * ranks)
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


def test_ranks_with_different_configurations(tiny_model: Path, tmp_path: Path) -> None:
    text = refusal(tmp_path, ["train", str(run_file(tiny_model, tmp_path))], [[], ["--distributed.sp=2"]])
    assert text.count("The ranks differ in config distributed.sp: 1 (rank 0), 2 (rank 1)") == 2, text


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
        ("prompts", "The ranks differ in prompts: 0 (ranks 0, 1), 1 (rank 2)."),
        ("device", "ranks 0, 2 share one GPU."),
    ],
)
def test_ranks_that_have_loaded_other_files_or_share_a_gpu(name: str, message: str) -> None:
    texts = run_ranks(differ, 3, name)
    assert all(text.startswith(message) for text in texts), texts
