"""Shared fixtures: a tiny random model in the toy layout, and a run that takes well
under a second.
"""

import gc
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

# Without a GPU, kernels run in Triton's interpreter. Triton reads this when a kernel is
# defined, so it stands before every import that could define one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Fresh buffers of sage_kernels hold NaN, so that an element which no kernel wrote
# cannot pass.
os.environ.setdefault("SAGE_KERNELS_POISON_EMPTY", "1")

# What imports the libraries of models stands in functions: the process that hands out
# the tests runs none of them.
if TYPE_CHECKING:
    from sage_fast.config.schema import RunConfig

torch.set_num_threads(1)

# In the background a shell has the tests ignore SIGINT, and `nohup` SIGHUP; every
# process they start inherits that.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

DEFAULT_TIMEOUT = 300  # seconds, as in pyproject.toml

WITH_RANKS = (
    "tests/distributed/",
    "tests/invariants/test_any_number_of_ranks.py",
    "tests/models/wan/test_training.py",
)

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "mlp_ratio": 2.0,
    "rope_axes_dim": [4, 4, 4],
}

TINY_RUN: dict[str, Any] = {
    # also where there is a GPU: tests make their own tensors on the CPU
    "model": {"device": "cpu"},
    "data": {"prompts": "configs/prompts/toy_train.csv"},
    "video": {"num_frames": 4, "height": 16, "width": 16, "fps": 4},
    "rollout": {
        "num_steps": 4,
        "shift": 3.0,
        "guidance_scale": 2.0,
        "num_generations": 2,
        "batch_size": 4,
        "micro_batch_size": 4,
    },
    "lora": {"rank": 2},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    "training": {"num_updates": 2},
    "evaluation": {"num_prompts": 4, "every": 2, "batch_size": 4, "num_samples": 2},
    "checkpoint": {"every": 1, "keep_last": 2},
    "logging": {"report_to": []},
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-block transformer over the toy world's captions and codec."""
    from sage_fast.models.toy.components import TRANSFORMER_CONFIG

    return write_tiny_model(
        tmp_path_factory.mktemp("tiny_model"), TRANSFORMER_CONFIG | TINY
    )


@pytest.fixture(scope="session")
def tiny_model_4_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads for four ranks of sequence parallelism."""
    from sage_fast.models.toy.components import TRANSFORMER_CONFIG

    config = TRANSFORMER_CONFIG | TINY | {"num_attention_heads": 4}
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model_4_heads"), config)


def write_tiny_model(folder: Path, config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    from sage_fast.models.toy.components import (
        CONFIG_NAME,
        WEIGHTS_NAME,
        build_transformer,
        stored_parameters,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = build_transformer(config)
    save_file(stored_parameters(transformer), folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    return folder


def tiny_run_of(model: Path, folder: Path) -> dict[str, Any]:
    """Tree of a run of that model, written to `folder / "run"`."""
    return TINY_RUN | {
        "output_dir": str(folder / "run"),
        "model": {"path": str(model), "device": "cpu"},
    }


@pytest.fixture(scope="session")
def finished_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of two updates; copy it before changing it."""
    from sage_fast.config.load import load_config
    from sage_fast.run.run import Run

    folder = tmp_path_factory.mktemp("finished")
    file = folder / "run.yaml"
    file.write_text(json.dumps(tiny_run_of(tiny_model, folder)))
    Run(load_config(file)).train()
    return folder / "run"


@pytest.fixture
def tiny_run(tiny_model: Path, tmp_path: Path) -> Callable[..., "RunConfig"]:
    """`tiny_run("--training.mode=full")` is the config of a two-update run in a fresh
    directory.
    """
    from sage_fast.config.load import load_config

    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tiny_run_of(tiny_model, tmp_path)))

    def make(*overrides: str) -> "RunConfig":
        return load_config(file, overrides)

    return make


@pytest.fixture
def nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a run computes and keeps."""
    from tests.made_runs import draw_nothing

    draw_nothing(monkeypatch)


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[1])


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests of ranks, all of one worker, and with the longest files, so
    that none ends a run alone.
    """
    limits = ((item.path, item.get_closest_marker("timeout")) for item in items)
    longest = {
        path for path, limit in limits if limit and limit.args[0] > DEFAULT_TIMEOUT
    }
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith(WITH_RANKS),
            item.path not in longest,
        )
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes whole files, whose tests share servers, and all tests of ranks,
    which fork from one server.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "ranks" if file.startswith(WITH_RANKS) else file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Every full garbage collection would go through a million objects of imported
    libraries.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked `signals` run `SAGE_TEST_REPEATS` times."""
    repeats = int(os.environ.get("SAGE_TEST_REPEATS", "1"))
    if repeats > 1 and metafunc.definition.get_closest_marker("signals"):
        metafunc.fixturenames.append("repeat")
        metafunc.parametrize("repeat", range(repeats))
