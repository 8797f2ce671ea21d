"""The guard holds here, and every one of its budgets sees a deliberate regression and
is named.
"""

import fnmatch
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import __main__, budgets, guard, report, results
from benchmarks.budgets import judge, read_budgets
from benchmarks.counts import processes, traced
from benchmarks.session import parser_of
from sage_fast.models import block as shared_block
from sage_fast.models import fused as fused_module
from sage_fast.models.fused import LocalAttention
from sage_fast.models.hunyuan15 import block as block_module
from sage_fast.models.hunyuan15.block import Block, _Stream
from sage_fast.objectives.grpo import TwoPhase
from sage_fast.objectives.single_pass import SinglePass
from sage_fast.optim import OptimizerSet
from tests.benchmarks.made_up import gpu_result, quantiles, timed

Patch = pytest.MonkeyPatch

KERNELS = [("sde_step forward", "ours"), ("sde_step forward", "eager")]
KERNELS += [("policy_loss backward", who) for who in ("ours", "eager")]

BANDED = ("imports.seconds/", "imports.standard_modules/", "commands.")
"""Budgets that do not count exactly, so their limits have room."""
_PINNED = (processes.ROOT / "constraints.txt").read_text("utf-8").split()
if f"torch=={torch.__version__.partition('+')[0]}" not in _PINNED:
    BANDED += ("host.",)  # calls inside torch are counted with ours


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "commands" else ())
        for name in budgets.MEASUREMENTS
    ],
)
def test_every_budget_holds_and_no_exact_limit_has_room(group: str) -> None:
    """A limit one per cent above what is counted would hide a small step back."""
    found = judge(read_budgets(), [group])
    assert found
    assert guard.regressions(found) == ""
    for verdict in found:
        if verdict.measured and not verdict.budget.name.startswith(BANDED):
            assert verdict.measured == pytest.approx(verdict.budget.limit, rel=0.01), (
                verdict.budget.name
            )


# --------------------------------------------------------------------------------------
# deliberate regressions

Change = Callable[[Patch, Path], None]
Method = tuple[Any, str]

ROTATED = vars(Block)["rotated"]

STAGES = ("begin", "velocity", "measure", "accumulate")
PHASES = list(itertools.product((TwoPhase, SinglePass), STAGES))


def before(act: Callable[..., object], *methods: Method) -> Change:
    """Something more, done with the arguments of every call of these methods."""

    def apply(patch: Patch, folder: Path) -> None:
        for owner, name in methods:
            method = getattr(owner, name)

            def more(*args: Any, method: Any = method, **options: Any) -> Any:
                act(*args)
                return method(*args, **options)

            patch.setattr(owner, name, more)

    return apply


def copy_and_thin_product(
    block: Any, grads: tuple[Tensor, ...] = (), *args: Any
) -> None:
    x = grads[0] if grads else block.video.x
    torch.mm((x + 0)[0], x.new_empty(x.shape[2], 8))


def something_kept(patch: Patch, folder: Path) -> None:
    forward = shared_block._BlockFunction.forward

    def keeping(ctx: Any, made: Any, *tensors: Tensor) -> Any:
        result = forward(ctx, made, *tensors)
        ctx.save_for_backward(*ctx.to_save, tensors[0].clone())
        return result

    patch.setattr(shared_block._BlockFunction, "forward", staticmethod(keeping))


def outlives(stream: Any, *args: Any) -> None:
    stream.outlives = stream.x.clone()


@torch.no_grad()
def additional_forward(gradient: Any, *args: Any) -> None:
    policy = gradient.policy
    latents = torch.zeros(1, policy.transformer.config["out_channels"], 1, 2, 2)
    policy.velocity(latents, torch.ones(1), [policy.uncond])


def collective(optimizers: OptimizerSet) -> None:
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=2
    )
    torch.distributed.all_reduce(torch.zeros(1))
    torch.distributed.destroy_process_group()


def rewritten_kernels(**values: Any) -> Change:
    """Records of compiled kernels with these entries for sm_90."""

    def apply(patch: Patch, folder: Path) -> None:
        content = json.loads(budgets.RECORDS.read_text("utf-8"))
        content["builds"] = [
            row | values for row in content["builds"] if row["arch"] == 90
        ]
        (folder / "aot.json").write_text(json.dumps(content))
        patch.setattr(budgets, "RECORDS", folder / "aot.json")

    return apply


def operators_for_launchers(patch: Patch, folder: Path) -> None:
    patch.setattr(block_module, "without_graph", lambda kernels, device: kernels)
    patch.setattr(fused_module, "call_forward", torch.ops.sage_fast.attention)
    patch.setattr(fused_module, "call_backward", torch.ops.sage_fast.attention_backward)


SLOW_IMPORT = "import sage_fast.trainer\nsum(range(10**8))\n"
SLOW_COMMAND = """
from time import process_time
before = process_time()
import torch
enough = before + 6 * (process_time() - before)
while process_time() < enough:
    pass
"""
"""Five imports of torch longer, on a busy machine too: limits are in imports of torch,
and a plan has two to spare.
"""


def begins_with(lines: str) -> Change:
    """A copy of the package, whose import runs these lines."""

    def apply(patch: Patch, folder: Path) -> None:
        shutil.copytree(processes.ROOT / "sage_fast", folder / "sage_fast")
        for name in ("kernels", "configs"):
            (folder / name).symlink_to(processes.ROOT / name)
        with (folder / "sage_fast/__init__.py").open("a") as module:
            module.write(lines)
        patch.setattr(processes, "ROOT", folder)
        # The slower of two would be seen as well.
        patch.setattr(processes, "ROUNDS", 1)

    return apply


MUTATIONS: dict[str, tuple[Change, list[str]]] = {
    "a copy and a thin product": (
        before(copy_and_thin_product, (Block, "forward"), (Block, "backward")),
        [
            "block.forward_*bytes/*",
            "block.backward_*bytes/*",
            "block.*flops/*",
            "block.*launches/*",
            "forward.flops*",
        ],
    ),
    "a rotation twice": (
        before(ROTATED.compute, (ROTATED, "compute")),
        ["block.recomputed_bytes/*"],
    ),
    "something kept": (something_kept, ["block.kept/*"]),
    "something kept too long": (
        before(outlives, (_Stream, "forward"), (_Stream, "residual_backward")),
        ["block.*_peak/*"],
    ),
    "a mask that the host reads": (
        before(
            lambda attention, q, *rest: q.new_ones(q.shape[1], q.shape[1]).sum().item(),
            (LocalAttention, "forward"),
        ),
        ["*.largest_tensor*", "block.host_syncs/*", "forward.host_syncs"],
    ),
    "another model": (
        lambda patch, folder: patch.setitem(
            traced.HUNYUAN_VIDEO_15, "num_refiner_layers", 1
        ),
        ["forward.parameters"],
    ),
    "additional forwards": (
        before(additional_forward, *PHASES),
        ["iteration.forwards/*", "iteration.forwards_elsewhere/*"],
    ),
    "a second update": (
        before(
            lambda optimizers, rate: optimizers.optimizers[0].step(),
            (OptimizerSet, "step"),
        ),
        ["iteration.optimizer_updates/*"],
    ),
    "a sync in every phase": (
        before(
            lambda gradient, *args: (
                next(gradient.policy.transformer.parameters()).sum().item()
            ),
            *PHASES,
        ),
        ["loop.host_syncs/*"],
    ),
    "a collective": (
        before(collective, (OptimizerSet, "clip_gradients")),
        ["loop.collectives/*"],
    ),
    "worse kernels": (
        rewritten_kernels(
            registers=255, local=8, spills=2, loads={}, stores={}, kernel="another"
        ),
        ["kernels.*"],
    ),
    "operators for launchers": (
        operators_for_launchers,
        ["host.forward/*", "host.backward/*"],
    ),
    "a slow import": (begins_with(SLOW_IMPORT), ["imports.*"]),
    "a slow command": (begins_with(SLOW_COMMAND), ["commands.*"]),
}
"""Regression -> (how it is done, the budgets that must see it in every case)."""


def seen_by(patterns: list[str]) -> set[str]:
    return {
        b.name
        for b in read_budgets()
        if any(fnmatch.fnmatchcase(b.name, pattern) for pattern in patterns)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.timeout(900)
            if "commands.*" in MUTATIONS[name][1]
            else (),
        )
        for name in MUTATIONS
    ],
)
def test_a_deliberate_regression_is_seen_and_named(
    name: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    apply, patterns = MUTATIONS[name]
    expected = seen_by(patterns)
    groups = sorted({budget.split(".")[0] for budget in expected})
    apply(monkeypatch, tmp_path)
    found = judge(read_budgets(), groups)
    failed = {verdict.budget.name for verdict in found if not verdict.ok}
    assert failed >= expected, sorted(expected - failed)
    report = guard.regressions(found)
    assert all(name in report for name in expected)


def test_every_budget_has_its_regression() -> None:
    every = {budget.name for budget in read_budgets()}
    seen = set().union(*(seen_by(patterns) for _, patterns in MUTATIONS.values()))
    assert every == seen
    assert all(
        seen_by([pattern]) for _, patterns in MUTATIONS.values() for pattern in patterns
    )


# --------------------------------------------------------------------------------------
# the file and the command


def test_budgets_and_measurements_are_the_same() -> None:
    every = read_budgets()
    with pytest.raises(RuntimeError, match=re.escape("no limit for kernels.spills")):
        judge(
            [budget for budget in every if budget.name != "kernels.spills"], ["kernels"]
        )
    unmeasured = replace(every[0], name="kernels.colours")
    (failed,) = [
        verdict
        for verdict in judge([*every, unmeasured], ["kernels"])
        if not verdict.ok
    ]
    assert failed.budget is unmeasured and failed.measured is None


@pytest.mark.parametrize("status", [0, 1])
def test_the_job_of_a_cluster_ends_with_the_status_of_the_guard(
    status: int, tmp_path: Path
) -> None:
    """Whatever those of the measurements are, whose files the guard reads."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@"\n[ "$3" = guard ] && exit {status}\nexit 9\n'
    )
    python.chmod(0o755)
    job = budgets.BUDGETS.with_name("guard.sbatch")
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "OUTPUT": "out"}
    done = subprocess.run(
        ["bash", str(job)], env=environment, capture_output=True, text=True, check=False
    )
    device, kernels, last = done.stdout.splitlines()
    assert done.returncode == status and last.startswith("-m benchmarks guard "), (
        done.stderr
    )
    assert device.endswith("--output_file out/gpu.json") and kernels.endswith(
        "--benchmark-autosave --benchmark-compare"
    )
    parser_of("device", "").parse_args(device.split()[3:])
    assert last.split()[3:] == ["--result", "out/gpu.json"]


def gpu_limits() -> list[str]:
    return [limit.name for limit in budgets.timing_limits("gpu")]


def test_ratios_are_those_of_what_passed() -> None:
    found = results.ratios(gpu_result())
    assert found["transformer forward B / P2"] == pytest.approx(0.75)
    # The single pass needs no rollout beside it; alone it stands beside the peers'
    # training step.
    assert found["transformer single_pass B / P2"] == pytest.approx(1.6 / 2.4)
    assert found["iteration 2 videos of 2 steps B seconds per video"] == pytest.approx(
        32.0
    )
    assert found["iteration 2 videos of 2 steps B GB of memory"] == 41.0
    assert found[
        "iteration 2 videos of 2 steps B GB of memory / planned"
    ] == pytest.approx(41.0 / 45.0)
    assert not any(
        "P2c" in name or "wrong" in name or name.endswith("/ ours") for name in found
    )


@pytest.mark.parametrize("fault", ["none", "slow", "red", "absent"])
def test_a_timing_is_there_and_within_its_limit(
    fault: str, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure that has doubled, has failed its parity or was not measured is named."""
    run = gpu_result()
    name = "transformer forward B ours"
    run["cells"] |= {
        f"kernels {op} B {who}": timed("kernels", op, "B", who, 1e-5)
        for op, who in KERNELS
    }
    if fault == "slow":
        run["cells"][name]["rows"][0]["seconds"] = quantiles(0.42)
    elif fault == "red":
        run["cells"]["transformer parity ours"]["passed"] = False
    elif fault == "absent":
        del run["cells"][name]
    (tmp_path / "run.json").write_text(json.dumps(run))
    status = guard.main(["--only", "timings", "--result", str(tmp_path / "run.json")])
    printed = capsys.readouterr().out
    named = [limit for limit in gpu_limits() if printed.count(limit) > 1]
    forward = ["transformer forward B / P2", "transformer forward B / P1"]
    ours = [limit for limit in gpu_limits() if limit.startswith("transformer")]
    assert named == {"none": [], "slow": forward, "red": ours, "absent": forward}[fault]
    assert status == (fault != "none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(gpu_result() | {"smoke": True}), " is not a full run"),
        ("{}", ' has no "environment" and "cells"'),
        (
            '{"environment": {"gpu": null}, "cells": []}',
            ' has no "environment" and "cells"',
        ),
        ("[]", ' has no "environment" and "cells"'),
        ('{"cells"', " is not valid JSON"),
    ],
    ids=["smoke", "empty", "cells", "list", "damaged"],
)
def test_a_run_that_is_not_a_full_one_is_refused_before_anything_is_counted(
    text: str,
    words: str,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(budgets, "judge", None)
    (tmp_path / "run.json").write_text(text)
    assert guard.main(["--result", str(tmp_path / "run.json")]) == 1
    assert f"error: {tmp_path}/run.json{words}" in capsys.readouterr().err
    if "full" not in words:
        assert report.main([str(tmp_path / "run.json")]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the timings are those of a CPU")
@pytest.mark.parametrize(
    ("slow", "runs", "ok"), [(0, 1, True), (1, 2, True), (3, 3, False)]
)
def test_what_is_slow_on_a_cpu_is_measured_again(
    slow: int, runs: int, ok: bool, monkeypatch: Patch
) -> None:
    limits = {limit.name: limit.limit for limit in budgets.timing_limits("cpu")}
    measured = []

    def ratios(run: dict[str, Any]) -> dict[str, float]:
        measured.append(run)
        share = 1.02 if len(measured) <= slow else 0.99
        return {name: share * limit for name, limit in limits.items()}

    monkeypatch.setattr(guard, "measure", lambda: {"environment": {"gpu": None}})
    monkeypatch.setattr(results, "ratios", ratios)
    verdicts = guard.judge_timings(None)
    assert len(measured) == runs and len(verdicts) == len(limits)
    assert [verdict.ok for verdict in verdicts] == [ok] * len(limits)


def test_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch, tmp_path: Path
) -> None:
    assert __main__.main(["guard", "--only", "kernels"]) == 0
    assert "All 12 budgets hold." in capsys.readouterr().out
    rewritten_kernels(spills=2)(monkeypatch, tmp_path)
    assert guard.main(["--only", "kernels"]) == 1
    lines = capsys.readouterr().out.split("REGRESSED\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == ["budget", "kernels.spills", "guards"]
