"""Steps under FSDP2 on one rank: what is wrapped is compared first, and layers are as many as memory allows."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks import results
from benchmarks.session import Session
from benchmarks.suites import sharded
from benchmarks.workload import HUNYUAN_VIDEO_15, SMOKE, TINY, adapt, random_transformer
from sage_fast.distributed.parallelize import fsdp_modules, shard_weights
from sage_fast.distributed.world import World
from sage_fast.optim import ShardedMuon
from sage_fast.policy.lora import train_all

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHAPE = SMOKE[1]
MakeSession = Callable[..., Session]


@pytest.fixture
def world() -> Iterator[World]:
    with sharded.one_rank(CPU) as world:
        yield world


def run(session: Session) -> dict[str, Any]:
    session.run(sharded.SUITES[0])
    return session.cells


def test_a_smoke_run_measures_both(session: MakeSession) -> None:
    found = session()
    cells = run(found)
    assert not dist.is_initialized() and results.succeeded(found.result)
    assert cells["sharded parity lora"]["errors"]["gradient"] <= sharded.TOLERANCE
    assert {"velocity", "gradient", "update"} == cells["sharded parity full"]["errors"].keys()
    rows = results.rows(found.result)
    assert set(rows["sharded", "LoRA gradient", "B"]) == {"unwrapped", "ours"}
    note = rows["sharded", "full, offloaded, optimizer", "B"]["ours"]["note"]
    assert "2 of 2 layers" in note and "first round" not in note


def test_what_is_measured_is_sharded(world: World) -> None:
    transformer = random_transformer(TINY, CPU, torch.bfloat16)
    adapt(transformer)
    engine = sharded.shard(transformer, "lora", world, CPU)
    assert len(fsdp_modules(transformer)) == TINY["num_layers"] + 1 == len(engine.gathering.modules)
    assert engine.gathering.keep_gathered == "never"
    assert not any(isinstance(p, DTensor) for p in engine.parameters.values())

    transformer = random_transformer(TINY, CPU, torch.float32)
    train_all(transformer)
    engine = sharded.shard(transformer, "full", world, CPU)
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in engine.parameters.values())
    (group,) = fsdp_modules(transformer)[0]._get_fsdp_state()._fsdp_param_groups
    assert all(parameter.offload_to_cpu for parameter in group.fsdp_params)
    assert isinstance(engine.optimizer.optimizers[0], ShardedMuon)


def test_other_weights_behind_the_wrapper_are_noticed(session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def shard_something_else(transformer: Any, *arguments: Any, **options: Any) -> None:
        with torch.no_grad():
            transformer.proj_out.weight.mul_(1.1)
        shard_weights(transformer, *arguments, **options)

    monkeypatch.setattr(sharded, "shard_weights", shard_something_else)
    monkeypatch.setattr(sharded, "measure_full", lambda *arguments: {})
    found = session()
    cells = run(found)
    assert cells["sharded parity lora"]["errors"]["velocity"] > sharded.TOLERANCE
    assert cells["sharded lora"]["status"] == "skipped: sharded parity lora has not passed"
    assert not results.succeeded(found.result)


def test_another_optimizer_is_noticed(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    step = ShardedMuon.step

    def twice(self: ShardedMuon) -> None:
        step(self)
        step(self)

    monkeypatch.setattr(ShardedMuon, "step", twice)
    found = sharded.check("full", TINY, SHAPE, world, CPU)
    assert not found["passed"] and found["errors"]["update"] > 0.1 > found["errors"]["gradient"]


def test_the_first_step_at_full_size_is_compared_too(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    monkeypatch.setattr(sharded, "pooled_error", lambda given, exact: 0.6)
    found = sharded.measure_lora(session(), TINY, SHAPE, world)
    assert found["status"].startswith("failed: FSDP2 differs") and "rows" not in found


def test_a_failure_ends_neither_the_other_mode_nor_the_process_group(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    monkeypatch.setattr(sharded, "measure_lora", broken)
    monkeypatch.setattr(sharded, "measure_full", lambda *arguments: {})
    cells = run(session())
    assert cells["sharded lora"]["status"] == "out of memory: CUDA out of memory"
    assert cells["sharded full"]["status"] == "done" and not dist.is_initialized()


def test_cpu_memory_of_a_full_step() -> None:
    whole = sharded.host_bytes(HUNYUAN_VIDEO_15, 54)
    # Twelve bytes for each of 8.3 B weights, and what powers of two add to masters and gradients.
    assert 12 * 8.326e9 < whole < 14 * 8.326e9
    one = sharded.host_bytes(TINY, 1)
    assert sharded.host_bytes(TINY, 5) - one == 4 * (sharded.host_bytes(TINY, 2) - one)


@pytest.mark.parametrize(("memory", "layers"), [(200e9, 54), (60e9, 23), (1e9, 1), (None, 54)])
def test_as_many_layers_as_cpu_memory_holds(memory: float | None, layers: int) -> None:
    assert sharded.layers_that_fit(HUNYUAN_VIDEO_15, None if memory is None else int(memory)) == layers
