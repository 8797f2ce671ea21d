"""Holds an op against a float64 oracle and against its reference in the same dtype.

The oracle is the reference run on the same (rounded) inputs in float64. An op in a
16-bit type may be k times as far from it as the reference in that type, an op in
float32 may differ by a fixed share of the oracle's root mean square; both bounds hold
for the outputs and for the gradient of every differentiable input.

    python -m sage_kernels.parity                     every op on the GPU
    TRITON_INTERPRET=1 python -m sage_kernels.parity    the same without a GPU, in Triton's interpreter: minutes
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sage_kernels import common
from sage_kernels.registry import OPS, Case, Inputs, OpSpec, specs

Layout = Literal["as built", "gaps", "permuted"]
"""`gaps` re-lays inputs and cotangents so that every other element is skipped,
`permuted` so that they are dense with their first two dimensions swapped in memory. `as
built` leaves inputs as the case has them and gives the cotangents of a strided case
gaps between tokens.
"""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One tensor of an op against the oracle. Errors are shares of the oracle's root
    mean square.

    Example:
        >>> Comparison(tensor="d scale", dtype=torch.bfloat16, rms_error=1.7e-3, reference_rms_error=1.7e-3,
        ...            max_error=7e-3, reference_max_error=7e-3, k=1.1, atol=1e-5).passed
        True
    """

    tensor: str
    """"out 0" for the first output, "d x" for the gradient of x."""
    dtype: torch.dtype
    rms_error: float
    """Root mean square of the op's error."""
    reference_rms_error: float
    """The same of the reference in the op's dtype."""
    max_error: float
    """The op's largest error."""
    reference_max_error: float
    """The reference's largest error."""
    k: float
    """Allowed multiple of the reference's error in a 16-bit type."""
    atol: float
    """Allowed error in float32, and slack for sums in float32 in the 16-bit types."""

    @property
    def passed(self) -> bool:
        """True if both errors are within bounds; NaN is not."""
        if self.dtype == torch.float32:
            return self.max_error <= self.atol
        return (
            self.rms_error <= self.k * self.reference_rms_error + self.atol
            and self.max_error <= self.k * self.reference_max_error + self.atol
        )

    def __str__(self) -> str:
        """One line for a message."""
        return (
            f"{self.tensor} ({self.dtype}): rms error {self.rms_error:.3g} (reference "
            f"{self.reference_rms_error:.3g}), "
            f"largest {self.max_error:.3g} (reference "
            f"{self.reference_max_error:.3g}), k {self.k:g}, atol {self.atol:g}"
        )


def compare(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    seed: int = 0,
    layout: Layout = "as built",
    op: Callable[..., Any] | None = None,
) -> list[Comparison]:
    """Run an op forward and backward and compare every output and gradient.

    Args:
        spec: the op.
        case: its shape.
        dtype: type of the large inputs.
        device: where the op runs; the oracle runs there too.
        seed: of inputs and cotangents.
        layout: see `Layout`.
        op: what to judge instead of `spec.op`, for instance the compiled op.

    Returns:
        One comparison per output and per gradient.

    Raises:
        ValueError: the op returns other shapes or dtypes than the reference.
    """
    generator = torch.Generator(device).manual_seed(seed)
    inputs = spec.make_inputs(case, dtype, device, generator)
    relay = {"gaps": with_gaps, "permuted": permuted}.get(layout)
    if relay:
        inputs = {
            name: relay(value) if _is_float(value) else value
            for name, value in inputs.items()
        }
    outputs = run_forward(spec, spec.reference, inputs)[0]
    cotangents = [
        torch.randn(output.shape, generator=generator, device=device).to(output)
        for output in spec.with_gradient(outputs)
    ]
    if relay:
        cotangents = [relay(cotangent) for cotangent in cotangents]
    elif case.strided:
        cotangents = [
            _with_token_gaps(cotangent, gap)
            for gap, cotangent in enumerate(cotangents, start=1)
        ]
    wide = {
        name: value.double() if _is_float(value) else value
        for name, value in inputs.items()
    }

    oracle = run(
        spec, spec.reference, wide, [cotangent.double() for cotangent in cotangents]
    )
    plain = run(spec, spec.reference, inputs, cotangents)
    judged = run(spec, op or spec.op, inputs, cotangents)
    least = spec.least_scale(wide) if spec.least_scale is not None else {}
    comparisons = []
    for (name, exact), (_, expected), (_, given) in zip(
        oracle, plain, judged, strict=True
    ):
        if given.shape != expected.shape or given.dtype != expected.dtype:
            raise ValueError(
                f"{spec.name}, {case.id}: {name} is {tuple(given.shape)} "
                f"{given.dtype}, "
                f"the reference returns {tuple(expected.shape)} {expected.dtype}"
            )
        rms_error, max_error = _errors(given, exact, least.get(name, 0.0))
        reference_rms_error, reference_max_error = _errors(
            expected, exact, least.get(name, 0.0)
        )
        comparisons.append(
            Comparison(
                tensor=name,
                dtype=given.dtype,
                rms_error=rms_error,
                reference_rms_error=reference_rms_error,
                max_error=max_error,
                reference_max_error=reference_max_error,
                k=spec.k_bf16,
                atol=spec.atol_fp32,
            )
        )
    return comparisons


def failures(comparisons: Sequence[Comparison]) -> list[str]:
    """The comparisons that are out of bounds, in words."""
    return [str(comparison) for comparison in comparisons if not comparison.passed]


def run(
    spec: OpSpec,
    function: Callable[..., Any],
    inputs: Inputs,
    cotangents: Sequence[Tensor],
) -> list[tuple[str, Tensor]]:
    """Named outputs ("out 0") and gradients ("d x") of one forward and backward pass."""
    outputs, leaves = run_forward(spec, function, inputs)
    found = [(f"out {index}", output.detach()) for index, output in enumerate(outputs)]
    if leaves:
        gradients = torch.autograd.grad(
            spec.with_gradient(outputs),
            list(leaves.values()),
            list(cotangents),
            allow_unused=True,
        )
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            found.append(
                (f"d {name}", torch.zeros_like(leaf) if gradient is None else gradient)
            )
    return found


def run_forward(
    spec: OpSpec, function: Callable[..., Any], inputs: Inputs
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of function(**inputs), and the inputs that gradients can be taken for, by
    name.
    """
    leaves = {
        name: inputs[name].detach().requires_grad_()
        for name in spec.differentiable
        if inputs[name] is not None
    }
    outputs = [
        leaf
        for leaf in tree_leaves(function(**inputs | leaves))
        if isinstance(leaf, Tensor)
    ]
    return outputs, leaves


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values, every other element of a buffer; a tensor without dimensions
    stays as it is.
    """
    if tensor.ndim == 0:
        return tensor
    buffer = torch.full(
        (*tensor.shape, 2), float("nan"), dtype=tensor.dtype, device=tensor.device
    )
    buffer[..., 0] = tensor
    return buffer[..., 0]


def permuted(tensor: Tensor) -> Tensor:
    """The same values, dense, with the second dimension outermost in memory; unchanged
    below 2 dimensions.
    """
    if tensor.ndim < 2:
        return tensor
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _with_token_gaps(tensor: Tensor, gap: int) -> Tensor:
    """The same values, `gap` elements apart after every (batch, token); tensors of less
    than 3 dimensions unchanged.
    """
    if tensor.ndim < 3:
        return tensor
    tokens = tensor.flatten(2)
    buffer = torch.full(
        (*tokens.shape[:2], tokens.shape[2] + gap), float("nan"), dtype=tensor.dtype
    )
    buffer = buffer.to(tensor.device)[..., : tokens.shape[2]].copy_(tokens)
    return buffer.unflatten(2, tensor.shape[2:])


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _errors(given: Tensor, exact: Tensor, least: float) -> tuple[float, float]:
    """Root mean square and largest error over the root mean square of the exact tensor,
    or over `least` where that is more (over 1 where both are zero).
    """
    if not exact.numel():
        return 0.0, 0.0
    exact = exact.double()
    scale = max(float(exact.square().mean().sqrt()), least) or 1.0
    difference = given.double() - exact
    return float(difference.square().mean().sqrt()) / scale, float(
        difference.abs().max()
    ) / scale


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_kernels.parity", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--op", action="append", choices=OPS, help="this op only; may be repeated"
    )
    chosen = parser.parse_args(argv).op or OPS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not common.INTERPRETED:
        parser.error(
            "there is no GPU, so the kernels run with TRITON_INTERPRET=1 alone: set it"
        )
    status = 0
    for name, spec in specs().items():
        if name in chosen:
            cases = itertools.product(spec.test_cases, spec.dtypes)
            found = [
                comparison
                for case, dtype in cases
                for comparison in compare(spec, case, dtype, device)
            ]
            wrong = failures(found)
            good = len(found) - len(wrong)
            print(f"{name:<21} {good} of {len(found)} tensors within bounds")
            print("".join(f"{line}\n" for line in wrong), end="")
            status |= bool(wrong)
    return status


if __name__ == "__main__":
    sys.exit(main())
