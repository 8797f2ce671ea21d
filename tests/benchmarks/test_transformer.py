"""The transformer's suite: its FLOPs, its peers against diffusers, its refusals, and a
smoke run of the command.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from benchmarks import contenders, device, results
from benchmarks.contenders import Velocity
from benchmarks.errors import SANE, WORST, pooled_error
from benchmarks.harness import quantiles
from benchmarks.session import Session, Suite, timing
from benchmarks.shapes import HEAD_DIM, HEADS, SMOKE, TINY_HEAD_DIM, TINY_HEADS
from benchmarks.suites import attention, iteration, transformer
from benchmarks.workload import (
    HUNYUAN_VIDEO_15,
    TINY,
    adapt,
    random_inputs,
    random_transformer,
    take_gradients,
)
from sage_fast import accelerate
from sage_fast.kernels import select_kernels
from sage_fast.models.hunyuan15.backbone import velocity as diffusers_velocity
from sage_fast.policy.lora import trainable_parameters
from sage_kernels.ops import gelu_tanh
from tests.benchmarks.made_up import gpu_result

MakeSession = Callable[..., Session]
CPU = torch.device("cpu")
SHAPE = SMOKE[0]


def tiny(dtype: torch.dtype = torch.float64) -> HunyuanVideo15Transformer3DModel:
    transformer = random_transformer(TINY, CPU, dtype)
    adapt(transformer)
    return transformer


def test_attention_is_timed_at_the_models_heads() -> None:
    """Its suite has them by itself, since it imports no model."""
    for config, heads in (
        (HUNYUAN_VIDEO_15, (HEADS, HEAD_DIM)),
        (TINY, (TINY_HEADS, TINY_HEAD_DIM)),
    ):
        assert (config["num_attention_heads"], config["attention_head_dim"]) == heads


def test_packed_peer_is_diffusers_without_padding() -> None:
    """In float64, velocity and LoRA gradients of P2 with checkpointing are those of
    diffusers' own forward.
    """
    transformer = tiny()
    inputs = random_inputs(SHAPE, TINY, CPU, torch.float64)
    expected = diffusers_velocity(
        transformer, inputs.latents.double(), inputs.sigma, [inputs.conditional]
    )
    expected.backward(inputs.noise.double())
    gradients = take_gradients(transformer)
    with contenders.packed(
        transformer, backend="reference", checkpointing=True
    ) as velocity:
        out = velocity(inputs.latents, inputs.sigma, inputs.conditional)
        out.backward(inputs.noise.double())
        # Rotary embeddings are float32 in diffusers.
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        assert pooled_error(take_gradients(transformer), gradients) < 1e-5


def test_padded_peer_passes_what_the_pipeline_passes() -> None:
    transformer = random_transformer(TINY, CPU, torch.float32)
    inputs = random_inputs(SHAPE, TINY, CPU, torch.float32)
    forward = Mock(wraps=transformer.forward)
    with (
        torch.no_grad(),
        patch.object(transformer, "forward", forward),
        contenders.padded(transformer, SHAPE) as velocity,
    ):
        out = velocity(inputs.latents, inputs.sigma, inputs.conditional)
        expected = diffusers_velocity(
            transformer, inputs.latents, inputs.sigma, [inputs.conditional]
        )
    seen = forward.call_args_list[0].kwargs
    lengths = [
        seen[name].shape[1]
        for name in ("encoder_hidden_states", "encoder_hidden_states_2", "image_embeds")
    ]
    assert (
        lengths == list(SHAPE.padding)
        and int(seen["encoder_attention_mask"].sum()) == SHAPE.text_tokens
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_a_peer_leaves_the_transformer_as_it_was() -> None:
    transformer = tiny(torch.bfloat16)
    processors = transformer.attn_processors
    masters = {
        name: p.data_ptr() for name, p in trainable_parameters(transformer).items()
    }
    with pytest.raises(KeyError), contenders.packed(transformer, backend="sdpa"):
        assert transformer.attn_processors != processors
        assert {p.dtype for p in trainable_parameters(transformer).values()} == {
            torch.bfloat16
        }
        raise KeyError
    assert transformer.attn_processors == processors
    assert {
        name: p.data_ptr() for name, p in trainable_parameters(transformer).items()
    } == masters


def test_all_blocks_share_one_compilation() -> None:
    """Else the compiled peer would give up after eight blocks and run the rest
    uncompiled.
    """
    transformer = random_transformer(TINY | {"num_layers": 4}, CPU, torch.bfloat16)
    inputs = random_inputs(SHAPE, TINY, CPU, torch.bfloat16)
    torch._dynamo.utils.counters.clear()
    with (
        torch.no_grad(),
        contenders.packed(transformer, backend="sdpa", compiler="eager") as velocity,
    ):
        velocity(inputs.latents, inputs.sigma, inputs.conditional)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def off_by(factor: float) -> Callable[..., AbstractContextManager[Velocity]]:
    """A fused forward whose velocity is multiplied."""

    @contextmanager
    def fused(
        transformer: HunyuanVideo15Transformer3DModel, **options: Any
    ) -> Iterator[Velocity]:
        with contenders.packed(
            transformer, backend="sdpa", cast_adapters=False
        ) as right:
            yield lambda *inputs: factor * right(*inputs)

    return fused


def run(session: Session, *names: str) -> dict[str, Any]:
    """Parity, and the cells of the transformer with these names."""
    chosen = [timed for timed in transformer.ORDER if timed.name in names]
    with patch.object(transformer, "ORDER", chosen):
        session.run(Suite(name="transformer", cells=transformer.cells))
    return session.cells


def test_a_red_parity_leaves_no_ratio(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "fused", off_by(1.02))
    found = session()
    cells = run(found, "forward B P2", "forward B ours")
    assert (
        cells["transformer parity P2"]["passed"]
        and not cells["transformer parity ours"]["passed"]
    )
    assert (
        cells["transformer forward B ours"]["status"]
        == "skipped: transformer parity ours has not passed"
    )
    assert cells["transformer forward B P2"]["status"] == "done"


def test_a_forward_that_is_wrong_at_full_depth_only_is_not_timed(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "fused", off_by(float("nan")))
    found = session(
        {
            f"transformer parity {who}": {"status": "done", "passed": True}
            for who in ("P1", "P2", "ours")
        }
    )
    cells = run(found, "forward B ours")
    assert "differs from P2" in cells["transformer forward B ours"]["status"]
    assert "rows" not in cells["transformer forward B ours"]
    assert cells["transformer parity ours"]["passed"] is False, (
        "its other figures do not count either"
    )
    json.dumps(found.result, allow_nan=False)


def test_split_and_single_pass_give_the_gradient_of_the_pair() -> None:
    model = tiny(torch.float32)
    inputs = random_inputs(SHAPE, TINY, CPU, torch.float32)
    gradients = []
    for step in ("train", "train_split", "single_pass"):
        with contenders.packed(model, backend="sdpa") as velocity:
            transformer.STEPS[step](velocity, inputs, select_kernels("auto", CPU))
            gradients.append(take_gradients(model))
    pair = gradients[0]
    assert len(pair) == len(trainable_parameters(model))
    assert all(pooled_error(other, pair) < 1e-4 for other in gradients[1:])
    assert pooled_error({}, pair) == WORST


def test_a_wrong_attention_backend_is_not_timed(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention.gradients

    def scaled(tensors: list[Tensor], backend: str) -> list[Tensor]:
        return [
            (1.01 if backend == "sdpa" else 1.0) * tensor
            for tensor in right(tensors, backend)
        ]

    monkeypatch.setattr(attention, "gradients", scaled)
    found = session()
    found.run(device.SUITES["attention"])
    assert {
        who for contenders in results.rows(found.result).values() for who in contenders
    } == {"reference"}
    assert attention.fastest(found.result) is None, "it is not chosen either"
    assert "NVIDIA" in found.cells["attention parity flash3"]["status"], (
        "what is absent is no failure"
    )


def test_the_fastest_backend_that_passed_is_ours(session: MakeSession) -> None:
    result = gpu_result()
    assert attention.fastest(result) == "cudnn", (
        "a wrong one that is faster does not count"
    )
    assert attention.choose(session(result["cells"])) == "cudnn"
    assert attention.choose(session(result["cells"], attention="sdpa")) == "sdpa"
    assert attention.choose(session()) == "sdpa", (
        "before any was measured: what a run would take"
    )


def test_float64_attention_is_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ROWS", 5)
    tensors = attention.draw((1, 13, 2, 8), CPU, torch.float64)
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in tensors[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    expected = [out, *torch.autograd.grad(out, (q, k, v), tensors[3].transpose(1, 2))]
    for given, right in zip(attention.exact(tensors), expected, strict=True):
        torch.testing.assert_close(given, right.transpose(1, 2))


@pytest.mark.parametrize("fault", ["last tokens", "padded keys"])
def test_the_ends_of_attention_are_looked_at(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that forgets the rows of its last tile, and one whose padded keys have
    weight exp(-lse).
    """
    right = attention.gradients

    def wrong(tensors: list[Tensor], backend: str) -> list[Tensor]:
        out, dq, *others = right(tensors, backend)
        rest = tensors[0].shape[1] % 128
        if backend == "sdpa" and fault == "last tokens" and rest == 127:
            dq[:, -rest:] *= 0.5
        if backend == "sdpa" and fault == "padded keys" and rest:
            lse = attention.attention(*tensors[:3], backend="reference")[1]
            dq = dq + 0.0 * (-lse).exp().transpose(1, 2)[..., None]
        return [out, dq, *others]

    monkeypatch.setattr(attention, "gradients", wrong)
    sizes = [(attention.SMALL + remainder, 1) for remainder in attention.REMAINDERS]
    reason = attention.check("sdpa", CPU, sizes, 64)["reason"]
    # Without an offset exp(-lse) is small, and what is padded adds nothing.
    assert (
        reason.count("dq of ")
        == (2 if fault == "last tokens" else reason.count("very negative lse"))
        > 0
    )


@pytest.mark.slow
def test_a_wrong_kernel_costs_its_op(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parity check names it; the forward is right with its plain twin, and the row
    says so.
    """
    launch = gelu_tanh.launch

    def five_per_cent_off(
        function: Any, grid: Any, x: Tensor, out: Tensor, *rest: Any, **options: Any
    ) -> None:
        launch(function, grid, x, out, *rest, **options)
        out.mul_(1.05)

    monkeypatch.setattr(gelu_tanh, "launch", five_per_cent_off)
    monkeypatch.setattr(contenders, "accelerate", partial(accelerate, kernels="triton"))
    cells = run(
        session({"kernels parity gelu_tanh": {"status": "done", "passed": False}}),
        "forward B ours",
    )
    (row,) = cells["transformer forward B ours"]["rows"]
    assert (
        row["note"] == "without the kernels of gelu_tanh"
        and cells["transformer parity ours"]["passed"]
    )


def test_a_peer_fails_alone(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is compared with float64 on two layers and timed, where P2 cannot be."""
    monkeypatch.setattr(contenders, "packed", lambda *arguments, **options: 1 // 0)
    found = session()
    cells = run(found, "forward B P2", "forward B ours")
    assert cells["transformer parity P2"]["status"].startswith(
        "failed: ZeroDivisionError"
    )
    assert cells["transformer parity ours"]["bounds"]["velocity"] == SANE
    assert (
        cells["transformer forward B P2"]["status"]
        == "skipped: transformer parity P2 has not passed"
    )
    assert (
        cells["transformer forward B ours"]["rows"][0]["note"]
        == "not compared with P2 at this size"
    )


@pytest.mark.parametrize(
    ("budget", "warm"), [(200.0, "done"), (50.0, "skipped: the time is used up")]
)
def test_a_warm_iteration_begins_where_it_will_end(
    budget: float, warm: str, session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended in its middle it would cost the seconds and leave nothing."""
    first = {"ratio/first_max_deviation": 0.0, "time/iteration": 70.0}
    made = Mock(
        first=first,
        measure=lambda step, metrics: {
            "rows": [timing(step, "B", "ours", quantiles([1.0]))]
        },
    )
    monkeypatch.setattr(iteration, "Iteration", lambda session: made)
    found = session(budget=budget)
    found.run(device.SUITES["iteration"])
    statuses = {name: record["status"] for name, record in found.cells.items()}
    assert statuses == {
        "iteration parity": "done",
        "iteration B cold": "done",
        "iteration B": warm,
    }
    assert made.iterate.called == (warm == "done")
    steps = [step for _, step, _ in results.rows(found.result)]
    assert steps == [f"{iteration.STEP}, cold", iteration.STEP][: len(steps)] and len(
        steps
    ) == 1 + (warm == "done")


@pytest.mark.slow
def test_an_iteration_whose_first_ratios_are_not_1_has_no_figure(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        iteration.Trainer, "iterate", lambda self: {"ratio/first_max_deviation": 1e-3}
    )
    found = session()
    found.run(device.SUITES["iteration"])
    assert (
        found.cells["iteration parity"]["errors"] == {"ratio": 1e-3}
        and results.rows(found.result) == {}
    )
