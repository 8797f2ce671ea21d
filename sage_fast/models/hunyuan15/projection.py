"""Linear layers of a transformer block with explicit gradients: weight, bias and any number of low-rank updates.

    y = x W^T + b + sum_i s_i (x A_i^T) B_i^T

The weights stay in diffusers' (or peft's) modules; a `Projection` only points at them. Low-rank masters are float32 and
computed in the type of x; their gradients come back in float32.

Shapes: R rows (tokens of all samples), K input width, M output width, r rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LowRank:
    """One LoRA update: a (r, K), b (M, r), both float32; scale = alpha / rank."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer: weight (M, K), bias (M,) or None, and its low-rank updates.

    `first` is the position of the weight in the flat list of tensors that the block's autograd function takes.
    """

    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[LowRank, ...]
    first: int = 0

    def tensors(self) -> list[Tensor]:
        """Weight, bias, and a and b of every update, in this order."""
        flat = [self.weight] if self.bias is None else [self.weight, self.bias]
        return flat + [tensor for update in self.low_rank for tensor in (update.a, update.b)]

    def rebuilt(self, tensors: Sequence[Tensor]) -> "Projection":
        """The same layer over the tensors that autograd saved; `tensors` is the block's flat list."""
        rest = iter(tensors[self.first :])
        weight = next(rest)
        bias = None if self.bias is None else next(rest)
        return Projection(
            weight,
            bias,
            tuple(LowRank(a=next(rest), b=next(rest), scale=update.scale) for update in self.low_rank),
            self.first,
        )


def projection(module: nn.Module, first: int = 0) -> Projection:
    """Read a `torch.nn.Linear`, plain or wrapped by peft's LoRA.

    Raises:
        ValueError: a kind of layer or adapter that is more than W, b, A and B.
    """
    if isinstance(module, nn.Linear):
        return Projection(module.weight, module.bias, (), first)
    from peft.tuners.lora.layer import Linear as LoraLinear

    if not isinstance(module, LoraLinear) or not isinstance(module.base_layer, nn.Linear):
        raise ValueError(
            f"The fused forward reads torch.nn.Linear and peft's LoRA of it, not {type(module).__name__}. Undo the "
            "acceleration (model.forward stock) for this model."
        )
    base = module.base_layer
    if module.disable_adapters and module.merged:
        module.unmerge()
    if module.disable_adapters or module.merged:
        return Projection(base.weight, base.bias, (), first)
    updates = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        dropout = module.lora_dropout[name]
        dropped = module.training and getattr(dropout, "p", 0.0) > 0
        if name in module.lora_variant or module.lora_bias.get(name) or dropped:
            raise ValueError(
                f"Adapter {name!r} uses a LoRA variant, a bias or dropout, which the fused forward does not compute. "
                "Use plain LoRA, or undo the acceleration (model.forward stock)."
            )
        updates.append(LowRank(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]))
    return Projection(base.weight, base.bias, tuple(updates), first)


def project(x: Tensor, layer: Projection, out: Tensor | None = None) -> Tensor:
    """Apply a layer. No graph is built.

    Args:
        x: (..., K) in the weight's dtype.
        out: (R, M) rows to write into; they may be a slice of wider rows.

    Returns:
        (..., M), or `out`.
    """
    if out is None:
        y = F.linear(x, layer.weight, layer.bias)
        rows = y.flatten(0, -2)
    else:
        y = rows = _linear_into(x.flatten(0, -2), layer.weight, layer.bias, out)
    for update in layer.low_rank:
        low = F.linear(x.flatten(0, -2), update.a.to(x.dtype))
        rows.addmm_(low, update.b.to(x.dtype).t(), alpha=update.scale)
    return y


def project_qkv(x: Tensor, layers: Sequence[Projection], out: Tensor) -> Tensor:
    """Apply several layers of one input and one width into the columns of `out`.

    One matrix product serves all layers if their weights are adjacent in memory (`stack_weights`), and one more serves
    the first factors of all their low-rank updates.

    Args:
        x: (..., K). layers: n of them, each of output width M. out: (R, n M) rows to write into.
    """
    rows = x.flatten(0, -2)
    weight = stacked([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers]
    bias = None if any(b is None for b in biases) else stacked([b for b in biases if b is not None])
    columns = out.split([layer.weight.shape[0] for layer in layers], dim=1)
    if weight is not None and bias is not None:
        _linear_into(rows, weight, bias, out)
    else:
        for layer, column in zip(layers, columns, strict=True):
            _linear_into(rows, layer.weight, layer.bias, column)
    updates = [(update, column) for layer, column in zip(layers, columns, strict=True) for update in layer.low_rank]
    if updates:
        first = torch.cat([update.a for update, _ in updates]).to(x.dtype)
        low = F.linear(rows, first).split([update.a.shape[0] for update, _ in updates], dim=1)
        for (update, column), part in zip(updates, low, strict=True):
            column.addmm_(part, update.b.to(x.dtype).t(), alpha=update.scale)
    return out


def _linear_into(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


class Gradients:
    """Gradients of a block's flat list of tensors, filled in by the backward passes of its parts."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = wanted
        self.values: list[Tensor | None] = [None] * len(wanted)

    def wants(self, layer: Projection) -> bool:
        """Whether any gradient that is wanted of a layer needs the layer's input: all but the bias's do."""
        first, bias = layer.first, layer.bias is not None
        return self.wanted[first] or any(self.wanted[first + 1 + bias : first + 1 + bias + 2 * len(layer.low_rank)])

    def put(self, position: int, value: Tensor) -> None:
        if self.wanted[position]:
            self.values[position] = value


def project_backward(
    grad: Tensor,
    x: Tensor | None,
    layer: Projection,
    gradients: Gradients,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Gradient of a layer's input; those of its tensors go into `gradients`.

    Args:
        grad: (R, M) rows, the gradient of the output.
        x: (R, K) rows, the input; None where `gradients.wants(layer)` is False.
        out: (R, K) rows for the result. accumulate: add to what `out` holds.

    Returns:
        (R, K) rows.
    """
    weight_backward(grad, x, layer, gradients)
    return input_backward(grad, layer, out=out, accumulate=accumulate)


def input_backward(grad: Tensor, layer: Projection, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    """Gradient of a layer's input alone; arguments as in `project_backward`."""
    if out is None:
        out = torch.mm(grad, layer.weight)
    elif accumulate:
        out.addmm_(grad, layer.weight)
    else:
        torch.mm(grad, layer.weight, out=out)
    for update in layer.low_rank:
        low_grad = torch.mm(grad, update.b.to(grad.dtype))
        out.addmm_(low_grad, update.a.to(grad.dtype), alpha=update.scale)
    return out


def weight_backward(
    grad: Tensor, x: Tensor | None, layer: Projection, gradients: Gradients, weight_gradient: Tensor | None = None
) -> None:
    """Gradients of a layer's tensors alone; arguments as in `project_backward`.

    `weight_gradient` (M, K) is given where the caller has it already.
    """
    position = layer.first
    if gradients.wanted[position]:
        if weight_gradient is None:
            assert x is not None
            weight_gradient = matrix_product(grad.t(), x, layer.weight.dtype)
        gradients.put(position, weight_gradient)
    position += 1
    if layer.bias is not None:
        if gradients.wanted[position]:
            gradients.put(position, grad.sum(0, dtype=_wide(grad.dtype)).to(layer.bias.dtype))
        position += 1
    for update in layer.low_rank:
        if gradients.wanted[position] or gradients.wanted[position + 1]:
            assert x is not None
            low_grad = torch.mm(grad, update.b.to(grad.dtype)) * update.scale
            low = F.linear(x, update.a.to(x.dtype)) * update.scale
            gradients.put(position, matrix_product(low_grad.t(), x, update.a.dtype))
            gradients.put(position + 1, matrix_product(grad.t(), low, update.b.dtype))
        position += 2


def matrix_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`; on CUDA a float32 result comes from the accumulator without rounding to 16 bits in between."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """Several tensors as one along their first dimension, without a copy; None unless they are adjacent in memory."""
    first = tensors[0]
    storage, offset = first.untyped_storage()._cdata, first.storage_offset()
    for tensor in tensors:
        if (
            tensor.untyped_storage()._cdata != storage
            or tensor.storage_offset() != offset
            or not tensor.is_contiguous()
            or tensor.shape[1:] != first.shape[1:]
            or tensor.dtype != first.dtype
        ):
            return None
        offset += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


@torch.no_grad()
def stack_weights(layers: Iterable[nn.Linear]) -> None:
    """Make the weights adjacent in memory, and the biases too, so that one matrix product serves all layers.

    The parameters and their names stay; only their storage is shared. Layers that differ in dtype, device or input
    width, have no bias, or have not been read yet (`without_memory`), are left alone.
    """
    layers = list(layers)
    for name in ("weight", "bias"):
        parameters = [getattr(layer, name) for layer in layers]
        first = parameters[0]
        if any(
            p is None
            or type(p.data) is not Tensor
            or p.stride(0) == 0
            or (p.dtype, p.device, p.shape[1:]) != (first.dtype, first.device, first.shape[1:])
            for p in parameters
        ):
            return
        rows = torch.cat([p.data for p in parameters])
        for p, part in zip(parameters, rows.split([p.shape[0] for p in parameters]), strict=True):
            p.data = part


@torch.no_grad()
def unstack_weights(layers: Iterable[nn.Linear]) -> None:
    """Give every weight and bias its own storage again."""
    for layer in layers:
        layer.weight.data = layer.weight.data.clone()
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.clone()
