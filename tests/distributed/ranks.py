"""Run a function on several gloo ranks, each a separate process.

Ranks are forked from a server that has imported the trainer, which takes a tenth of a second instead of six.
"""

import gc
import multiprocessing
import os
import pickle
import re
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["sage_fast.run.run", "sage_fast.models.toy.components", "sage_fast.rewards.toy"])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def _rank(function: Callable[..., Any], number: int, size: int, port: int, folder: str, arguments: Any) -> None:
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
        result, code = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"), 1
    file = Path(folder) / f"{number}.pkl"
    file.with_suffix(".partial").write_bytes(pickle.dumps(result))
    file.with_suffix(".partial").rename(file)
    if code == 0 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort an orderly exit


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 120) -> list[Any]:
    """Results of `function(*arguments)` on each of `size` ranks.

    RuntimeError with the tracebacks when any of them raises, is killed, or is not done in time.
    """
    results = try_ranks(function, size, *arguments, timeout=timeout)
    failed = [f"rank {number}: {value}" for number, (kind, value) in enumerate(results) if kind != "value"]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [value for _, value in results]


def try_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 120) -> list[tuple[str, Any]]:
    """As `run_ranks`, but per rank ("value", result), ("error", text) or ("gone", exit code)."""
    with tempfile.TemporaryDirectory() as folder:
        # As under torchrun: the store that ranks meet in outlives each of them.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        ranks = [
            _CONTEXT.Process(target=_rank, args=(function, number, size, store.port, folder, arguments), daemon=True)
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
            results.append(pickle.loads(file.read_bytes()) if file.exists() else ("gone", rank.exitcode))
        return results


def join(config: Any) -> Any:
    """The world of a rank's run."""
    from sage_fast.config.schema import to_dict
    from sage_fast.distributed.start import start_world

    return start_world(config.distributed, config.training.mode, torch.device("cpu"), to_dict(config))


def peak_bytes(*, anew: bool = False) -> int:
    """Most resident memory of this process so far; with `anew` that of now, from which it is counted on."""
    if anew:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
