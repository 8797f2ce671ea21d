"""Wrong use on several ranks: a message of each, an exit status, nobody left waiting,
nothing written.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from sage_fast.config.errors import ConfigError
from sage_fast.distributed import start
from sage_fast.distributed.failure import check_same_everywhere
from sage_fast.distributed.world import World
from sage_fast.run import run
from tests.distributed.ranks import run_ranks, write_run
from tests.distributed.test_failures import on_ranks
from tests.run.test_run import MakeRun


def refusals(ranks: int, words: list[str], folder: Path) -> str:
    """Messages of a command that all ranks refuse with status 2."""
    results, text = on_ranks(
        ranks, [*words, "--distributed.timeout_seconds=600"], folder
    )
    assert [code for _, code in results] == [2] * ranks, text
    assert "Traceback" not in text and "Warning" not in text, text
    assert not (folder / "run").exists()
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "word", "message"),
    [
        (
            "train",
            "--output_dir=/proc/run",
            r"output_dir '/proc/run' cannot be written",
        ),
        (
            "generate",
            "--output_dir=videos",
            r"generate is for one process, but 2 were started",
        ),
    ],
)
def test_all_ranks_say_what_all_of_them_meet(
    command: str, word: str, message: str, tiny_model: Path, tmp_path: Path
) -> None:
    text = refusals(2, [command, write_run(tiny_model, tmp_path), word], tmp_path)
    assert len(re.findall(message, text)) == text.count("error: ") == 2, text


def test_what_does_not_fit_is_found_before_the_model_is_loaded(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_model", lambda *_, **__: pytest.fail("loading"))
    with pytest.raises(
        ConfigError, match="does not divide the model's 2 attention heads"
    ):
        run.build_trainer(tiny_run(), World(size=3, sp=3))
    with pytest.raises(ConfigError, match="= 3 videos"):
        words = ["--rollout.batch_size=1", "--rollout.micro_batch_size=1"]
        run.build_trainer(tiny_run(*words), World(size=3, dp_replicate=3))


@pytest.mark.slow
def test_ranks_with_different_configurations(tiny_model: Path, tmp_path: Path) -> None:
    text = refusals(
        2,
        ["train", write_run(tiny_model, tmp_path), "--distributed.sp={number}"],
        tmp_path,
    )
    assert (
        text.count("The ranks differ in config distributed.sp: 1 (rank 0), 2 (rank 1)")
        == 2
    ), text


def share_a_gpu() -> str:
    """The message of ranks of which the last has the same GPU as the first."""
    gpu = SimpleNamespace(uuid=f"GPU-{start.rank() % 2}")
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as error:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        check_same_everywhere({}, torch.device("cuda"))
    return str(error.value)


@pytest.mark.slow
def test_ranks_that_share_a_gpu() -> None:
    texts = run_ranks(share_a_gpu, 3)
    assert all(text.startswith("ranks 0, 2 share one GPU.") for text in texts), texts
