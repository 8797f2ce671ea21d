"""Costs of a call of the policy, traced on the meta device: FLOPs, elementwise bytes,
and memory alive at its peak.

The code that runs is the code that trains, on tensors without memory: `GuidedPolicy`
over the fused forward. A model of 2 and one of 3 blocks are traced; the blocks in the
middle are alike, so the cost of any number of blocks follows on a line. The inside of
an operator is not seen; attention's backward pass is given its float32 query gradients.

Shapes: B batch, L text tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from sage_fast.config.sections import Guidance, ModelConfig
from sage_fast.models.counting import CountingMode, Tracer
from sage_fast.models.family import WeightFacts, family_of
from sage_fast.models.stored import Checkpointing, in_parts
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import PromptEmbeds

T = TypeVar("T")

WORK = ("linear", "attention", "attention_backward", "elementwise")
"""Fields of a cost that add up over calls; the others are memory."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a call, or of a number of calls.

    Attributes:
        linear, attention, attention_backward: FLOPs.
        elementwise: bytes read and written outside products and by thin ones.
        kept: bytes that graphs hold when the backward pass begins.
        working: bytes alive beside them at the peak.

    Example: a guided velocity of HunyuanVideo-1.5 at 480x832x81 is 359e12 linear and
    964e12 attention FLOPs.
    """

    linear: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0
    elementwise: float = 0.0
    kept: float = 0.0
    working: float = 0.0

    def times(self, count: float) -> "Cost":
        """So many such calls, one after the other: work adds up, memory does not."""
        work = {name: getattr(self, name) * count for name in WORK}
        return Cost(
            **work,
            kept=self.kept if count else 0.0,
            working=self.working if count else 0.0,
        )

    def __add__(self, other: "Cost") -> "Cost":
        """Both calls, one after the other."""
        work = {name: getattr(self, name) + getattr(other, name) for name in WORK}
        return Cost(
            **work,
            kept=max(self.kept, other.kept),
            working=max(self.working, other.working),
        )


@dataclass(frozen=True, kw_only=True)
class Call:
    """Key of a trace. Hashable, because every call is traced once.

    Attributes:
        transformer: items of the config.
        latent: (C, F, H, W).
        text_tokens: of every prompt.
        trained: nothing, adapters or everything.
        gradient: whether the velocity is differentiated.
        on_policy: whether dL/dv is known before the forward.
        collected: whether gradients are returned by video, as single pass takes them,
            and not added to `.grad`.

    Example: `Call(..., batch=1, gradient=False)` is a velocity of a rollout.
    """

    transformer: tuple[tuple[str, Any], ...]
    latent: tuple[int, int, int, int]
    text_tokens: int
    dtype: str
    trained: Literal["lora", "full"]
    rank: int
    target_modules: tuple[str, ...] | None
    checkpointing: Checkpointing
    kernels: Literal["triton", "reference"]
    adaln: Literal["auto", "weights"]
    guidance_scale: Guidance
    batch: int
    gradient: bool
    guidance: Literal["paired", "split"] = "paired"
    on_policy: bool = True
    collected: bool = False
    forward: Literal["fused", "stock"] = "fused"


@contextmanager
def traced_attention() -> Iterator[None]:
    """Within the context torch's attention is its flash kernel.

    On tensors without memory torch would take attention apart, and write every score.
    (A mode for torch's functions would not see what a backward pass computes again.)
    """
    own = functional.scaled_dot_product_attention

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value
        )[0]
        return result

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


def trace(call: Call) -> Cost:
    """The cost of a call of `GuidedPolicy.velocity` or `velocity_and_gradient`; exact
    in FLOPs and bytes.
    """
    if not call.gradient:
        # A block that would keep little keeps nothing: one trace serves a plan and its
        # options. `none` works otherwise.
        checkpointing = call.checkpointing
        if call.forward != "stock" and checkpointing in ("feed_forward", "full"):
            checkpointing = "selective"
        call = replace(
            call,
            checkpointing=checkpointing,
            guidance="paired",
            on_policy=True,
            collected=False,
        )
    num_layers = dict(call.transformer)["num_layers"]
    if num_layers <= 3:
        return _trace(call, num_layers)
    # What works beside the graph does so in one block at a time; with another number of
    # blocks it is the same.
    return extended(_trace(call, 2), _trace(call, 3), num_layers, ("working",))


def extended(two: T, three: T, num_layers: int, of_a_block: tuple[str, ...]) -> T:
    """The counts of any number of blocks, from those of 2 and 3: the blocks in the
    middle are alike.

    Args:
        two, three: records of numbers.
        of_a_block: fields that do not add up over the blocks.
    """
    values = {}
    for field in fields(two):  # type: ignore[arg-type]  # a dataclass
        first = getattr(two, field.name)
        second = getattr(three, field.name)
        in_all = first + (num_layers - 2) * (second - first)
        values[field.name] = max(first, second) if field.name in of_a_block else in_all
    return type(two)(**values)


def meta_transformer(
    config: Mapping[str, Any], dtype: torch.dtype, num_layers: int | None = None
) -> Any:
    """A transformer without memory for its weights, frozen, in evaluation mode."""
    layers = {} if num_layers is None else {"num_layers": num_layers}
    with torch.device("meta"):
        transformer = family_of(name=config.get("_class_name")).build(
            {**config, **layers}
        )
    for name, parameter in transformer.named_parameters():
        kept = in_parts(name, family_of(transformer).in_float32)
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
    return transformer.requires_grad_(False).eval()


@cache
def _traced_policy(call: Call, num_layers: int) -> tuple[GuidedPolicy, PromptEmbeds]:
    """The policy that calls of one kind share, without a gradient, and a prompt for it;
    its caches are filled.
    """
    from sage_fast.policy.lora import add_lora, train_all  # imports peft and diffusers

    dtype = getattr(torch, call.dtype)
    if call.trained == "lora":
        transformer = meta_transformer(dict(call.transformer), dtype, num_layers)
        add_lora(
            transformer,
            rank=call.rank,
            alpha=None,
            target_modules=call.target_modules,
            seed=0,
        )
    else:
        transformer = meta_transformer(
            dict(call.transformer), torch.float32, num_layers
        )
        train_all(transformer)
        # What computes is the masters as FSDP gathers them.
        for parameter in transformer.parameters():
            parameter.data = parameter.data.to(dtype)
    model = ModelConfig(
        forward=call.forward,
        attention="sdpa" if call.forward == "fused" else "auto",
        deterministic=False,
        kernels=call.kernels,
        checkpointing=call.checkpointing,
        adaln=call.adaln,
    )
    family = family_of(transformer)
    family.choose_forward(transformer, model)
    prompt = family.empty_prompt(
        {**transformer.config, **dict(call.transformer)}, call.text_tokens, dtype
    )
    WeightFacts(experts=len(family.experts)).check_guidance(call.guidance_scale)
    policy = GuidedPolicy(transformer, prompt, call.guidance_scale)
    with (
        torch.no_grad(),
        CountingMode(),
        traced_attention() if call.forward == "stock" else nullcontext(),
    ):
        # Rotary tables, modulation: a run has them from its first step on.
        latents = torch.empty(call.batch, *call.latent, device="meta")
        policy.velocity(latents, torch.full((call.batch,), 0.5), [prompt] * call.batch)
    return policy, prompt


@cache
def _trace(call: Call, num_layers: int) -> Cost:
    kind = replace(
        call, gradient=False, guidance="paired", on_policy=True, collected=False
    )
    policy, prompt = _traced_policy(kind, num_layers)
    latents = torch.empty(call.batch, *call.latent, device="meta")
    cotangent = torch.empty_like(latents)
    sigma = torch.full((call.batch,), 0.5)
    prompts = [prompt] * call.batch
    transformer = policy.transformer
    trained = [p for p in transformer.parameters() if p.requires_grad]
    # Gradients are there from the second step of an update on; the plan counts them
    # separately.
    for parameter in trained:
        if call.gradient and not call.collected:
            parameter.grad = torch.empty_like(parameter)
        else:
            parameter.grad = None
    own = [*transformer.parameters(), latents, cotangent, prompt.text, prompt.glyph]
    tracer = Tracer([*own, *(p.grad for p in trained if p.grad is not None)])
    kept = [0]
    weights: Sequence[Tensor] = trained

    def vjp(output: Tensor, cotangents: Any) -> None:
        # With split guidance once per branch; the larger graph counts.
        kept.append(tracer.now)
        if call.collected:
            torch.autograd.grad(output, weights, cotangents[0], allow_unused=True)
        else:
            output.backward(cotangents[0])

    with tracer, traced_attention() if call.forward == "stock" else nullcontext():
        if call.gradient:
            given = [cotangent] if call.on_policy else (lambda velocity: [cotangent])
            # A gradient for each video, if they are collected before the advantages are
            # known.
            from sage_fast.policy.lora import PerVideo  # imports peft and diffusers

            with PerVideo(transformer).copies(
                call.batch if call.collected else 1
            ) as weights:
                policy.velocity_and_gradient(
                    latents,
                    sigma,
                    prompts,
                    given,
                    split=call.guidance == "split",
                    vjp=vjp,
                )
        else:
            with torch.no_grad():
                policy.velocity(latents, sigma, prompts)
    # Also of the text refiner, which attends by torch's own operators: its share is
    # counted as the library's.
    attention = {
        name: flops for name, flops in tracer.flops.items() if "attention" in name
    }
    backward = sum(flops for name, flops in attention.items() if "backward" in name)
    return Cost(
        linear=tracer.flops.total() - sum(attention.values()),
        attention=sum(attention.values()) - backward,
        attention_backward=backward,
        elementwise=tracer.elementwise,
        kept=max(kept),
        working=tracer.peak - max(kept),
    )
