"""The guard holds here, and every one of its budgets sees a deliberate regression and is named."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import __main__, budgets, guard
from benchmarks.budgets import judge, read_budgets
from benchmarks.counts import processes
from benchmarks.session import parser_of
from sage_fast.gradient import TwoPhaseGradient
from sage_fast.models.hunyuan15 import block as block_module
from sage_fast.models.hunyuan15.block import LocalAttention
from sage_fast.models.hunyuan15.fused import Acceleration
from sage_fast.optim import OptimizerSet
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.single_pass import SinglePassGradient

Patch = pytest.MonkeyPatch

BANDED = ("imports.seconds/", "imports.standard_modules/")
"""Budgets that do not count exactly, so their limits have room."""
_PINNED = (processes.ROOT / "constraints.txt").read_text("utf-8").split()
if f"torch=={torch.__version__.partition('+')[0]}" not in _PINNED:
    BANDED += ("host.",)  # calls inside torch are counted with ours


@pytest.mark.parametrize("group", budgets.MEASUREMENTS)
def test_every_budget_holds_and_no_exact_limit_has_room(group: str) -> None:
    """A limit one per cent above what is counted would hide a small step back."""
    found = judge(read_budgets(), [group])
    assert found
    assert guard.regressions(found) == ""
    for verdict in found:
        if verdict.measured and not verdict.budget.name.startswith(BANDED):
            assert verdict.measured == pytest.approx(verdict.budget.limit, rel=0.01), verdict.budget.name


# ------------------------------------------------------------------------------------------ deliberate regressions


def an_extra_copy(patch: Patch, folder: Path) -> None:
    method = block_module._Block.normed_inputs
    patch.setattr(block_module._Block, "normed_inputs", lambda self: [y + 0 for y in method(self)])


def a_copied_gradient(patch: Patch, folder: Path) -> None:
    method: Any = block_module._Block.backward
    patch.setattr(block_module._Block, "backward", lambda self, grad, *a, **k: method(self, grad + 0, *a, **k))


def a_thin_product(patch: Patch, folder: Path) -> None:
    forward, backward = block_module._Block.forward, block_module._Block.backward

    def thin(x: Tensor) -> None:
        torch.mm(x[0], x.new_empty(x.shape[2], 8))

    patch.setattr(block_module._Block, "forward", lambda self: (thin(self.video.x), forward(self))[1])
    patch.setattr(
        block_module._Block, "backward", lambda self, grad, *a, **k: (thin(grad), backward(self, grad, *a, **k))[1]
    )


def a_rotation_twice(patch: Patch, folder: Path) -> None:
    method: Any = block_module._Block.rotate
    patch.setattr(block_module._Block, "rotate", lambda self, *args: (method(self, *args), method(self, *args))[1])


def a_padded_token(patch: Patch, folder: Path) -> None:
    attend = LocalAttention.forward

    def padded(self: LocalAttention, q: Tensor, k: Tensor, v: Tensor, num_video: int) -> tuple[Tensor, Tensor]:
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (q, k, v))
        out, lse = attend(self, q, k, v, num_video)
        return out[:, :-1].contiguous(), lse[..., :-1].contiguous()

    patch.setattr(LocalAttention, "forward", padded)


def a_padded_prompt(patch: Patch, folder: Path) -> None:
    embed: Any = Acceleration.embed_text
    patch.setattr(
        Acceleration, "embed_text", lambda self, *args: torch.nn.functional.pad(embed(self, *args), (0, 0, 0, 1))
    )


def recomputed_attention(patch: Patch, folder: Path) -> None:
    backward = LocalAttention.backward

    def again(self: LocalAttention, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
        self.forward(q, k, v, args[-1])
        return backward(self, grad, q, k, v, *args)

    patch.setattr(LocalAttention, "backward", again)


def something_kept(patch: Patch, folder: Path) -> None:
    forward = block_module._BlockFunction.forward

    def keeping(ctx: Any, settings: Any, streams: Any, rotary: Any, x: Tensor, *tensors: Tensor) -> Any:
        result = forward(ctx, settings, streams, rotary, x, *tensors)
        ctx.save_for_backward(*ctx.to_save, x.clone())
        return result

    patch.setattr(block_module._BlockFunction, "forward", staticmethod(keeping))


def a_mask(patch: Patch, folder: Path) -> None:
    attend = LocalAttention.forward

    def masked(self: LocalAttention, q: Tensor, *args: Any) -> Any:
        torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device)
        return attend(self, q, *args)

    patch.setattr(LocalAttention, "forward", masked)


def a_sync_in_a_block(patch: Patch, folder: Path) -> None:
    attend = LocalAttention.forward

    def waiting(self: LocalAttention, q: Tensor, *args: Any) -> Any:
        q.sum().item()
        return attend(self, q, *args)

    patch.setattr(LocalAttention, "forward", waiting)


def another_model(patch: Patch, folder: Path) -> None:
    patch.setitem(budgets.HUNYUAN_VIDEO_15, "num_refiner_layers", 1)


def in_every_method_of_the_gradient(patch: Patch, act: Callable[[Any], None]) -> None:
    for gradient in (TwoPhaseGradient, SinglePassGradient):
        for name in ("begin", "velocity", "measure_anchor", "accumulate"):
            method = getattr(gradient, name)

            def wrapped(self: Any, *args: Any, method: Any = method) -> Any:
                act(self.policy)
                return method(self, *args)

            patch.setattr(gradient, name, wrapped)


def additional_forwards(patch: Patch, folder: Path) -> None:
    @torch.no_grad()
    def forward(policy: GuidedPolicy) -> None:
        latents = torch.zeros(1, policy.transformer.config["out_channels"], 1, 2, 2)
        policy.velocity(latents, torch.ones(1), [policy.uncond])

    in_every_method_of_the_gradient(patch, forward)


def a_sync_in_every_phase(patch: Patch, folder: Path) -> None:
    in_every_method_of_the_gradient(patch, lambda policy: next(policy.transformer.parameters()).sum().item())


def a_blocking_copy_in_every_phase(patch: Patch, folder: Path) -> None:
    in_every_method_of_the_gradient(
        patch, lambda policy: torch.ones(3).to(next(policy.transformer.parameters()).device)
    )


def a_second_update(patch: Patch, folder: Path) -> None:
    step = OptimizerSet.step

    def twice(self: OptimizerSet) -> None:
        self.optimizers[0].step()
        step(self)

    patch.setattr(OptimizerSet, "step", twice)


def a_collective(patch: Patch, folder: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    clip = OptimizerSet.clip_gradients

    def exchanged(self: OptimizerSet) -> float:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            torch.distributed.all_reduce(torch.zeros(1))
        finally:
            torch.distributed.destroy_process_group()
        return clip(self)

    patch.setattr(OptimizerSet, "clip_gradients", exchanged)


def rewritten_kernels(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Patch, Path], None]:
    """Records of compiled kernels in which every row of sm_90 is changed."""

    def apply(patch: Patch, folder: Path) -> None:
        content = json.loads(budgets.RECORDS.read_text("utf-8"))
        changed = [row | change(row) if row["arch"] == 90 else row for row in content["builds"]]
        assert changed != content["builds"]
        (folder / "aot.json").write_text(json.dumps(content | {"builds": changed}))
        patch.setattr(budgets, "RECORDS", folder / "aot.json")

    return apply


def operators_for_launchers(patch: Patch, folder: Path) -> None:
    patch.setattr(block_module, "without_graph", lambda kernels, device: kernels)
    patch.setattr(block_module, "call_forward", torch.ops.sage_fast.attention)
    patch.setattr(block_module, "call_backward", torch.ops.sage_fast.attention_backward)


def changed_code(*changes: tuple[str, str]) -> Callable[[Patch, Path], None]:
    """A copy of the package with lines appended to some of its files."""

    def apply(patch: Patch, folder: Path) -> None:
        root = processes.ROOT
        shutil.copytree(root / "sage_fast", folder / "sage_fast", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("kernels", "configs"):
            (folder / name).symlink_to(root / name)
        for file, code in changes:
            with (folder / "sage_fast" / file).open("a") as module:
                module.write(f"\n{code}\n")
        patch.setattr(processes, "ROOT", folder)

    return apply


Mutation = tuple[Callable[[Patch, Path], None], list[str]]

MUTATIONS: dict[str, Mutation] = {
    "an extra copy": (an_extra_copy, ["block.forward_bytes/*", "block.launches/*"]),
    "a copied gradient": (a_copied_gradient, ["block.backward_bytes/*", "block.backward_launches/*"]),
    "a thin product": (a_thin_product, ["block.forward_thin_bytes/*", "block.backward_thin_bytes/*"]),
    "a rotation twice": (a_rotation_twice, ["block.recomputed_bytes/*"]),
    "a padded token": (a_padded_token, ["block.forward_flops/*"]),
    "recomputed attention": (recomputed_attention, ["block.backward_flops/*"]),
    "something kept": (something_kept, ["block.kept/*"]),
    "a mask": (a_mask, ["block.largest_tensor/*", "forward.largest_tensor/*"]),
    "a sync in a block": (a_sync_in_a_block, ["block.host_syncs/*", "forward.host_syncs/*"]),
    "a padded prompt": (a_padded_prompt, ["forward.flops/*", "forward.flops_beyond_closed_form/*"]),
    "another model": (another_model, ["forward.parameters"]),
    "additional forwards": (additional_forwards, ["iteration.forwards/*", "iteration.forwards_elsewhere/*"]),
    "a second update": (a_second_update, ["iteration.optimizer_updates/*"]),
    "a sync in every phase": (a_sync_in_every_phase, ["loop.host_syncs/*"]),
    "a blocking copy in every phase": (a_blocking_copy_in_every_phase, ["loop.host_syncs/*"]),
    "a collective": (a_collective, ["loop.collectives/*"]),
    "a register more": (rewritten_kernels(lambda row: {"registers": row["registers"] + 1}), ["kernels.registers/*"]),
    "local memory": (rewritten_kernels(lambda row: {"local": 8}), ["kernels.local_memory"]),
    "a spill": (rewritten_kernels(lambda row: {"spills": 2}), ["kernels.spills"]),
    "a narrow access": (
        rewritten_kernels(lambda row: {"loads": {name: [8, 16] for name in row["loads"]}}),
        ["kernels.narrowest_stream"],
    ),
    "a kernel nobody compiled": (
        rewritten_kernels(lambda row: {"kernel": row["kernel"].replace("adaln_forward[bf16", "adaln_forward[old")}),
        ["kernels.unlisted"],
    ),
    "operators for launchers": (operators_for_launchers, ["host.forward/*", "host.backward/*"]),
    "a heavy import": (
        changed_code(("__init__.py", "import sage_fast.config.schema")),
        ["imports.project_modules/*", "imports.third_party/*", "imports.standard_modules/*"],
    ),
    "a slow import": (changed_code(("__init__.py", "import time\ntime.sleep(1.6)")), ["imports.seconds/*"]),
}
"""Regression -> (how it is done, the budgets that must see it in every case)."""


def seen_by(patterns: list[str]) -> set[str]:
    return {b.name for b in read_budgets() if any(fnmatch.fnmatchcase(b.name, pattern) for pattern in patterns)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_deliberate_regression_is_seen_and_named(name: str, monkeypatch: Patch, tmp_path: Path) -> None:
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
    assert all(seen_by([pattern]) for _, patterns in MUTATIONS.values() for pattern in patterns)


# ------------------------------------------------------------------------------------------ the file and the command


def budget_file(folder: Path, entries: str) -> Path:
    path = folder / "budgets.yaml"
    path.write_text(f"budgets:\n{entries}")
    return path


GOOD = "- {name: kernels.spills, unit: x, guards: g, source: s, limit: 0}\n"


@pytest.mark.parametrize(
    ("entries", "words"), [(GOOD.replace("kernels", "colours"), "not of a group"), (GOOD + GOOD, "more than once")]
)
def test_a_wrong_entry_is_refused(tmp_path: Path, entries: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_budgets(budget_file(tmp_path, entries))


def test_what_is_measured_must_have_a_limit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=re.escape("no limit for kernels.local_memory, kernels.narrowest_stream")):
        judge(read_budgets(budget_file(tmp_path, GOOD)), ["kernels"])


def test_a_limit_that_nothing_measures_fails(tmp_path: Path) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text(budgets.BUDGETS.read_text("utf-8") + GOOD.replace("spills", "colours"))
    (failed,) = [verdict for verdict in judge(read_budgets(file), ["kernels"]) if not verdict.ok]
    assert failed.budget.name == "kernels.colours" and failed.measured is None
    assert " - " in guard.table([failed])


@pytest.mark.parametrize(
    ("rule", "allowed", "refused"), [("at most", [1, 2], [3]), ("at least", [2, 3], [1]), ("exactly", [2], [1, 3])]
)
def test_rules(tmp_path: Path, rule: str, allowed: list[int], refused: list[int]) -> None:
    (budget,) = read_budgets(budget_file(tmp_path, GOOD.replace("0}", "2}").replace("unit", f"rule: {rule}, unit")))
    assert all(budget.holds(value) for value in allowed)
    assert not any(budget.holds(value) for value in refused)
    assert not budget.holds(None)


@pytest.mark.parametrize("status", [0, 1])
def test_the_job_of_a_cluster_ends_with_the_status_of_the_guard(status: int, tmp_path: Path) -> None:
    """Whatever those of the measurements are, whose files the guard reads."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@"\n[ "$3" = guard ] && exit {status}\nexit 9\n')
    python.chmod(0o755)
    job = budgets.BUDGETS.with_name("guard.sbatch")
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "OUTPUT": "out"}
    done = subprocess.run(["bash", str(job)], env=environment, capture_output=True, text=True, check=False)
    device, kernels, last = done.stdout.splitlines()
    assert done.returncode == status and last.startswith("-m benchmarks guard "), done.stderr
    assert device.endswith("--output out/gpu.json") and kernels.endswith("--benchmark-json out/kernels.json")
    parser_of("device", "").parse_args(device.split()[3:])
    assert last.split()[3:] == ["--result", "out/gpu.json", "--kernels", "out/kernels.json"]


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: Patch, tmp_path: Path) -> None:
    assert __main__.main(["guard", "--only", "kernels"]) == 0
    assert "All 11 budgets hold." in capsys.readouterr().out
    MUTATIONS["a spill"][0](monkeypatch, tmp_path)
    assert guard.main(["--only", "kernels"]) == 1
    lines = capsys.readouterr().out.split("REGRESSED\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == ["budget", "kernels.spills", "guards"]
