"""Run a function on several gloo ranks, each a separate process.

Ranks are forked from a server that has imported the trainer, which takes a tenth of a
second instead of six.
"""

import gc
import json
import multiprocessing
import os
import pickle
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.conftest import TINY_RUN
from tests.made_runs import untimed

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["sage_fast.run.run", "sage_fast.models.toy.components", "sage_fast.rewards.toy"]
)


def _rank(
    function: Callable[..., Any],
    number: int,
    size: int,
    port: int,
    folder: str,
    arguments: Any,
) -> None:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    code = 0
    try:
        result: Any = ("value", function(*arguments))
    except BaseException as error:  # noqa: BLE001  # the parent shows it
        result = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        code = 1
    file = Path(folder) / f"{number}.pkl"
    file.with_suffix(".partial").write_bytes(pickle.dumps(result))
    file.with_suffix(".partial").rename(file)
    if code == 0 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort an orderly exit


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 120
) -> list[Any]:
    """Results of `function(*arguments)` on each of `size` ranks.

    RuntimeError with the tracebacks when any of them raises, is killed, or is not done
    in time.
    """
    results = try_ranks(function, size, *arguments, timeout=timeout)
    failed = [
        f"rank {number}: {value}"
        for number, (kind, value) in enumerate(results)
        if kind != "value"
    ]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [value for _, value in results]


def assert_same_updates(
    given: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    first: float,
    wide: float = 0.0,
) -> None:
    """Reward, gradient and evaluations of ranks are those of one process.

    Args:
        given, expected: a record of each update.
        first: relative difference of the first update; of the others 1e-4.
        wide: absolute difference that is allowed beside it.
    """
    keys = {"reward/mean", "grad_norm", "eval/0", "eval/1"}
    for update, (own, wanted) in enumerate(zip(given, expected, strict=True)):
        assert keys & wanted.keys()
        for key in keys & wanted.keys():
            assert own[key] == pytest.approx(
                wanted[key], rel=1e-4 if update else first, abs=wide
            ), (update, key)


def try_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 120
) -> list[tuple[str, Any]]:
    """As `run_ranks`, but per rank ("value", result), ("error", text) or ("gone", exit
    code).
    """
    with tempfile.TemporaryDirectory() as folder:
        # As under torchrun: the store that ranks meet in outlives each of them.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        ranks = [
            _CONTEXT.Process(
                target=_rank,
                args=(function, number, size, store.port, folder, arguments),
                daemon=True,
            )
            for number in range(size)
        ]
        for rank in ranks:
            rank.start()
        results: list[tuple[str, Any]] = []
        for rank in ranks:
            rank.join(timeout)
            if rank.is_alive():
                rank.kill()
                rank.join()
        for number, rank in enumerate(ranks):
            file = Path(folder) / f"{number}.pkl"
            results.append(
                pickle.loads(file.read_bytes())
                if file.exists()
                else ("gone", rank.exitcode)
            )
        return results


def join(config: Any) -> Any:
    """The world of a rank's run."""
    from sage_fast.config.schema import to_dict
    from sage_fast.distributed.start import start_world

    return start_world(
        config.distributed, config.training.mode, torch.device("cpu"), to_dict(config)
    )


def write_run(model: Path, folder: Path, **changes: dict[str, Any]) -> str:
    """File of a run with four videos of a prompt, in two steps without guidance;
    `changes` are settings by section.
    """
    tree: dict[str, Any] = json.loads(json.dumps(TINY_RUN))
    tree["rollout"] |= {"num_generations": 4, "batch_size": 4, "micro_batch_size": 2}
    tree["rollout"] |= {"num_steps": 2, "guidance_scale": 1.0}
    # Not "auto": a table of the modulation rounds otherwise than the weights it is made
    # from.
    tree["model"] = {"path": str(model), "adaln": "weights", "device": "cpu"}
    for name, section in changes.items():
        tree[name] = tree.get(name, {}) | section
    file = folder / "run.yaml"
    file.write_text(json.dumps(tree | {"output_dir": str(folder / "run")}))
    return str(file)


def build(file: str, words: list[str]) -> Any:
    """The trainer of this rank."""
    from sage_fast.config.load import load_config
    from sage_fast.run.run import build_trainer

    config = load_config(file, words)
    return build_trainer(config, join(config))


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies without shards. Collective."""
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in tensors.items()
    }
    return {name: value.detach().clone() for name, value in full.items()}


def train(
    file: str, words: list[str]
) -> tuple[list[dict[str, float]], list[Any], dict[str, Tensor]]:
    """Metrics by update with the evaluation last; what was scored in each rollout;
    whole weights in the end.
    """
    trainer = build(file, words)
    rollouts: list[Any] = []
    trainer.on_rollout = rollouts.append
    records = []
    while trainer.update < trainer.config.training.num_updates:
        records.append(untimed(trainer.iterate()))
    evaluation = trainer.evaluate()
    records.append({f"eval/{i}": reward for i, reward in enumerate(evaluation.reward)})
    # Of ZeRO's weights each is on one rank.
    parts = trainer.world.gather(whole(trainer.engine.tensors()["weights"]))
    return (
        records,
        rollouts,
        {name: value for part in parts for name, value in part.items()},
    )


def peak_bytes(*, anew: bool = False) -> int:
    """Most resident memory of this process so far; with `anew` that of now, from which
    it is counted on.
    """
    if anew:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
