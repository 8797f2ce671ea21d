"""One pass of a transformer block, as far as the families compute it alike: its place
in autograd, linear layers with adapters, and the MLP.

The last branch of a block is gate_mlp (gelu(y W_1 + b) W_2 + b) in every family. Its
product h W_2 is never recomputed for its own sake. The backward needs it only for the
gradient of the gate, and

    dgate = sum_n dx (h W_2^T + b) = rowsum(W_2 * (dx^T h)) + b sum_n dx,    with   dW_2 = gate * (dx^T h),

so where W_2 is trained dgate costs no further product.

Shapes: B batch, N tokens, D width; rows are tokens of all samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sage_fast.kernels import BlockKernels
from sage_fast.models.fused import BlockSettings, Rotary, without_autocast
from sage_fast.models.projection import (
    Adapter,
    Gradients,
    Projection,
    input_backward,
    matrix_product,
    project,
    projection,
    room_for_low,
    weights_backward,
)

EPS = 1e-6
"""Of the norms of all blocks."""

_FEW_TOKENS = 1024
"""Up to this many tokens h W_2 is recomputed for the gate after all: that reads W_2
once, the formula above three times.
"""


class Weights(NamedTuple):
    """Linear layers of a block by the input that they share, and the position of its
    norms in the flat list of tensors.

    Every block has `qkv`, `out`, `ff_in` and `ff_out`, without layers where nothing
    reads them.
    """

    groups: dict[str, list[Projection]]
    norms: int

    def rebuilt(self, tensors: Sequence[Tensor]) -> "Weights":
        """The same layers over the tensors that autograd saved; `tensors` is the
        block's flat list.
        """
        groups = {
            name: [layer.rebuilt(tensors) for layer in layers]
            for name, layers in self.groups.items()
        }
        return self._replace(groups=groups)


def read_layers(flat: list[Tensor], *modules: Any) -> list[Projection]:
    """Layers of diffusers or peft, whose tensors are appended to a block's flat list."""
    found = []
    for module in modules:
        layer = projection(module, len(flat))
        flat += layer.tensors()
        found.append(layer)
    return found


T = TypeVar("T")


class Stage(Generic[T]):
    """An attribute that is computed when it is first read, and may be set or deleted.

    `functools.cached_property` of Python 3.11 has one lock for all blocks, which
    threads that exchange tokens wait for.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.name = compute.__name__

    def __get__(self, owner: Any, kind: type) -> T:
        # Python looks into the instance before a descriptor without `__set__`, so the
        # next read does not come here.
        value = owner.__dict__[self.name] = self.compute(owner)
        return value


class Staged:
    """One pass that computes its `Stage`s as they are read, in the forward and again in
    the backward.
    """

    saved: Sequence[str]
    """Stages that the forward leaves for the backward."""

    def forget(self, *stages: str) -> None:
        """Free what is not saved."""
        for stage in stages:
            if stage in self.__dict__ and stage not in self.saved:
                del self.__dict__[stage]


def save(ctx: Any, tensors: Sequence[Tensor], *passes: Staged) -> None:
    """Leave the tensors and the saved stages of an autograd function for its backward."""
    values = [one.__dict__[name] for one in passes for name in one.saved]
    # Autograd saves a flat list. Of each stage `ctx.sizes` keeps the size of its tuple,
    # 0 for a plain tensor.
    ctx.sizes = [len(value) if type(value) is tuple else 0 for value in values]
    flat: list[Tensor] = []
    for value, size in zip(values, ctx.sizes, strict=True):
        flat += value if size else (value,)
    ctx.save_for_backward(*tensors, *flat)


def restore(ctx: Any, saved: Sequence[Tensor], *passes: Staged) -> None:
    """Set the stages that `save` left; `saved` is what follows the tensors."""
    stages = [(one, name) for one in passes for name in one.saved]
    first = 0
    for (one, name), size in zip(stages, ctx.sizes, strict=True):
        one.__dict__[name] = saved[first : first + size] if size else saved[first]
        first += size or 1


def run_block(
    kind: Any, settings: BlockSettings, weights: Any, rotary: Rotary, *tensors: Tensor
) -> Any:
    """Results of one block; with autograd where a gradient is wanted.

    Args:
        kind: class of the pass, made of all that follows. Its `forward` gives the
            results, and `backward(grads, wanted, gradients)` the gradients of its
            first `num_inputs` tensors, from those of the results. `live`: its parts
            that have stages too.
        tensors: inputs, and the weights in their flat list.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _BlockFunction.apply((kind, settings, weights, rotary), *tensors)
    with torch.no_grad():
        return kind(settings, weights, rotary, *tensors).forward()


class _BlockFunction(torch.autograd.Function):
    """`run_block` for autograd."""

    @staticmethod
    def forward(ctx: Any, made: Any, *tensors: Tensor) -> Any:
        kind, *parts = made
        block = kind(*parts, *tensors)
        out = block.forward()
        ctx.made = made
        ctx.count = len(tensors)
        save(ctx, tensors, block, *block.live)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kind, settings, weights, rotary = ctx.made
        saved = ctx.saved_tensors
        tensors = saved[: ctx.count]
        weights = weights.rebuilt(tensors[kind.num_inputs :])
        block = kind(settings, weights, rotary, *tensors)
        restore(ctx, saved[ctx.count :], block, *block.live)
        wanted = ctx.needs_input_grad[1:]
        gradients = Gradients(wanted[kind.num_inputs :])
        with without_autocast(tensors[0]):
            found = block.backward(grads, wanted, gradients)
        return None, *found, *gradients.values


@dataclass
class BlockPass(Staged):
    """One pass of tokens (B, N, D) through a block's layers."""

    kernels: BlockKernels
    layers: dict[str, list[Projection]]
    """As `Weights.groups`."""
    adapters: dict[str, Adapter | None]
    """Their low-rank updates."""
    low: dict[str, Tensor | None] = field(default_factory=dict, init=False)
    """Inputs times the first factors of the low-rank updates, as the forward left them.
    """

    def modulate(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """The input of `qkv`, with y A^T of low-rank updates behind it where
        `room_for_low` says so.
        """
        adapter = self.adapters["qkv"]
        tail = room_for_low(adapter, x.shape[1])
        y = self.kernels.adaln(x, scale, shift, EPS, tail)
        if adapter is not None and tail:
            # x A^T once for q, k and v, where their product reads it as more columns of
            # its input.
            y = y[..., : x.shape[2] + tail]
            rows, low = y.flatten(0, 1).tensor_split([x.shape[2]], dim=1)
            torch.mm(rows, adapter.a.t(), out=low)
        return y

    def project(self, name: str, x: Tensor, out: Tensor | None = None) -> Tensor:
        """`projection.project` of a group of layers."""
        # x A^T is kept: the gradient of B reads it again, and x may be gone by then.
        result, self.low[name] = project(x, self.layers[name], self.adapters[name], out)
        return result

    def project_backward(
        self,
        name: str,
        grads: Sequence[Tensor],
        x: Tensor | None,
        gradients: Gradients,
        out: Tensor | None = None,
    ) -> Tensor:
        """Gradient of the input of a group of layers, of rows or of tokens (B, N, ...),
        as of `input_backward`.

        Those of the layers' tensors go into `gradients`.
        """
        layers = self.layers[name]
        adapter = self.adapters[name]
        # A product with x is left out where the weights and their adapters are frozen.
        rows = x.flatten(0, -2) if x is not None and gradients.wants(*layers) else None
        flat = [grad.flatten(0, -2) for grad in grads]
        result, low_grad = input_backward(flat, layers, adapter, rows, out=out)
        weights_backward(
            flat,
            rows,
            layers,
            gradients,
            adapter,
            low_grad=low_grad,
            low=self.low.get(name),
        )
        return result.view(*grads[0].shape[:-1], -1)

    def feed_forward_backward(
        self,
        grad: Tensor,
        hidden: Tensor,
        normed: Tensor,
        gate: Tensor,
        gradients: Gradients,
        *,
        modulation: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of y (B, N, D), through W_2, the GELU and W_1, and of the gate
        where `modulation` wants it.

        Args:
            grad: of the block's result.
            hidden: y W_1 + b, which the GELU's derivative needs.
            normed: y.
        """
        (ff_out,) = self.layers["ff_out"]
        adapter = self.adapters["ff_out"]
        wanted = gradients.wants(ff_out)
        branch_grad, _ = self.kernels.gated_residual_backward(
            grad, None, gate, hidden.dtype
        )
        branch_grad = branch_grad.flatten(0, 1)
        # h = gelu(hidden) is never saved: the kernel that differentiates the GELU
        # writes it on the way, if anyone asks.
        activated_grad, low_grad = input_backward([branch_grad], [ff_out], adapter)
        hidden_grad, activated = self.kernels.gelu_tanh_backward(
            activated_grad, hidden.flatten(0, 1), modulation or wanted
        )
        gate_grad: Tensor | None = None
        weight_grad: Tensor | None = None
        if modulation:
            whole = gradients.wanted[ff_out.first] and not ff_out.low_rank
            many = grad.shape[1] > _FEW_TOKENS
            if whole and many and len(grad) == 1 and gate.ndim == 2:
                # h W_2 is not recomputed: dx^T h, which dW_2 takes in any case, holds
                # the gate's gradient too.
                gate_grad, weight_grad = _gate_gradient(
                    grad[0], activated, ff_out, gate
                )
            else:
                # h W_2 is recomputed for the gate's gradient alone: dx^T h is not at
                # hand (W_2 frozen or low-rank), mixes gates, or costs more than the
                # product (few tokens).
                branch = self.project("ff_out", activated).view(grad.shape)
                _, gate_grad = self.kernels.gated_residual_backward(
                    grad, branch, gate, hidden.dtype
                )
        # dW_2 is not computed twice where the gate has made it; x A^T and its gradient
        # serve the adapter alone.
        weights_backward(
            *([branch_grad], activated, [ff_out], gradients, adapter),
            weight_gradient=weight_grad,
            low_grad=low_grad if wanted else None,
        )
        return self.project_backward(
            "ff_in", [hidden_grad.view(hidden.shape)], normed, gradients
        ), gate_grad


def _gate_gradient(
    grad: Tensor, activated: Tensor, layer: Projection, gate: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of gate (1, D) and W_2 (D, 4 D) of one sample, from dx (N, D) and h (N,
    4 D); see the file's head.
    """
    product = matrix_product(grad.t(), activated, layer.weight.dtype)
    # rowsum(W_2 * product) as one small product for each row, without W_2 * product in
    # memory.
    gate_grad = torch.bmm(product[:, None], layer.weight[:, :, None]).flatten()
    if layer.bias is not None:
        gate_grad = gate_grad + layer.bias * grad.sum(0)
    # In place: with its gate on every row the product is dW_2.
    return gate_grad[None].to(gate.dtype), product.mul_(gate[0, :, None])
