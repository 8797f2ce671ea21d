"""Costs of a call of the policy, traced on the meta device: FLOPs, elementwise bytes, and memory alive at its peak.

The code that runs is the code that trains, on tensors without memory: `GuidedPolicy` over the fused forward. A model of
2 and one of 3 blocks are traced; the blocks in the middle are alike, so the cost of any number of blocks follows on a
line. The inside of an operator is not seen; attention's backward pass is given its float32 query gradients.

Shapes: B batch, L text tokens.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sage_fast.config.sections import ModelConfig
from sage_fast.kernels import bytes_moved
from sage_fast.models.family import family_of
from sage_fast.models.transformer import Checkpointing, in_parts
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.policy.lora import add_lora, train_all
from sage_fast.policy.per_video import PerVideo

PRODUCTS = frozenset(
    {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_addmm_activation", "_scaled_mm", "attention", "attention_backward"}
    | {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}
)
"""Operators that are not elementwise."""

THIN = 128
"""A product with a dimension of at most so many is memory traffic: its operands cost more time than its arithmetic."""


def is_traffic(name: str, arguments: Sequence[Any]) -> bool:
    """True if an operator costs its reads and writes: one that is elementwise, or a thin product.

    Args:
        name: of the operator. arguments: its positional arguments.
    """
    return name not in PRODUCTS or is_thin(name, arguments)


def is_thin(name: str, arguments: Sequence[Any]) -> bool:
    """True if an operator is a matrix product with a dimension of at most `THIN`; arguments as in `is_traffic`."""
    if name not in PRODUCTS or name.startswith(("attention", "_scaled")):
        return False
    a, b = [argument for argument in arguments if isinstance(argument, Tensor)][-2:]
    return min(*a.shape[-2:], b.shape[-1]) <= THIN


WORK = ("linear", "attention", "attention_backward", "elementwise")
"""Fields of a cost that add up over calls; the others are memory."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a call, or of a number of calls.

    linear, attention, attention_backward: FLOPs.
    elementwise: bytes read and written outside products and by thin ones.
    kept: bytes that graphs hold when the backward pass begins. working: bytes alive beside them at the peak.

    Example: a guided velocity of HunyuanVideo-1.5 at 480x832x81 is 359e12 linear and 964e12 attention FLOPs.
    """

    linear: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0
    elementwise: float = 0.0
    kept: float = 0.0
    working: float = 0.0

    @property
    def flops(self) -> float:
        return self.linear + self.attention + self.attention_backward

    def times(self, count: float) -> "Cost":
        """So many such calls, one after the other: work adds up, memory does not."""
        work = {name: getattr(self, name) * count for name in WORK}
        return Cost(**work, kept=self.kept if count else 0.0, working=self.working if count else 0.0)

    def __add__(self, other: "Cost") -> "Cost":
        """Both calls, one after the other."""
        work = {name: getattr(self, name) + getattr(other, name) for name in WORK}
        return Cost(**work, kept=max(self.kept, other.kept), working=max(self.working, other.working))


@dataclass(frozen=True, kw_only=True)
class Call:
    """Key of a trace. Hashable, because every call is traced once.

    transformer: items of the config. latent: (C, F, H, W). text_tokens, glyph_tokens: of every prompt.
    trained: nothing, adapters or everything. gradient: whether the velocity is differentiated.
    on_policy: whether dL/dv is known before the forward. collected: whether gradients are returned by video, as single
    pass takes them, and not added to `.grad`.

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
    guidance_scale: float
    batch: int
    gradient: bool
    guidance: Literal["paired", "split"] = "paired"
    on_policy: bool = True
    collected: bool = False
    forward: Literal["fused", "stock"] = "fused"


class Tracer(TorchDispatchMode):
    """Context manager that follows which storages are alive and adds up elementwise bytes.

    Args:
        own: tensors that were there before; they do not count.
    """

    def __init__(self, own: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.elementwise = 0
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and follow its results."""
        name = func.overloadpacket.__name__
        results: list[Any] = []
        traffic = bytes_moved(lambda: results.append(func(*args, **(kwargs or {}))))
        if is_traffic(name, args):
            self.elementwise += traffic
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        if name == "attention_backward":
            # Flash kernels add up the gradient of the queries, the size of the first argument, in float32.
            self.peak = max(self.peak, self.now + 4 * args[0].numel())
        return results[0]

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._own or key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)


@contextmanager
def traced_attention() -> Iterator[None]:
    """Within the context torch's attention is its flash kernel.

    On tensors without memory torch would take attention apart, and write every score. (A mode for torch's functions
    would not see what a backward pass computes again.)
    """
    own = functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
        return result

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


def trace(call: Call) -> Cost:
    """The cost of a call of `GuidedPolicy.velocity` or `velocity_and_gradient`; exact in FLOPs and bytes."""
    num_layers = dict(call.transformer)["num_layers"]
    if num_layers <= 3:
        return _trace(call, num_layers)
    two, three = _trace(call, 2), _trace(call, 3)
    values = {}
    for field in fields(Cost):
        first, second = getattr(two, field.name), getattr(three, field.name)
        values[field.name] = first + (num_layers - 2) * (second - first)
    # What works beside the graph does so in one block at a time; with another number of blocks it is the same.
    return Cost(**values | {"working": max(two.working, three.working)})


def meta_transformer(config: Mapping[str, Any], dtype: torch.dtype, num_layers: int | None = None) -> Any:
    """A transformer without memory for its weights, frozen, in evaluation mode."""
    layers = {} if num_layers is None else {"num_layers": num_layers}
    with torch.device("meta"):
        transformer = family_of(name=config.get("_class_name")).build({**config, **layers})
    for name, parameter in transformer.named_parameters():
        kept = in_parts(name, family_of(transformer).in_float32)
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
    return transformer.requires_grad_(False).eval()


@cache
def _trace(call: Call, num_layers: int) -> Cost:
    dtype = getattr(torch, call.dtype)
    if call.trained == "lora":
        transformer = meta_transformer(dict(call.transformer), dtype, num_layers)
        add_lora(transformer, rank=call.rank, alpha=None, target_modules=call.target_modules, seed=0)
    else:
        transformer = meta_transformer(dict(call.transformer), torch.float32, num_layers)
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
    prompt = family.empty_prompt(transformer.config, call.text_tokens, dtype)
    policy = GuidedPolicy(transformer, prompt, call.guidance_scale)
    latents = torch.empty(call.batch, *call.latent, device="meta")
    cotangent = torch.empty_like(latents)
    sigma = torch.full((call.batch,), 0.5)
    prompts = [prompt] * call.batch
    attending = traced_attention if call.forward == "stock" else nullcontext
    with torch.no_grad(), attending():
        # Fills the caches: rotary tables, modulation.
        policy.velocity(latents, sigma, prompts)
    own = [*transformer.parameters(), latents, cotangent, prompt.text, prompt.glyph]
    if call.gradient and not call.collected:
        # Gradients are there from the second step of an update on; the plan counts them separately.
        for parameter in (p for p in transformer.parameters() if p.requires_grad):
            parameter.grad = torch.empty_like(parameter)
            own.append(parameter.grad)
    run, kept = _function(policy, call, (latents, sigma, prompts, cotangent))
    with FlopCounterMode(display=False) as counter, Tracer(own) as tracer, attending():
        run(tracer)
    if call.forward == "stock":
        # The counter's hooks on modules keep alive what torch's checkpointing computes again.
        kept.clear()
        with Tracer(own) as tracer, attending():
            run(tracer)
    flops = {str(key): value for key, value in counter.get_flop_counts()["Global"].items()}
    attention = flops.pop("sage_fast.attention", 0)
    attention_backward = flops.pop("sage_fast.attention_backward", 0)
    # The text refiner attends by torch's own operators; their share is counted as the library's.
    for name in [name for name in flops if "attention" in name]:
        if "backward" in name:
            attention_backward += flops.pop(name)
        else:
            attention += flops.pop(name)
    held = max(kept, default=0)
    return Cost(
        linear=sum(flops.values()),
        attention=attention,
        attention_backward=attention_backward,
        elementwise=tracer.elementwise,
        kept=held,
        working=tracer.peak - held,
    )


def _function(
    policy: GuidedPolicy, call: Call, inputs: tuple[Tensor, Tensor, list[Any], Tensor]
) -> tuple[Callable[[Tracer], None], list[int]]:
    """The call, and a list to which it adds the bytes alive whenever a backward pass begins."""
    latents, sigma, prompts, cotangent = inputs
    kept: list[int] = []

    def velocity(tracer: Tracer) -> None:
        with torch.no_grad():
            policy.velocity(latents, sigma, prompts)

    def gradient(tracer: Tracer) -> None:
        def vjp(output: Tensor, cotangents: Any) -> None:
            kept.append(tracer.now)
            if call.collected:
                torch.autograd.grad(output, weights, cotangents[0], allow_unused=True)
            else:
                output.backward(cotangents[0])

        cotangents = [cotangent] if call.on_policy else (lambda velocity: [cotangent])
        with PerVideo(policy.transformer).copies(call.batch if call.collected else 1) as weights:
            policy.velocity_and_gradient(latents, sigma, prompts, cotangents, split=call.guidance == "split", vjp=vjp)

    return (gradient if call.gradient else velocity), kept
