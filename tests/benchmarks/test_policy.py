"""The policy benchmark: its FLOPs, its peers against diffusers, its refusals, and a smoke run of the command."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import attention, harness, peers, policy, policy_report, workload
from benchmarks.peers import Velocity
from benchmarks.policy import Cell, PolicyRun
from benchmarks.workload import HUNYUAN_VIDEO_15, SMOKE, TINY, forward_work, random_inputs, random_transformer
from sage_fast.models.hunyuan15.velocity import velocity as diffusers_velocity
from sage_fast.policy.lora import trainable_parameters
from sage_fast.records import PromptEmbeds

CPU = torch.device("cpu")
SHAPE = SMOKE[1]


def run_of(cells: list[Cell] | None = None, budget: float = 100.0, **result: Any) -> PolicyRun:
    known = {"matmul": {"tflop_per_s": 0.01}} | result
    return PolicyRun(device=CPU, smoke=True, budget=budget, save=lambda result: None, cells=cells or [], result=known)


def tiny(dtype: torch.dtype = torch.float64, num_layers: int = 2) -> HunyuanVideo15Transformer3DModel:
    transformer = random_transformer(TINY | {"num_layers": num_layers}, CPU, dtype)
    policy.adapt(transformer)
    return transformer


def wide(prompt: PromptEmbeds) -> PromptEmbeds:
    return PromptEmbeds(text=prompt.text.double(), glyph=prompt.glyph.double())


def test_the_model_is_the_true_one() -> None:
    with torch.device("meta"):
        transformer = HunyuanVideo15Transformer3DModel(**HUNYUAN_VIDEO_15)
    assert sum(p.numel() for p in transformer.parameters()) == 8_326_608_160
    # `to_empty` would leave a buffer without its value.
    assert not list(transformer.buffers())


@pytest.mark.parametrize(
    ("shape", "linear", "attention_work"),
    [pytest.param(workload.A, 99.4, 147.6, id="A"), pytest.param(workload.B, 179.5, 482.0, id="B")],
)
def test_work_at_full_size(shape: workload.Shape, linear: float, attention_work: float) -> None:
    work = forward_work(HUNYUAN_VIDEO_15, shape)
    assert work.linear / 1e12 == pytest.approx(linear, abs=0.05)
    assert work.attention / 1e12 == pytest.approx(attention_work, abs=0.05)


def test_work_is_what_torch_counts() -> None:
    """The packed forward has no operation that the closed form lacks, and the other way round."""
    with torch.device("meta"):
        transformer = HunyuanVideo15Transformer3DModel(**TINY)
        prompt = PromptEmbeds(text=torch.empty(SHAPE.text_tokens, 48), glyph=torch.empty(0, 32))
        latents = torch.empty(1, *SHAPE.latent)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), peers.packed(transformer, backend="cudnn") as velocity:
        velocity(latents, torch.tensor([0.64]), prompt)
    assert counter.get_total_flops() == forward_work(TINY, SHAPE).total


def test_packed_peer_is_diffusers_without_padding() -> None:
    """In float64, velocity and LoRA gradients of P2 with checkpointing are those of diffusers' own forward."""
    transformer = tiny()
    inputs = random_inputs(SHAPE, TINY, CPU, torch.float64)
    expected = diffusers_velocity(transformer, inputs.latents.double(), inputs.sigma, [inputs.conditional])
    expected.backward(inputs.noise.double())
    gradients = {name: p.grad for name, p in trainable_parameters(transformer).items() if p.grad is not None}
    transformer.zero_grad(set_to_none=True)
    with peers.packed(transformer, backend="reference", checkpointing=True) as velocity:
        out = velocity(inputs.latents, inputs.sigma, inputs.conditional)
        out.backward(inputs.noise.double())
        # Rotary embeddings are float32 in diffusers.
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        given = {name: p.grad for name, p in trainable_parameters(transformer).items()}
        assert policy.pooled_error(given, gradients) < 1e-5


def test_padded_peer_passes_what_the_pipeline_passes() -> None:
    transformer = random_transformer(TINY, CPU, torch.float32)
    inputs = random_inputs(SHAPE, TINY, CPU, torch.float32)
    seen: dict[str, Any] = {}
    hook = transformer.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    with torch.no_grad(), peers.padded(transformer, SHAPE) as velocity:
        out = velocity(inputs.latents, inputs.sigma, inputs.conditional)
    hook.remove()
    lengths = [seen[name].shape[1] for name in ("encoder_hidden_states", "encoder_hidden_states_2", "image_embeds")]
    assert lengths == list(SHAPE.padding) and int(seen["encoder_attention_mask"].sum()) == SHAPE.text_tokens
    with torch.no_grad():
        expected = diffusers_velocity(transformer, inputs.latents, inputs.sigma, [inputs.conditional])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compiler", [None, "eager"])
def test_a_peer_leaves_the_transformer_as_it_was(compiler: str | None) -> None:
    transformer = tiny(torch.bfloat16)
    processors = transformer.attn_processors
    masters = {name: p.data_ptr() for name, p in trainable_parameters(transformer).items()}
    with pytest.raises(KeyError), peers.packed(transformer, backend="sdpa", compiler=compiler):
        assert transformer.attn_processors != processors
        assert {p.dtype for p in trainable_parameters(transformer).values()} == {torch.bfloat16}
        raise KeyError
    assert transformer.attn_processors == processors
    assert {name: p.data_ptr() for name, p in trainable_parameters(transformer).items()} == masters


def test_all_blocks_share_one_compilation() -> None:
    """Else the compiled peer would give up after eight blocks and run the rest uncompiled."""
    transformer = random_transformer(TINY | {"num_layers": 10}, CPU, torch.bfloat16)
    inputs = random_inputs(SHAPE, TINY, CPU, torch.bfloat16)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), peers.packed(transformer, backend="sdpa", compiler="eager") as velocity:
        velocity(inputs.latents, inputs.sigma, inputs.conditional)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@contextmanager
def wrong(transformer: HunyuanVideo15Transformer3DModel, **options: Any) -> Iterator[Velocity]:
    """A fused forward that is off by 2 %."""

    def velocity(latents: Tensor, sigma: Tensor, prompt: PromptEmbeds) -> Tensor:
        with peers.packed(transformer, backend="sdpa", cast_adapters=False) as right:
            return 1.02 * right(latents, sigma, prompt)

    yield velocity


def test_a_red_parity_leaves_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "fused", wrong)
    run = run_of([Cell(step="forward", shape="B", contender=contender) for contender in ("P2", "ours")])
    policy.parity_stage(run)
    policy.cells_stage(run)
    assert list(run.red) == ["ours"] and "relative error" in run.red["ours"]
    assert run.result["policy_cells"]["forward B ours"]["status"] == "skipped: its parity failed"
    assert run.result["policy_cells"]["forward B P2"]["status"] == "done"
    assert not policy_report.succeeded(run.result)
    # Even a figure that slipped in is not shown.
    run.result["policy_cells"]["forward B ours"] = run.result["policy_cells"]["forward B P2"]
    (line,) = [line for line in policy_report.goal_lines(run.result) if line.startswith("forward B vs P2 ")]
    assert "PARITY FAILED (ours), no figure" in line and "1.00x" not in line


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_forward_that_is_wrong_at_full_depth_only_is_not_timed(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def constant(transformer: HunyuanVideo15Transformer3DModel, **options: Any) -> Iterator[Velocity]:
        yield lambda latents, sigma, prompt: torch.full_like(latents, value)

    monkeypatch.setattr(peers, "fused", constant)
    run = run_of([Cell(step="forward", shape="B", contender=contender) for contender in ("P2", "ours")])
    policy.cells_stage(run)
    assert "differs from P2" in run.red["ours"]
    assert "seconds" not in run.result["policy_cells"]["forward B ours"]
    json.dumps(run.result, allow_nan=False)


def test_running_out_of_memory_ends_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded, frees its gradients and the clock, and the next measurement is made."""
    calls = []

    def hungry(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB.")

    monkeypatch.setitem(policy.STEPS, "rollout", hungry)
    run = run_of([Cell(step=step, shape="B", contender="P2") for step in ("rollout", "forward")])
    policy.cells_stage(run)
    first, second = run.result["policy_cells"].values()
    assert first["status"] == "out of memory: CUDA out of memory. Tried to allocate 80 GiB."
    assert second["status"] == "done" and not harness._started
    run.result["policy_parity"] = {}
    assert policy_report.succeeded(run.result)


def test_a_failure_is_recorded_and_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setitem(policy.STEPS, "rollout", broken)
    run = run_of([Cell(step="rollout", shape="B", contender="P2")], policy_parity={})
    policy.cells_stage(run)
    assert run.result["policy_cells"]["rollout B P2"]["status"] == "failed: RuntimeError: no kernel image"
    assert not policy_report.succeeded(run.result)


def test_what_the_budget_does_not_hold_is_skipped_and_says_so() -> None:
    run = run_of([Cell(step="train", shape="B", contender="P2")], matmul={"tflop_per_s": 1e-9})
    policy.cells_stage(run)
    assert "skipped: it takes about" in run.result["policy_cells"]["train B P2"]["status"]
    late = run_of(budget=0.0)
    policy.run_stages(late)
    assert "policy parity: not run, the budget is used up" in policy_report.table(late.result, smoke=True)
    assert not policy_report.succeeded(late.result)


def test_fewer_rounds_where_time_is_short() -> None:
    def rounds(limit: float, left: float) -> int:
        return policy.rounds_within(lambda: None, 5, limit=limit, left=left).rounds

    assert [rounds(10.0, 10.0), rounds(-1.0, 10.0), rounds(-1.0, -1.0)] == [5, policy.FEWEST_ROUNDS, 1]


def test_every_peer_is_known_before_what_is_compared_with_it() -> None:
    seen: set[tuple[str, bool]] = set()
    for cell in policy.CELLS:
        if cell.contender == "P2" and cell.step != "rollout":
            seen.add((cell.shape, cell.trains))
        assert cell.step == "rollout" or (cell.shape, cell.trains) in seen, cell.name
    assert len({cell.name for cell in policy.CELLS}) == len(policy.CELLS)


def test_split_and_single_pass_give_the_gradient_of_the_pair() -> None:
    transformer = tiny(torch.float32)
    inputs = random_inputs(SHAPE, TINY, CPU, torch.float32)
    gradients = []
    for step in ("train", "train_split", "single_pass"):
        with peers.packed(transformer, backend="sdpa") as velocity:
            policy.STEPS[step](velocity, inputs, run_of().step_kernels())
            gradients.append({name: p.grad for name, p in trainable_parameters(transformer).items()})
    pair = {name: grad for name, grad in gradients[0].items() if grad is not None}
    assert len(pair) == len(trainable_parameters(transformer))
    assert all(policy.pooled_error(other, pair) < 1e-4 for other in gradients[1:])
    assert policy.pooled_error({}, pair) == attention.WORST


def measured(**seconds: float) -> dict[str, Any]:
    cells = {
        name.replace("_", " "): {"status": "done", "seconds": {"median": value}, "mfu": 0.7, "peak_memory_gb": 70.0}
        for name, value in seconds.items()
    }
    return {"policy_cells": cells, "policy_failures": {}}


def test_goals() -> None:
    result = measured(forward_B_ours=1.0, forward_B_P2=1.25, rollout_A_ours=2.0, train_A_ours=3.0, train_B_ours=9.0)
    lines = {line[:48].strip(): " ".join(line[48:].split()) for line in policy_report.goal_lines(result)}
    assert lines["forward B vs P2"] == "1.25x 1.30x 1.20x within floor"
    assert lines["forward B vs P1"] == "- 2.00x 1.60x not measured"
    assert lines["MFU forward B"] == "70.0 % 72.0 % 65.0 % within floor"
    assert lines["video A: rollout, anchor, train"] == "140 s 105 s 154 s within floor"
    assert lines["peak memory B, pair"] == "70.0 GB 60.0 GB 80.0 GB within floor"
    slow = measured(forward_A_ours=1.0, forward_A_P2=0.9)
    assert any("0.90x" in line and "MISSES FLOOR" in line for line in policy_report.goal_lines(slow))


def test_a_wrong_attention_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.gradients

    def scaled(tensors: list[Tensor], backend: str) -> list[Tensor]:
        return [(1.01 if backend == "sdpa" else 1.0) * tensor for tensor in right(tensors, backend)]

    monkeypatch.setattr(attention, "gradients", scaled)
    run = run_of()
    policy.attention_stage(run)
    assert {row["backend"] for row in run.result["attention_rows"]} == {"reference"}
    lines = policy_report.table(run.result, smoke=True).splitlines()
    assert any(line.startswith("sdpa") and "PARITY FAILED" in line for line in lines)
    assert not policy_report.succeeded(run.result | {"policy_parity": {}})
    assert "NVIDIA" in run.result["attention"]["flash3"]["status"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    with pytest.raises(SystemExit, match="run with --smoke"):
        policy.main([])


@pytest.mark.slow
def test_smoke_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every contender and every step on the tiny model."""
    file = tmp_path / "policy.json"
    assert policy.main(["--smoke", "--output", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "mean nothing" in printed and "forward B vs P2c" in printed
    assert "target met" not in printed and "MISSES FLOOR" not in printed
    result = json.loads(file.read_text("utf-8"))
    assert {name: cell["status"] for name, cell in result["policy_cells"].items()} == {
        cell.name: "done" for cell in policy.CELLS
    }
    assert result["environment"]["packages"]["torch"] == torch.__version__
    for name in ("forward B ours", "train B ours", "single_pass A ours"):
        assert 0 < result["policy_cells"][name]["difference_from_p2"] < policy.FULL_DEPTH
    rows = {(row["backend"], row["shape"], row["direction"]) for row in result["attention_rows"]}
    assert {("sdpa", "A", "forward"), ("sdpa", "B", "backward")} <= rows
