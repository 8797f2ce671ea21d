"""A step under FSDP2 on one rank: what is wrapped is compared first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks import results
from benchmarks.session import Session
from benchmarks.suites import sharded
from benchmarks.workload import TINY, adapt, random_transformer
from sage_fast.sharding.parallelize import fsdp_modules, shard_weights

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MakeSession = Callable[..., Session]


def test_a_smoke_run_measures_both(session: MakeSession) -> None:
    found = session()
    found.run(sharded.SUITES[0])
    assert not dist.is_initialized() and results.succeeded(found.result)
    errors = found.cells["sharded parity"]["errors"]
    assert max(errors.values()) <= sharded.TOLERANCE and errors.keys() == {"velocity", "gradient"}
    assert set(results.rows(found.result)["sharded", "LoRA gradient", "B"]) == {"unwrapped", "ours"}


def test_what_is_measured_is_sharded_and_compared(session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = random_transformer(TINY, CPU, torch.bfloat16)
    adapt(transformer)
    monkeypatch.setattr(sharded, "pooled_error", lambda given, exact: 0.6)
    with sharded.one_rank(CPU) as world:
        found = sharded.measure(session(), TINY, sharded.workload.SMOKE[1], world)
        engine = sharded.shard(transformer, world, CPU)
    assert found["status"].startswith("failed: FSDP2 differs") and "rows" not in found
    assert len(fsdp_modules(transformer)) == TINY["num_layers"] + 1 == len(engine.gathering.modules)
    assert engine.gathering.keep_gathered == "never"
    assert not any(isinstance(p, DTensor) for p in engine.parameters.values())


def test_other_weights_behind_the_wrapper_are_noticed(session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def shard_something_else(transformer: Any, *arguments: Any, **options: Any) -> None:
        with torch.no_grad():
            transformer.proj_out.weight.mul_(1.1)
        shard_weights(transformer, *arguments, **options)

    monkeypatch.setattr(sharded, "shard_weights", shard_something_else)
    found = session()
    found.run(sharded.SUITES[0])
    assert found.cells["sharded parity"]["errors"]["velocity"] > sharded.TOLERANCE
    assert found.cells["sharded lora"]["status"] == "skipped: sharded parity has not passed"
    assert not results.succeeded(found.result) and not dist.is_initialized()
