"""Steps under FSDP2 on one rank: what is wrapped is compared first, and layers are as many as memory and time allow."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks import report, sharded, sharded_steps
from benchmarks.harness import Quantiles
from benchmarks.workload import HUNYUAN_VIDEO_15, SMOKE, TINY, random_transformer
from sage_fast.distributed.parallelize import fsdp_modules, shard_weights
from sage_fast.distributed.world import World
from sage_fast.optim import ShardedMuon
from sage_fast.policy.lora import train_all

CPU = torch.device("cpu")
SHAPE = SMOKE[1]


@pytest.fixture
def world() -> Iterator[World]:
    with sharded_steps.one_rank(CPU) as world:
        yield world


def plan(**options: Any) -> sharded.ShardedRun:
    return sharded.ShardedRun(**{"device": CPU, "smoke": True, "budget": 60.0, "save": lambda found: None} | options)


def test_a_smoke_run_measures_both(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert sharded.main(["--smoke", "--output", str(path)]) == 0
    assert not dist.is_initialized()
    found = json.loads(path.read_text("utf-8"))["sharded"]
    lora, full = found["lora"], found["full"]
    assert lora["parity"]["passed"] and lora["parity"]["gradient"] <= sharded_steps.TOLERANCE
    seconds = lora["seconds"]
    assert lora["fsdp_over_unwrapped"] == seconds["fsdp"]["median"] / seconds["unwrapped"]["median"]
    assert full["parity"]["passed"] and {"velocity", "gradient", "update"} <= full["parity"].keys()
    assert (full["layers"], full["of_layers"], full["limited_by"], full["warm"]) == (2, 2, "nothing", True)
    assert "FSDP2 over unwrapped" in capsys.readouterr().out


def test_what_is_measured_is_sharded(world: World) -> None:
    transformer = random_transformer(TINY, CPU, torch.bfloat16)
    sharded_steps.adapt(transformer)
    engine = sharded_steps.shard(transformer, "lora", world, CPU)
    assert len(fsdp_modules(transformer)) == TINY["num_layers"] + 1 == len(engine.gathering.modules)
    assert engine.gathering.keep_gathered == "never"
    assert not any(isinstance(p, DTensor) for p in engine.parameters.values())

    transformer = random_transformer(TINY, CPU, torch.float32)
    train_all(transformer)
    engine = sharded_steps.shard(transformer, "full", world, CPU)
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in engine.parameters.values())
    (group,) = fsdp_modules(transformer)[0]._get_fsdp_state()._fsdp_param_groups
    assert all(parameter.offload_to_cpu for parameter in group.fsdp_params)
    assert isinstance(engine.optimizer.optimizers[0], ShardedMuon)


def test_other_weights_behind_the_wrapper_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shard_something_else(transformer: Any, *arguments: Any, **options: Any) -> None:
        with torch.no_grad():
            transformer.proj_out.weight.mul_(1.1)
        shard_weights(transformer, *arguments, **options)

    monkeypatch.setattr(sharded_steps, "shard_weights", shard_something_else)
    monkeypatch.setattr(sharded.ShardedRun, "full", lambda self, world: {"passed": True, "layers": 2})
    found = sharded.run(plan())["sharded"]
    assert not found["lora"]["passed"] and "seconds" not in found["lora"]
    assert found["lora"]["parity"]["velocity"] > sharded_steps.TOLERANCE
    assert not sharded.succeeded({"sharded": found})
    assert "PARITY FAILED, no figures" in sharded.table({"sharded": {"lora": found["lora"]}})


def test_another_optimizer_is_noticed(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    step = ShardedMuon.step

    def twice(self: ShardedMuon) -> None:
        step(self)
        step(self)

    monkeypatch.setattr(ShardedMuon, "step", twice)
    found = sharded_steps.check("full", TINY, SHAPE, world, CPU)
    assert not found["passed"] and found["update"] > 0.1 > found["gradient"]


def test_the_first_step_at_full_size_is_compared_too(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(sharded_steps, "pooled_error", lambda given, exact: 0.6)
    found = sharded_steps.measure_lora(TINY, SHAPE, world, CPU, rounds=1, budget=60.0)
    assert not found["passed"] and "seconds" not in found and found["difference"]["gradient"] == 0.6


def test_a_failure_is_recorded_and_the_other_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: sharded.ShardedRun, world: World, *, share: float) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    full = {"passed": True, "layers": 2, "of_layers": 2, "limited_by": "nothing"}
    monkeypatch.setattr(sharded.ShardedRun, "lora", broken)
    monkeypatch.setattr(sharded.ShardedRun, "full", lambda self, world: dict(full))
    saved: list[dict[str, Any]] = []
    result = sharded.run(plan(save=lambda found: saved.append(copy.deepcopy(found))))
    assert result["sharded"]["lora"]["status"] == "failed: OutOfMemoryError: CUDA out of memory"
    assert result["sharded"]["full"]["passed"] and not sharded.succeeded(result)
    assert [list(found["sharded"]) for found in saved] == [["lora"], ["lora", "full"]]
    assert not dist.is_initialized()


def test_what_an_earlier_run_had_no_time_for_is_measured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    record = {"passed": True, "layers": 20, "of_layers": 54, "limited_by": "time"}

    def lora(self: sharded.ShardedRun, world: World, *, share: float) -> dict[str, Any]:
        calls.append(f"lora {share}")
        return {"passed": True}

    def full(self: sharded.ShardedRun, world: World) -> dict[str, Any]:
        calls.append("full")
        return dict(record)

    monkeypatch.setattr(sharded.ShardedRun, "lora", lora)
    monkeypatch.setattr(sharded.ShardedRun, "full", full)
    first = sharded.run(plan())
    assert first["status"] == "not finished: full: time for 20 of 54 layers"
    second = sharded.run(plan(), first["sharded"])
    assert "status" not in second
    assert calls == [f"lora {sharded.LORA_SHARE}", "full", "full"]
    record["limited_by"] = "CPU memory"
    third = sharded.run(plan(), second["sharded"])
    sharded.run(plan(), third["sharded"])
    assert calls[3:] == ["full"]


def test_what_does_not_fit_into_the_time_is_not_begun() -> None:
    result = sharded.run(plan(smoke=False, budget=5.0, matmul_tflop_per_s=700.0))
    assert "sharded" not in result
    assert result["status"].startswith("not finished: lora skipped: it takes about 7")
    assert "; full skipped: " in result["status"]
    assert not sharded.succeeded(result)


def gpu_record() -> dict[str, Any]:
    one, two = (vars(Quantiles.of([value])) for value in (8.0, 10.0))
    lora = {
        "passed": True,
        "layers": 54,
        "seconds": {"unwrapped": one, "fsdp": two},
        "fsdp_over_unwrapped": 1.25,
        "peak_memory_gb": {"unwrapped": 41.0, "fsdp": 42.5},
    }
    full = {
        "passed": True,
        "layers": 20,
        "of_layers": 54,
        "limited_by": "time",
        "seconds": {"gradient": one, "optimizer": two},
        "peak_memory_gb": 31.0,
        "host_gb": 40.2,
    }
    return {"lora": lora, "full": full}


def test_the_report_says_how_many_layers_there_were() -> None:
    environment = {"commit": "0123456789", "packages": {"torch": "2.11.0"}, "gpu": {"name": "H100"}}
    records = gpu_record()
    file = "2026-01-01-012345678.json"
    device = report.DeviceResults(
        folder="h100", values={"sharded": records}, files={"sharded": file}, environments={file: environment}
    )
    results = report.Results(devices=[device], predicted={})
    text = report.sharded_block(results)
    assert "| LoRA gradient, whole | 54 | 8.00 (8.00 – 8.00) | 1 | 41.0 | – |" in text
    assert "| LoRA gradient, FSDP2 | 54 | 10.00 (10.00 – 10.00) | 1.250 | 42.5 | – |" in text
    assert (
        "| full, FSDP2 with CPU offload, optimizer | 20 of 54 (time) | 10.00 (10.00 – 10.00) | – | 31.0 | 40 |" in text
    )
    records["lora"] = {"passed": False, "parity": {}}
    assert "LoRA" not in report.sharded_block(results)
    records["full"] = {"passed": False, "status": "failed: RuntimeError: no"}
    assert report.sharded_block(results).strip() == report.NO_GPU
    device.values = {}
    assert report.sharded_block(results).strip() == report.NO_GPU


def test_cpu_memory_of_a_full_step() -> None:
    whole = sharded_steps.host_bytes(HUNYUAN_VIDEO_15, 54)
    # Twelve bytes for each of 8.3 B weights, and what powers of two add to masters and gradients.
    assert 12 * 8.326e9 < whole < 14 * 8.326e9
    one = sharded_steps.host_bytes(TINY, 1)
    assert sharded_steps.host_bytes(TINY, 5) - one == 4 * (sharded_steps.host_bytes(TINY, 2) - one)


@pytest.mark.parametrize(
    ("free", "seconds", "left", "expected"),
    [
        pytest.param(200e9, 4.0, 100.0, (54, "nothing"), id="all"),
        pytest.param(60e9, 4.0, 100.0, (25, "CPU memory"), id="little-memory"),
        pytest.param(200e9, 4.0, 10.0, (11, "time"), id="little-time"),
        pytest.param(1e9, 4.0, 100.0, (1, "CPU memory"), id="one-in-any-case"),
        pytest.param(None, 4.0, math.inf, (54, "nothing"), id="nothing-known"),
    ],
)
def test_layers(free: float | None, seconds: float, left: float, expected: tuple[int, str]) -> None:
    given = None if free is None else int(free)
    found = sharded_steps.choose_layers(HUNYUAN_VIDEO_15, given, probe_seconds=seconds, left=left)
    assert found == expected


def test_free_memory_is_the_containers(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable:  900 kB\n", "utf-8")
    assert sharded_steps.free_host_memory(tmp_path) == 900 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n", "utf-8")
    assert sharded_steps.free_host_memory(tmp_path) == 900 * 1024
    (group / "memory.max").write_text("500000\n", "utf-8")
    (group / "memory.current").write_text("300000\n", "utf-8")
    (group / "memory.stat").write_text("anon 100000\ninactive_file 150000\n", "utf-8")
    assert sharded_steps.free_host_memory(tmp_path) == 350000
