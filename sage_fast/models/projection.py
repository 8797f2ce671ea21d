"""Linear layers of a transformer block with explicit gradients: weight, bias and any
number of low-rank updates.

    y = x W^T + b + sum_i s_i (x A_i^T) B_i^T

The weights stay in diffusers' (or peft's) modules; a `Projection` only points at them.
Low-rank masters are float32 and computed in the type of x; their gradients come back in
float32.

A product with so narrow a matrix is memory traffic, as much as all elementwise work of
a block, so an `Adapter` joins the updates of all layers that share an input: A has
their first factors below each other, B their s_i B_i in blocks along a diagonal. Then
the update is one more term of the layers' own products:

    narrow   y = (x A^T) B^T + b, then += x W^T: the large product adds to what a thin one wrote
    wide     y = [x | x A^T] [W | B]^T + b, and dy [W | B] = [dy W | dy B]: nothing is written twice. It takes rows of x
             with room for x A^T behind them, and a copy of the weights, which many tokens repay

Shapes: n layers, R rows (tokens of all samples), K input width, M output width, r rank,
T sum of the ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sage_fast.kernels import row_length


class LowRank(NamedTuple):
    """One LoRA update: a (r, K), b (M, r), both float32; scale = alpha / rank.

    Where gradients are collected by video, a (B, r, K) and b (B, M, r) are a copy for
    each of B videos.
    """

    a: Tensor
    b: Tensor
    scale: float


class Projection(NamedTuple):
    """One linear layer: weight (M, K), bias (M,) or None, and its low-rank updates.

    `first` is the position of the weight in the flat list of tensors that the block's
    autograd function takes.
    """

    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[LowRank, ...]
    first: int = 0

    def tensors(self) -> list[Tensor]:
        """Weight, bias, and a and b of every update, in this order."""
        flat = [self.weight] if self.bias is None else [self.weight, self.bias]
        return flat + [
            tensor for update in self.low_rank for tensor in (update.a, update.b)
        ]

    def rebuilt(self, tensors: Sequence[Tensor]) -> "Projection":
        """The same layer over the tensors that autograd saved; `tensors` is the block's
        flat list.
        """
        rest = iter(tensors[self.first :])
        weight = next(rest)
        bias = None if self.bias is None else next(rest)
        return Projection(
            weight,
            bias,
            tuple(
                LowRank(a=next(rest), b=next(rest), scale=update.scale)
                for update in self.low_rank
            ),
            self.first,
        )


def projection(module: nn.Module, first: int = 0) -> Projection:
    """Read a `torch.nn.Linear`, plain or wrapped by peft's LoRA.

    Raises:
        ValueError: a kind of layer or adapter that is more than W, b, A and B.
    """
    if isinstance(module, nn.Linear):
        return Projection(*_parameters(module), (), first)
    from peft.tuners.lora.layer import Linear as LoraLinear

    if not isinstance(module, LoraLinear) or not isinstance(
        module.base_layer, nn.Linear
    ):
        raise ValueError(
            "The fused forward reads torch.nn.Linear and peft's LoRA of it, not "
            f"{type(module).__name__}. Undo the "
            "acceleration (model.forward stock) for this model."
        )
    base = module.base_layer
    # As peft's forward does: an update that is merged would act although it is
    # disabled.
    if module.disable_adapters and module.merged:
        module.unmerge()
    # A merged update is in the weight already.
    if module.disable_adapters or module.merged:
        return Projection(*_parameters(base), (), first)
    updates = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        dropout = module.lora_dropout[name]
        dropped = (
            module.training and not isinstance(dropout, nn.Identity) and dropout.p > 0
        )
        if name in module.lora_variant or module.lora_bias.get(name) or dropped:
            raise ValueError(
                f"Adapter {name!r} uses a LoRA variant, a bias or dropout, which the "
                "fused forward does not compute. "
                "Use plain LoRA, or undo the acceleration (model.forward stock)."
            )
        a, _ = _parameters(module.lora_A[name])
        b, _ = _parameters(module.lora_B[name])
        updates.append(LowRank(a, b, module.scaling[name]))
    return Projection(*_parameters(base), tuple(updates), first)


def _parameters(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias. By attribute they would cost a microsecond each, and a block
    reads dozens in every pass.
    """
    if type(linear) is not nn.Linear:
        return linear.weight, linear.bias
    own: Any = linear._parameters
    return own["weight"], own["bias"]


@dataclass
class Adapter:
    """The low-rank updates of layers that share an input, in the type of the
    computation.
    """

    a: Tensor
    """(T, K) first factors, one below the other."""
    b: Tensor
    """(n M, T) second factors times their scales, in blocks along a diagonal."""
    updates: list[tuple[int, int, slice, LowRank]]
    """Of every update its layer, the position of its master a in the flat list, its
    columns of b, and its masters.
    """
    wide: Tensor | None = field(default=None, repr=False)
    """[W | b], (n M, K + T), once it was asked for."""

    def is_behind(self, rows: Tensor) -> bool:
        """Tell whether rows have x A^T behind x."""
        return rows.shape[1] > self.a.shape[1]

    def low(self, rows: Tensor) -> Tensor:
        """x A^T, (R, T), of rows of x."""
        if self.is_behind(rows):
            return rows[:, self.a.shape[1] :]
        return torch.mm(rows, self.a.t())

    def widened(self, layers: Sequence[Projection]) -> Tensor:
        """[W | b] of the layers."""
        if self.wide is None:
            weights = [layer.weight for layer in layers]
            weight = stacked(weights)
            if weight is None:
                weight = torch.cat(weights)
            self.wide = torch.cat([weight, self.b], dim=1)
        return self.wide


def read_adapters(
    groups: Sequence[Sequence[Projection]], dtype: torch.dtype
) -> list[Adapter | None]:
    """The adapter of each group of layers that share an input; None for a group without
    updates.

    One kernel casts all masters, in every pass of a block. A cast that outlived the
    pass could be stale: FSDP gathers masters, and DeepSpeed steps them, without a trace
    in the tensors' versions.
    """
    updates = [
        [update for layer in group for update in layer.low_rank] for group in groups
    ]
    masters: list[Tensor] = []
    for group in updates:
        # All copies of a master are equal.
        group = [
            u if u.a.ndim == 2 else LowRank(u.a[0], u.b[0], u.scale) for u in group
        ]
        masters += [u.a for u in group] + [
            u.b if u.scale == 1 else u.b * u.scale for u in group
        ]
    if not masters:
        return [None] * len(groups)
    joint = masters[0].new_empty(sum(master.numel() for master in masters), dtype=dtype)
    casts = torch._utils._unflatten_dense_tensors(joint, masters)
    torch._foreach_copy_(casts, masters)
    rest = iter(casts)
    return [
        _join(layers, list(islice(rest, len(group))), list(islice(rest, len(group))))
        if group
        else None
        for layers, group in zip(groups, updates, strict=True)
    ]


def _join(
    layers: Sequence[Projection], first: list[Tensor], second: list[Tensor]
) -> Adapter:
    """The adapter of the layers' cast factors, each list adjacent in memory."""
    a = stacked(first)
    every = stacked(second)
    assert a is not None
    updates: list[tuple[int, int, slice, LowRank]] = []
    column = 0
    for i, layer in enumerate(layers):
        # The order of `Projection.tensors`: weight, bias, then a and b of every update.
        position = layer.first + 1 + (layer.bias is not None)
        for update in layer.low_rank:
            end = column + update.a.shape[-2]
            updates.append((i, position, slice(column, end), update))
            column = end
            position += 2
    n = len(layers)
    outputs, rank = second[0].shape
    # The usual case: one update of the same shape for every layer.
    if every is not None and all(
        len(layer.low_rank) == 1 and layer.weight.shape[0] == outputs
        for layer in layers
    ):
        b = every
        if n > 1:  # one kernel, where block_diag takes one for every factor
            b = (
                every.view(n, outputs, 1, rank) * _identity(n, a.dtype, a.device)
            ).view(len(every), n * rank)
    else:
        rest = iter(second)
        # A layer without updates has rows in b, but no columns.
        blocks = [
            [a.new_empty(len(layer.weight), 0), *islice(rest, len(layer.low_rank))]
            for layer in layers
        ]
        b = torch.block_diag(*(torch.cat(block, dim=1) for block in blocks))
    return Adapter(a, b, updates)


@cache
def _identity(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n, 1, n, 1)."""
    # Cached in inference mode, while generating, it must serve training as well.
    with torch.inference_mode(False):
        return torch.eye(n, dtype=dtype, device=device).view(n, 1, n, 1)


def room_for_low(adapter: Adapter | None, tokens: int) -> int:
    """Columns that rows of an adapter's input should have behind them for the wide
    form; 0 for the narrow one.

    Of one sample's tokens, so that it does not depend on the batch. Copying the weights
    moves 2 n M K elements, the narrow form n tokens M more than the wide one; and rows
    stay aligned to 16 bytes.
    """
    if adapter is None:
        return 0
    rank, width = adapter.a.shape
    return rank if tokens > 2 * width and rank % 8 == 0 else 0


def project(
    x: Tensor,
    layers: Sequence[Projection],
    adapter: Adapter | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Apply layers of one input. No graph is built.

    One matrix product serves all layers whose weights are adjacent in memory
    (`stack_weights`).

    Args:
        x: (..., K) in the weights' dtype, or (..., K + T) with x A^T behind x.
        out: (R, n M) rows to write into; they may be a slice of wider rows.

    Returns:
        (..., n M), or `out`; and x A^T, (R, T), which the backward pass may use again.
    """
    rows = x.flatten(0, -2)
    sizes = [layer.weight.shape[0] for layer in layers]
    result = rows.new_empty(rows.shape[0], sum(sizes)) if out is None else out
    weight = stacked([layer.weight for layer in layers])
    bias = _stacked_biases(layers)
    low = None if adapter is None else adapter.low(rows)
    if adapter is not None and adapter.is_behind(rows):
        _linear_into(rows, adapter.widened(layers), bias, result)
    else:
        if weight is not None:
            parts = [(weight, bias, result)]
        else:
            columns = result.split(sizes, dim=1)
            parts = [
                (layer.weight, layer.bias, column)
                for layer, column in zip(layers, columns, strict=True)
            ]
        # Narrow: the thin product writes, and brings the bias; the large ones add to
        # it.
        if adapter is not None and low is not None:
            _linear_into(low, adapter.b, bias, result)
        for matrix, own_bias, column in parts:
            if low is None:
                _linear_into(rows, matrix, own_bias, column)
            else:
                _add_product(column, rows, matrix.t())
    return result.view(*x.shape[:-1], -1) if out is None else result, low


def _stacked_biases(layers: Sequence[Projection]) -> Tensor | None:
    """(n M,), zero for a layer without a bias; None where no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    biases = [
        layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
        for layer in layers
    ]
    joint = stacked(biases)
    return torch.cat(biases) if joint is None else joint


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out += a @ b. Not `addmm_`, which torch's counter of FLOPs does not know."""
    return torch.addmm(out, a, b, out=out)


def _linear_into(
    rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


class Gradients:
    """Gradients of a block's flat list of tensors, filled in by the backward passes of
    its parts.
    """

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = wanted
        self.values: list[Tensor | None] = [None] * len(wanted)

    def wants(self, *layers: Projection) -> bool:
        """Tell whether any gradient that is wanted of layers needs their input: all but
        the bias's do.
        """
        for layer in layers:
            first = layer.first
            updates = layer.first + 1 + (layer.bias is not None)
            if self.wanted[first] or any(
                self.wanted[updates : updates + 2 * len(layer.low_rank)]
            ):
                return True
        return False

    def put(self, position: int, value: Tensor) -> None:
        if self.wanted[position]:
            self.values[position] = value


def input_backward(
    grads: Sequence[Tensor],
    layers: Sequence[Projection],
    adapter: Adapter | None = None,
    x: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of the layers' input, (R, K) rows, and with an adapter of x A^T (R, T).

    Args:
        grads: (R, M) rows of every layer, the gradient of its output.
        x: (R, K) rows, or (R, K + T) as `project` took them; None where no gradient is
            wanted that needs them.
        out: (R, K) rows for the result, which otherwise may be a slice of wider rows;
            not with x A^T behind x.
    """
    weights = [layer.weight for layer in layers]
    if adapter is None:
        return _sum_of_products(grads, weights, out), None
    sizes = [weight.shape[0] for weight in weights]
    if x is not None and adapter.is_behind(x):
        rank, width = adapter.a.shape
        # Rows are padded as those of x are, so that each begins aligned.
        both = x.new_empty(len(x), row_length(width, rank))[:, : width + rank]
        _sum_of_products(grads, adapter.widened(layers).split_with_sizes(sizes), both)
        result, low_grad = both.split_with_sizes([width, rank], 1)
        return _add_product(result, low_grad, adapter.a), low_grad
    low_grad = grads[0].new_empty(grads[0].shape[0], adapter.a.shape[0])
    factors = adapter.b.split_with_sizes(sizes)
    # Block by block: b is zero outside them.
    for i, _, columns, _ in adapter.updates:
        torch.mm(grads[i], factors[i][:, columns], out=low_grad[:, columns])
    return _sum_of_products([low_grad, *grads], [adapter.a, *weights], out), low_grad


def _sum_of_products(
    rows: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor | None = None
) -> Tensor:
    """The sum of rows[i] @ weights[i], added up in one buffer."""
    result = torch.mm(rows[0], weights[0], out=out)
    for more, weight in zip(rows[1:], weights[1:], strict=True):
        _add_product(result, more, weight)
    return result


def weights_backward(
    grads: Sequence[Tensor],
    x: Tensor | None,
    layers: Sequence[Projection],
    gradients: Gradients,
    adapter: Adapter | None = None,
    *,
    weight_gradient: Tensor | None = None,
    low_grad: Tensor | None = None,
    low: Tensor | None = None,
) -> None:
    """Gradients of the layers' tensors, into `gradients`; `grads` and `x` as in
    `input_backward`.

    Args:
        weight_gradient: (M, K) of a single layer, where the caller has it already.
        low_grad: (R, T), the gradient of x A^T, from `input_backward`.
        low: x A^T, (R, T), where it is known.
    """
    for grad, layer in zip(grads, layers, strict=True):
        if gradients.wanted[layer.first]:
            if weight_gradient is None:
                assert x is not None
                weight_gradient = matrix_product(
                    grad.t(), x[:, : layer.weight.shape[1]], layer.weight.dtype
                )
            gradients.put(layer.first, weight_gradient)
            # The one that was given is of a single layer.
            weight_gradient = None
        if layer.bias is not None and gradients.wanted[layer.first + 1]:
            # The sum is not rounded to 16 bits on its way to a float32 bias.
            wide = torch.promote_types(grad.dtype, torch.float32)
            gradients.put(layer.first + 1, grad.sum(0, dtype=wide).to(layer.bias.dtype))
    if adapter is None or x is None or low_grad is None:
        return
    if any(gradients.wanted[position] for _, position, _, _ in adapter.updates):
        # The layers share their input, so one product has the gradients of all first
        # factors below each other.
        master = adapter.updates[0][3].a
        rows = x[:, : adapter.a.shape[1]]
        first = _factor_gradient(low_grad, rows, master)
        for _, position, columns, _ in adapter.updates:
            gradients.put(position, first[..., columns, :])
    low = adapter.low(x) if low is None else low
    for i, position, columns, update in adapter.updates:
        if gradients.wanted[position + 1]:
            second = _factor_gradient(grads[i], low[:, columns], update.b)
            gradients.put(
                position + 1, second if update.scale == 1 else second * update.scale
            )


def _factor_gradient(grad: Tensor, rows: Tensor, master: Tensor) -> Tensor:
    """grad^T rows for a low-rank master; where it has a copy for each video, of each by
    itself, (B, ...).
    """
    if master.ndim == 2:
        return matrix_product(grad.t(), rows, master.dtype)
    grad, rows = (tensor.unflatten(0, (len(master), -1)) for tensor in (grad, rows))
    return matrix_product(grad.mT, rows, master.dtype)


def matrix_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b of matrices, or of batches of them, in `dtype`; on CUDA a float32 result
    comes from the accumulator without rounding to 16 bits in between.
    """
    product = torch.mm if a.ndim == 2 else torch.bmm
    if (
        a.is_cuda
        and a.dtype in (torch.bfloat16, torch.float16)
        and dtype == torch.float32
    ):
        return product(a, b, out_dtype=dtype)
    return product(a, b).to(dtype)


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """Several tensors as one along their first dimension, without a copy; None unless
    they are adjacent in memory.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first
    # The storage itself and not its address, which says nothing on the meta device.
    storage = first.untyped_storage()._cdata
    offset = first.storage_offset()
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
    return first.as_strided(
        (rows, *first.shape[1:]), first.stride(), first.storage_offset()
    )


@torch.no_grad()
def stack_weights(layers: Sequence[nn.Linear]) -> None:
    """Make the weights adjacent in memory, and the biases too, so that one matrix
    product serves all layers.

    The parameters and their names stay; only their storage is shared. Layers that
    differ in dtype, device or input width, have no bias, or have not been read yet
    (`without_memory`), are left alone.
    """
    for name in ("weight", "bias"):
        parameters = [getattr(layer, name) for layer in layers]
        first = parameters[0]
        # A DTensor's memory is FSDP's to lay out; a weight whose stride is 0 has none
        # yet.
        if any(
            p is None
            or type(p.data) is not Tensor
            or p.stride(0) == 0
            or (p.dtype, p.device, p.shape[1:])
            != (first.dtype, first.device, first.shape[1:])
            for p in parameters
        ):
            return
        rows = torch.cat([p.data for p in parameters])
        for p, part in zip(
            parameters, rows.split([p.shape[0] for p in parameters]), strict=True
        ):
            p.data = part


@torch.no_grad()
def unstack_weights(layers: Iterable[nn.Linear]) -> None:
    """Give every weight and bias its own storage again."""
    for layer in layers:
        layer.weight.data = layer.weight.data.clone()
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.clone()
