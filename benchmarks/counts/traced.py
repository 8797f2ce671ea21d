"""Costs of a transformer block, counted on the meta device at the true size: FLOPs,
bytes, launches, kept memory.

Counts do not depend on the machine, so they guard on a CPU what a GPU would show as
time. An op of sage_kernels or of attention is one operator; bytes are those of its
arguments and results (`sage_kernels.tracer`). In units of

    S = (N + L) * D * bytes per element,     one tensor of all tokens

N video tokens, L text tokens, D width. "Elementwise" is everything but matrix products
and attention. Products with a dimension of at most 128, as those of LoRA, are "thin":
they too cost what they read and write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.shapes import A, B, Shape
from benchmarks.workload import HUNYUAN_VIDEO_15
from sage_fast import accelerate
from sage_fast.config.sections import LoraConfig
from sage_fast.models.counting import PRODUCTS, Tracer, is_thin
from sage_fast.models.family import Work
from sage_fast.models.fused import Rotary
from sage_fast.models.hunyuan15.backbone import forward_work, image_tokens
from sage_fast.models.stored import Checkpointing
from sage_fast.planning import trace
from sage_fast.policy.lora import add_lora
from sage_fast.records import PromptEmbeds
from sage_kernels.tracer import moved

Trained = Literal["nothing", "lora", "everything"]
"""Weights that need gradients; the gradient of the block's inputs is wanted in any
case.
"""
BLOCKS: tuple[tuple[Trained, Checkpointing], ...] = (
    ("lora", "feed_forward"),
    ("lora", "selective"),
    ("everything", "selective"),
)
"""Trained weights and checkpointing that the presets use."""


# Waits for the GPU: the meta device plays it. A meta tensor has no data, so every
# operator that needs some on the host would fail there; `answer_of` answers in its
# place, so that they can be counted and the program goes on.

SCALARS = frozenset({"_local_scalar_dense", "item"})
COMPARISONS = frozenset({"is_nonzero", "equal"})
MASKED = frozenset({"nonzero", "masked_select", "index"})
"""Their result has as many rows as a mask has ones, which the host must know."""


def answer_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """[what the operator would return], or nothing for an operator that does not wait
    for the device.

    Numbers are 1, tensors copied to the host are full of ones (False where they are
    bool, since masks of what is wrong come this way), masks select everything.
    """
    name = func.overloadpacket.__name__
    if (
        name in ("_to_copy", "copy_")
        and not kwargs.get("non_blocking")
        and args[2:] != (True,)
    ):
        # To the device: a copy from memory that is not pinned waits for all work,
        # unless it may be staged.
        copied = args[name == "copy_"]
        target = torch.device(kwargs.get("device") or args[0].device)
        if copied.device.type == "cpu" and target.type == "meta":
            return [func(*args, **kwargs)]
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    if not any(tensor.device.type == "meta" for tensor in tensors):
        return []
    if name in SCALARS:
        return [torch.ones((), dtype=args[0].dtype).item()]
    if name in COMPARISONS:
        return [True]
    if (
        name == "_to_copy"
        and "device" in kwargs
        and torch.device(kwargs["device"] or "meta").type == "cpu"
    ):
        dtype = kwargs.get("dtype") or args[0].dtype
        return [torch.full(args[0].shape, float(dtype != torch.bool), dtype=dtype)]
    if name == "copy_" and args[0].device.type == "cpu":
        return [args[0]]
    if name in MASKED:
        source: Tensor = args[0]
        if name == "nonzero":
            return [source.new_empty((source.numel(), source.ndim), dtype=torch.int64)]
        masks = [
            m for m in (args[1] if name == "index" else args[1:2]) if m is not None
        ]
        if any(mask.dtype in (torch.bool, torch.uint8) for mask in masks):
            size = source.shape[masks[0].ndim :] if name == "index" else ()
            return [source.new_empty((masks[0].numel(), *size))]
    return []


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operator that ran."""

    name: str
    traffic: int
    """Bytes read and written."""
    largest: int
    """Elements of its largest result."""
    results: tuple[int, ...]
    """Bytes of each result."""
    thin: bool
    """True for a thin product."""


class Record(TorchDispatchMode):
    """Context manager that lists the operators that move memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.syncs: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and list it."""
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        for answer in answer_of(func, args, kwargs):
            self.syncs.append(name)
            return answer
        result = func(*args, **kwargs)
        traffic = moved(func, args, kwargs, result)
        if traffic.operators:
            tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            self.calls.append(
                Call(
                    name=name,
                    traffic=traffic.total,
                    largest=max((t.numel() for t in tensors), default=0),
                    results=tuple(t.nbytes for t in tensors),
                    thin=is_thin(name, args),
                )
            )
        return result

    def elementwise(self) -> int:
        """Bytes of everything but matrix products and attention."""
        return sum(call.traffic for call in self.calls if call.name not in PRODUCTS)


RECOMPUTED = frozenset({"adaln", "gated_residual_adaln", "qk_norm_rope", "gelu_tanh"})


def meta_transformer(
    num_layers: int, trained: Trained
) -> HunyuanVideo15Transformer3DModel:
    """The true configuration with fewer layers, bfloat16, on the meta device."""
    transformer = trace.meta_transformer(HUNYUAN_VIDEO_15, torch.bfloat16, num_layers)
    transformer.requires_grad_(trained == "everything")
    if trained == "lora":
        add_lora(
            transformer,
            rank=32,
            alpha=None,
            target_modules=LoraConfig().target_modules,
            seed=0,
        )
    return transformer


def accelerated(
    num_layers: int, trained: Trained, checkpointing: Checkpointing = "selective"
) -> HunyuanVideo15Transformer3DModel:
    """`meta_transformer` with the fused forward, fused kernels and torch's attention."""
    transformer = meta_transformer(num_layers, trained)
    # Not from the table, whose rows a forward computes for noise levels that it has not
    # met.
    accelerate(
        transformer,
        attention="sdpa",
        kernels="triton",
        checkpointing=checkpointing,
        adaln="weights",
    )
    return transformer


def measure_block() -> dict[str, float]:
    """One block in the middle, one sample at 352x624x81 with 250 text tokens;
    `budgets.yaml` says what each number is.

    Frozen AdaLN weights come from the table.
    """
    found: dict[str, float] = {}
    for trained, checkpointing in BLOCKS:
        cost = block_cost(A, trained, checkpointing)
        found |= {
            f"block.{name}/{trained}/{checkpointing}": value
            for name, value in cost.items()
        }
    return found


def block_cost(
    shape: Shape, trained: Trained, checkpointing: Checkpointing
) -> dict[str, float]:
    """Count one block; bytes in S. FLOPs, launches and thin products of the backward
    pass include work that it does again; its elementwise bytes do not.
    """
    transformer = accelerated(3, trained, checkpointing)
    block = transformer.transformer_blocks[1]
    width = (
        transformer.config["num_attention_heads"]
        * transformer.config["attention_head_dim"]
    )
    unit = (shape.video_tokens + shape.text_tokens) * width * 2

    def activation(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device="meta")

    x = activation(1, shape.video_tokens, width).requires_grad_()
    text = activation(1, shape.text_tokens, width).requires_grad_()
    modulation: tuple[Tensor | None, ...] = (None, None)
    if trained != "everything":
        modulation = (activation(1, 6 * width), activation(1, 6 * width))
    table = torch.empty(
        shape.video_tokens, transformer.config["attention_head_dim"], device="meta"
    )
    own = {p.untyped_storage()._cdata for p in transformer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and tensor.numel() > 6 * width:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    def run() -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = block(x, text, activation(1, width), *modulation)
        return outputs

    transformer._acceleration.rotary = Rotary(table, table)
    with torch.no_grad(), Record():
        run()  # fills what is cached
    forward_flops = FlopCounterMode(display=False)
    backward_flops = FlopCounterMode(display=False)
    with (
        saved_tensors_hooks(keep, lambda tensor: tensor),
        forward_flops,
        Record() as forward,
    ):
        outputs = run()
    cotangents = [torch.empty_like(output) for output in outputs]
    with backward_flops, Record() as backward:
        torch.autograd.backward(outputs, cotangents)
    # The activation that the GELU's backward returns with its gradient is recomputed as
    # well.
    again = sum(c.traffic for c in backward.calls if c.name in RECOMPUTED)
    again += sum(c.results[1] for c in backward.calls if c.name == "gelu_tanh_backward")
    del outputs, cotangents
    # Beside weights and the block's input; of the backward pass gradients of weights
    # count too.
    lasting = [*transformer.parameters(), x, text]
    for tensor in lasting:
        tensor.grad = None
    # The record answers reads by the host, for which meta tensors have none.
    with Record(), Tracer(lasting) as alive:
        outputs = run()
        forward_peak = alive.peak
        alive.peak = alive.now
        torch.autograd.backward(
            outputs, [torch.empty_like(output) for output in outputs]
        )
    calls = [*forward.calls, *backward.calls]
    return {
        "forward_bytes": forward.elementwise() / unit,
        "backward_bytes": (backward.elementwise() - again) / unit,
        "recomputed_bytes": again / unit,
        "forward_thin_bytes": sum(call.traffic for call in forward.calls if call.thin)
        / unit,
        "backward_thin_bytes": sum(call.traffic for call in backward.calls if call.thin)
        / unit,
        "forward_flops": forward_flops.get_total_flops(),
        "backward_flops": backward_flops.get_total_flops(),
        "launches": len(forward.calls),
        "backward_launches": len(backward.calls),
        "kept": sum(kept.values()) / unit,
        "forward_peak": forward_peak / unit,
        "backward_peak": alive.peak / unit,
        "largest_tensor": max(call.largest for call in calls),
        "host_syncs": len(forward.syncs) + len(backward.syncs),
    }


def measure_forward() -> dict[str, float]:
    """The whole packed forward of one sample at 480x832x81 without glyph tokens, as the
    trainer calls it, at the true configuration.

    The closed form is that of packed tokens, less what does not reach a text-to-video
    velocity: the condition channels, and the last block's text queries, projections and
    feed-forward.
    """
    shape = B
    transformer: Any = accelerated(HUNYUAN_VIDEO_15["num_layers"], "nothing")
    prompt = PromptEmbeds(
        text=torch.empty(
            shape.text_tokens, transformer.config["text_embed_dim"], device="meta"
        ),
        glyph=torch.empty(0, transformer.config["text_embed_2_dim"], device="meta"),
    )
    with (
        torch.no_grad(),
        FlopCounterMode(display=False) as counter,
        Record() as record,
    ):
        transformer(
            hidden_states=torch.empty(1, *shape.latent, device="meta"),
            timestep=torch.full((1,), 640.0),
            prompts=[prompt],
        )
    flops = counter.get_total_flops()
    size = HUNYUAN_VIDEO_15, shape.video_tokens, shape.text_tokens
    needed = forward_work(*size).total - unused_work(*size).total
    return {
        "forward.parameters": sum(p.numel() for p in transformer.parameters()),
        "forward.flops_beyond_closed_form": flops - needed,
        "forward.flops": flops,
        "forward.largest_tensor": max(call.largest for call in record.calls),
        "forward.host_syncs": len(record.syncs),
    }


def unused_work(config: Mapping[str, Any], video_tokens: int, text_tokens: int) -> Work:
    """Parts of `forward_work` that no velocity needs: the last block's text queries,
    projections and feed-forward, and the condition channels of text-to-video.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    n = video_tokens
    length = text_tokens
    per_token = 2 + 2 * config["mlp_ratio"]
    linear = 2 * length * per_token * d * d
    if not image_tokens(config):
        linear += 2 * n * d * (config["in_channels"] - config["out_channels"])
    return Work(linear=linear, attention=4 * length * (n + length) * d)
