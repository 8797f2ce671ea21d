"""The fused forward against stock diffusers: outputs, gradients, and what an
accelerated model keeps.
"""

import copy
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, HunyuanVideo15Transformer3DModel
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.counts.traced import meta_transformer
from sage_fast import accelerate
from sage_fast.models import block as shared_block
from sage_fast.models.counting import Tracer
from sage_fast.models.family import family_of
from sage_fast.models.hunyuan15 import block
from sage_fast.models.hunyuan15.backbone import dead_modules, velocity
from sage_fast.models.stored import is_dead
from sage_fast.policy.lora import add_lora
from sage_fast.records import PromptEmbeds
from tests.models.hunyuan15.oracle import (
    latents,
    padded_arguments,
    prompt,
    tiny_transformer,
    widened,
)

PROMPTS = {
    "one": [(5, 0)],
    "glyph": [(5, 3), (5, 3)],
    "ragged": [(5, 0), (7, 2), (5, 0)],
    "one-token": [(1, 1)],
    "pictures": [(5, 0, 6), (7, 2, 6), (5, 0, 6)],
}
CHECKPOINTING = ("none", "feed_forward", "selective", "full")
Gradients = dict[str, Tensor]


def prompts_of(case: str, dtype: torch.dtype) -> list[PromptEmbeds]:
    return [
        prompt(*lengths, seed=i, dtype=dtype) for i, lengths in enumerate(PROMPTS[case])
    ]


def cotangent(like: Tensor) -> Tensor:
    return torch.randn(
        like.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).to(like.dtype)


def differentiate(
    model: torch.nn.Module, forward: Callable[[], Tensor]
) -> tuple[Tensor, Gradients]:
    """Output and the gradients of all parameters that get one."""
    model.zero_grad()
    output = forward()
    output.backward(cotangent(output))
    return output.detach(), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def stock(
    model: Any,
    x: Tensor,
    timestep: Tensor,
    prompts: Sequence[PromptEmbeds],
    dtype: torch.dtype,
) -> Tensor:
    with widened():
        return model(**padded_arguments(x, timestep, prompts, dtype))[0]


def packed(
    model: Any, x: Tensor, timestep: Tensor, prompts: Sequence[PromptEmbeds]
) -> Tensor:
    return model(
        hidden_states=x, timestep=timestep, prompts=prompts, return_dict=False
    )[0]


def assert_same_gradients(
    given: Gradients, expected: Gradients, tolerance: float
) -> None:
    """The same parameters have gradients, and these agree; stock's exactly zero ones
    may be absent.

    A gradient that is zero in exact arithmetic (a key's bias before a softmax) is
    rounding alone: it is compared with a thousandth of the largest gradient of all.
    """
    assert set(given) <= set(expected)
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        size = max(float(gradient.abs().max()), 1e-3 * largest)
        if name in given:
            assert (
                float((given[name].double() - gradient.double()).abs().max())
                <= tolerance * size
            ), name
        else:
            assert not gradient.any(), name


@pytest.mark.parametrize(
    ("case", "checkpointing", "dtype"),
    [(case, "none", torch.float64) for case in PROMPTS]
    + [("ragged", mode, torch.float64) for mode in CHECKPOINTING[1:]]
    + [("ragged", "none", torch.float32)],
)
def test_outputs_and_every_gradient_are_those_of_diffusers(
    case: str, checkpointing: Any, dtype: torch.dtype
) -> None:
    model = tiny_transformer(dtype=dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    model.reads_pictures = case == "pictures"
    prompts = prompts_of(case, dtype)
    x = latents(len(prompts))
    timestep = torch.linspace(100.3, 900.7, len(prompts))
    expected, gradients = differentiate(
        model, lambda: stock(model, x, timestep, prompts, dtype)
    )
    accelerate(model, checkpointing=checkpointing)
    forwards = [lambda: packed(model, x, timestep, prompts)]
    if checkpointing == "none":
        forwards.append(
            lambda: model(**padded_arguments(x, timestep, prompts, dtype))[0]
        )
    for forward in forwards:
        output, given = differentiate(model, forward)
        assert float((output - expected).abs().max()) <= tolerance * float(
            expected.abs().max()
        )
        assert_same_gradients(given, gradients, tolerance)
    dead = dead_modules(model)
    assert not any(is_dead(name, dead) for name in given)


def test_triton_kernels_in_float32() -> None:
    model = tiny_transformer(layers=2)
    prompts = prompts_of("glyph", torch.float32)[:1]
    x = latents(1, size=(1, 2, 2))
    timestep = torch.tensor([700.0])
    expected, gradients = differentiate(
        model, lambda: stock(model, x, timestep, prompts, torch.float32)
    )
    accelerate(model, kernels="triton", checkpointing="selective")
    output, given = differentiate(model, lambda: packed(model, x, timestep, prompts))
    assert float((output - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert_same_gradients(given, gradients, 1e-5)


def test_bfloat16_is_as_close_to_float64_as_diffusers_is() -> None:
    """Errors to float64 in the mean square over three models: of the output, and of
    each kind of parameter's gradient.

    A single bias of 32 entries would compare one draw of rounding noise with another.
    """
    own = Counter[str]()
    theirs = Counter[str]()
    for seed in range(3):
        model = tiny_transformer(layers=2, seed=seed)
        family_of(model).cast(model, torch.bfloat16)
        prompts = [prompt(5, 3, seed=seed + i, dtype=torch.bfloat16) for i in range(2)]
        x = latents(2, size=(2, 4, 6), seed=seed).bfloat16().float()
        timestep = torch.tensor([104.0, 896.0])
        oracle = copy.deepcopy(model).double()
        exact, exact_gradients = differentiate(
            oracle, partial(stock, oracle, x, timestep, prompts, torch.float64)
        )
        arguments = padded_arguments(x, timestep, prompts, torch.bfloat16) | {
            "timestep": timestep
        }
        plain, plain_gradients = differentiate(
            model, lambda m=model, a=arguments: m(**a)[0]
        )
        accelerate(model)
        fused, fused_gradients = differentiate(
            model, partial(packed, model, x, timestep, prompts)
        )
        for errors, output, gradients in (
            (theirs, plain, plain_gradients),
            (own, fused, fused_gradients),
        ):
            errors["output"] += float((output.double() - exact).square().sum())
            for name in fused_gradients:
                kind = re.sub(r"transformer_blocks\.\d+\.", "", name)
                errors[kind] += float(
                    (gradients[name].double() - exact_gradients[name]).square().sum()
                )
    # A key's bias before a softmax has no gradient in exact arithmetic, only rounding.
    ratios = {
        kind: (own[kind] / theirs[kind]) ** 0.5
        for kind in own
        if not kind.endswith("refiner_blocks.0.attn.to_k.bias")
    }
    assert max(ratios.values()) <= 2, ratios
    assert ratios["output"] <= 1.2


LORA_TARGETS = [
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
]


def with_lora(
    model: HunyuanVideo15Transformer3DModel, targets: Sequence[str] = LORA_TARGETS
) -> HunyuanVideo15Transformer3DModel:
    """Adapters that already do something."""
    dtype = model.dtype
    add_lora(model, rank=3, alpha=6.0, target_modules=targets, seed=1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if dtype == torch.float64:
                parameter.data = parameter.data.double()
            torch.nn.init.normal_(
                parameter, std=0.1, generator=torch.Generator().manual_seed(len(name))
            )
    return model


@pytest.mark.parametrize(
    ("targets", "checkpointing", "wide"),
    [
        (LORA_TARGETS, "none", False),
        (LORA_TARGETS, "feed_forward", True),
        (LORA_TARGETS, "selective", False),
        (LORA_TARGETS, "full", True),
        (LORA_TARGETS[:1], "selective", True),
        (["norm1.linear", "norm1_context.linear", "ff.net.2"], "full", False),
    ],
)
def test_lora_wrapped(
    targets: list[str], checkpointing: Any, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the updates beside the products of the weights, and within them as with many
    tokens.
    """
    monkeypatch.setattr(
        shared_block,
        "room_for_low",
        lambda adapter, tokens: 0 if adapter is None or not wide else len(adapter.a),
    )
    model = with_lora(tiny_transformer(dtype=torch.float64), targets)
    prompts = prompts_of("ragged", torch.float64)
    x = latents(3)
    timestep = torch.tensor([20.0, 500.0, 980.0])
    expected, gradients = differentiate(
        model, lambda: stock(model, x, timestep, prompts, torch.float64)
    )
    accelerate(model, checkpointing=checkpointing)
    output, given = differentiate(model, lambda: packed(model, x, timestep, prompts))
    assert float((output - expected).abs().max()) <= 1e-10 * float(expected.abs().max())
    assert given and all("lora" in name for name in given)
    assert_same_gradients(given, gradients, 1e-10)


def test_adapters_can_be_switched_off_scaled_and_merged() -> None:
    model = with_lora(tiny_transformer(dtype=torch.float64))
    prompts = prompts_of("one", torch.float64)
    x = latents(1)
    timestep = torch.tensor([300.0])

    @torch.no_grad()
    def outputs() -> list[Tensor]:
        arguments = padded_arguments(x, timestep, prompts, torch.float64)
        with widened():
            results = [model(**arguments)[0]]
            for scale in (0.5, 1.0):
                model.set_adapters("default", scale)
                results.append(model(**arguments)[0])
            model.disable_adapters()
            results.append(model(**arguments)[0])
            model.enable_adapters()
            model.fuse_lora()
            results.append(model(**arguments)[0])
            model.unfuse_lora()
        return results

    expected = outputs()
    accelerate(model)
    for given, wanted in zip(outputs(), expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(expected[0], expected[1])
    assert not torch.allclose(expected[0], expected[3])


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [(torch.float32, False), (torch.bfloat16, True)],
    ids=["all-weights", "lora"],
)
def test_no_bit_depends_on_what_blocks_keep(dtype: torch.dtype, lora: bool) -> None:
    """Output and every gradient."""
    found: list[tuple[Tensor, Gradients]] = []
    for checkpointing in ("feed_forward", "selective", "full"):
        model = tiny_transformer(layers=3)
        family_of(model).cast(model, dtype)
        if lora:
            model = with_lora(model.requires_grad_(False), LORA_TARGETS[:8])
        accelerate(model, checkpointing=checkpointing)  # type: ignore[arg-type]
        x = latents(1)
        timestep = torch.tensor([500.0])
        prompts = prompts_of("one-token", torch.float32)
        found.append(differentiate(model, partial(packed, model, x, timestep, prompts)))
    (output, gradients), *others = found
    assert gradients
    for other, given in others:
        assert torch.equal(output, other) and given.keys() == gradients.keys()
        assert all(torch.equal(given[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_rollout_and_update_compute_the_same_bits(checkpointing: Any) -> None:
    model = with_lora(tiny_transformer())
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    accelerate(model, checkpointing=checkpointing)
    update = velocity(
        model,
        latents(3),
        torch.tensor([0.3, 0.7, 0.9]),
        prompts_of("ragged", torch.float32),
    )
    with torch.no_grad():
        rollout = velocity(
            model,
            latents(3),
            torch.tensor([0.3, 0.7, 0.9]),
            prompts_of("ragged", torch.float32),
        )
    assert (
        update.requires_grad
        and update.dtype == torch.float32
        and torch.equal(update, rollout)
    )


@pytest.mark.parametrize(
    ("checkpointing", "trained", "alive"),
    [
        # Tensors of all tokens at the peak of the forward, kept for the backward, and
        # at the peak of the backward.
        ("none", "adapters", (15.024, 10.016, 22.815)),
        ("feed_forward", "adapters", (12.899, 6.016, 21.321)),
        ("selective", "adapters", (9.899, 2.016, 17.961)),
        ("full", "adapters", (9.899, 1.0, 24.008)),
        ("full", "nothing", (7.391, 1.0, 19.391)),
        ("none", "everything", (14.391, 10.016, 32.652)),
    ],
)
def test_a_block_lets_go_of_what_it_no_longer_reads(
    checkpointing: Any, trained: str, alive: Sequence[float]
) -> None:
    """On the meta device; with more tokens of the text, so that what the video's stream
    has left shows.
    """
    video = 1200
    text = 2000
    width = 2048
    transformer = meta_transformer(3, "nothing")
    transformer.requires_grad_(trained == "everything")
    if trained == "adapters":
        add_lora(transformer, rank=32, alpha=None, target_modules=LORA_TARGETS, seed=0)
    accelerate(
        transformer, kernels="triton", checkpointing=checkpointing, adaln="weights"
    )
    made = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    table = made(video, transformer.config["attention_head_dim"])
    transformer._acceleration.rotary = block.Rotary(table, table)  # type: ignore[attr-defined]
    streams, cotangents = (
        [made(1, video, width), made(1, text, width)] for _ in range(2)
    )
    given = [
        *(stream.requires_grad_() for stream in streams),
        made(1, width),
        *(made(1, 6 * width) for _ in range(2)),
    ]
    run = partial(transformer.transformer_blocks[1], *given)
    with torch.no_grad():
        run()  # fills what is cached
    with Tracer([*transformer.parameters(), *given, *cotangents, table]) as tracer:
        outputs = run()
        found = [tracer.peak, tracer.now]
        tracer.peak = tracer.now
        torch.autograd.backward(outputs, cotangents)
    assert [
        round(b / 2 / (video + text) / width, 3) for b in (*found, tracer.peak)
    ] == list(alive)


def test_undo_restores_the_instance_and_leaves_the_class_alone() -> None:
    model = tiny_transformer()
    other = tiny_transformer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = latents(1)
    timestep = torch.tensor([300.0])
    prompts = prompts_of("glyph", torch.float32)[:1]
    expected = stock(model, x, timestep, prompts, torch.float32)
    acceleration = accelerate(model)
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )
    with pytest.raises(ValueError, match="accelerated already"):
        accelerate(model)
    model.enable_gradient_checkpointing()  # diffusers' own switch
    assert (
        acceleration.settings(torch.device("cpu"), torch.float32).checkpointing
        == "full"
    )
    model.disable_gradient_checkpointing()
    acceleration.undo()
    with pytest.raises(KeyError, match="inside"), accelerate(model):
        acceleration.undo()  # of what is undone already: the other one stays
        assert "forward" in model.__dict__
        raise KeyError("inside")
    assert (
        "forward" not in model.__dict__
        and "forward" not in model.transformer_blocks[0].__dict__
    )
    assert torch.equal(stock(model, x, timestep, prompts, torch.float32), expected)
    assert torch.equal(stock(other, x, timestep, prompts, torch.float32), expected)
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def test_the_gradient_of_the_gate_costs_no_product_where_tokens_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes from dx2^T h, which the gradient of W_2 takes in any case: h W_2 is not
    recomputed.
    """
    prompts = prompts_of("one", torch.float64)
    x = latents(1)
    timestep = torch.tensor([300.0])
    counts = []
    gradients = []
    for few in (1000, 10):  # the video has 24 tokens, the text 5
        monkeypatch.setattr(shared_block, "_FEW_TOKENS", few)
        model = tiny_transformer(dtype=torch.float64)
        accelerate(model)
        with CountProducts() as products:
            gradients.append(
                differentiate(model, partial(packed, model, x, timestep, prompts))[1]
            )
        counts.append(products.count)
    assert_same_gradients(gradients[1], gradients[0], 1e-10)
    assert counts[0] - counts[1] == 3, "one for the video in each block"


def test_an_adapter_that_the_forward_does_not_read_is_refused() -> None:
    for target in ("x_embedder.proj", "cond_type_embed"):
        model = tiny_transformer()
        model.add_adapter(LoraConfig(r=2, target_modules=[target]))
        accelerate(model)
        with pytest.raises(
            ValueError,
            match=rf"{target} carries an adapter, which the fused forward does not",
        ):
            packed(
                model,
                latents(1),
                torch.tensor([300.0]),
                prompts_of("one", torch.float32),
            )


def test_generating_in_inference_mode_then_training() -> None:
    model = with_lora(tiny_transformer())
    accelerate(model)
    x = latents(1)
    timestep = torch.tensor([300.0])
    prompts = prompts_of("glyph", torch.float32)[:1]
    expected = packed(model, x, timestep, prompts).detach()
    with torch.inference_mode():
        torch.testing.assert_close(
            packed(model, x.clone(), timestep.clone(), prompts), expected
        )
        arguments = padded_arguments(
            x.clone(), timestep.clone(), prompts, torch.float32
        )
        torch.testing.assert_close(
            model(**arguments)[0], expected, rtol=1e-5, atol=1e-6
        )
    # Another timestep, size and prompt, first met in inference mode.
    other = latents(1, size=(1, 4, 4)), torch.tensor([500.0]), [prompt(6, 2)]
    with torch.inference_mode():
        packed(model, *other)
    differentiate(model, lambda: packed(model, *other))


# --------------------------------------------------------------------------------------
# refused


def test_a_pipeline_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="The transformer is a DDPMPipeline"):
        accelerate(DDPMPipeline(unet=None, scheduler=None))


def test_what_is_more_than_plain_lora_is_refused() -> None:
    from accelerate import cpu_offload
    from peft import LoraConfig

    model = tiny_transformer()
    accelerate(model)
    prompts = prompts_of("one", torch.float32)
    x = latents(1)
    timestep = torch.tensor([300.0])
    with pytest.raises(
        ValueError, match=r"timestep is torch.bfloat16.*cast_forward_inputs=False"
    ):
        packed(model, x, timestep.bfloat16(), prompts)
    with pytest.raises(ValueError, match="use_meanflow"):
        accelerate(tiny_transformer(use_meanflow=True))
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], use_dora=True))
    with pytest.raises(ValueError, match="LoRA variant"):
        packed(model, x, timestep, prompts)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="enable_model_cpu_offload"):
        packed(model, x, timestep, prompts)


def test_a_forward_that_somebody_else_replaced_is_left_alone() -> None:
    model = tiny_transformer()
    block: Any = model.transformer_blocks[1]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(
        ValueError, match=r"transformer_blocks\.1 has been replaced already"
    ):
        accelerate(model)
    del block.forward
    acceleration = accelerate(model)
    block.forward = lambda *args: None
    with pytest.raises(ValueError, match="Remove the hook, then undo"):
        acceleration.undo()


def test_autocast_changes_nothing_and_neither_does_a_pickle() -> None:
    model = tiny_transformer()
    accelerate(model)
    x = latents(1)
    timestep = torch.tensor([300.0])
    prompts = prompts_of("glyph", torch.float32)[:1]
    expected = packed(model, x, timestep, prompts)
    gradients = differentiate(model, partial(packed, model, x, timestep, prompts))[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(packed(model, x, timestep, prompts), expected)
        within = differentiate(model, partial(packed, model, x, timestep, prompts))[1]
    # outside of blocks torch's own backward computes in bfloat16
    assert_same_gradients(within, gradients, 0.03)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(packed(loaded, x, timestep, prompts), expected)
