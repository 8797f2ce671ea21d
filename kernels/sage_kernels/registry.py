"""One table of ops. It drives the tests, the benchmarks, the ahead-of-time builds and the table in kernels/README.md.

Every op module ends with `SPEC = OpSpec(...)`; this module holds the record types and collects the modules.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

OPS = (
    "adaln",
    "gated_residual",
    "gated_residual_adaln",
    "qk_norm_rope",
    "gelu_tanh",
    "sde_step",
    "policy_terms",
    "grpo_objective",
)
"""Modules of sage_kernels that define a SPEC, in the order of the README's table."""

Inputs = dict[str, Any]
"""Keyword arguments of an op: tensors, numbers and None."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape to test or to time, with the way its inputs are laid out.

    Example:
        >>> Case(id="odd", shape={"batch": 2, "tokens": 7, "width": 33}, strided=True)
        Case(id='odd', shape={'batch': 2, 'tokens': 7, 'width': 33}, strided=True, mixed=False)
    """

    id: str
    """Readable test id."""
    shape: Mapping[str, int]
    """Named sizes; the names are the op's own."""
    strided: bool = False
    """Inputs are views with gaps between their rows, as chunks of a wider tensor are."""
    mixed: bool = False
    """Small inputs (modulation, norm weights) are float32 whatever the dtype of the large ones."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A Triton kernel with what is needed to build it without a GPU.

    Example:
        >>> Kernel(name="gelu_tanh_forward", function=kernel, signature={"x_ptr": "*bf16", "size": "i64"},
        ...        constexprs={"BLOCK": 1024}, num_warps=4, streaming=("x_ptr",))
    """

    name: str
    """Name in reports, op first: adaln_forward."""
    function: Any
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """Run-time argument -> Triton type ("*bf16", "*fp32", "i32", "i64", "fp32"), in the order of the function."""
    constexprs: Mapping[str, Any]
    """Compile-time arguments."""
    num_warps: int
    """Warps of a program, as the launch table has it for this width."""
    fp_fusion: bool = True
    """Whether the launcher lets the compiler fuse multiply and add."""
    streaming: tuple[str, ...] = ()
    """Pointers to the large tensors. Every access through them must be 16 bytes wide."""
    unaligned: tuple[str, ...] = ()
    """Integers and pointers that are not multiples of 16 (elements, bytes) in a real launch; all others are."""

    def variant(self, name: str, num_warps: int | None = None, **constexprs: Any) -> "Kernel":
        """The same kernel under another name with other compile-time arguments; a pointer may be fixed to None."""
        return replace(
            self,
            name=name,
            constexprs={**self.constexprs, **constexprs},
            num_warps=num_warps or self.num_warps,
            streaming=tuple(pointer for pointer in self.streaming if pointer not in constexprs),
        )


class MakeInputs(Protocol):
    """Builds the keyword arguments of an op, the same for its reference."""

    def __call__(
        self, case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator | None
    ) -> Inputs:
        """`generator` is a CPU generator; None, or device "meta", asks for tensors without meaningful values."""
        ...


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """All that tests, benchmarks and documents need to know about an op.

    Example: the last lines of adaln.py.
    """

    name: str
    """Name of the op, its module, its reference module, its test and its row everywhere."""
    formula: str
    """What it computes, in one line of plain text."""
    source: str
    """Paper equation or reference function that the formula comes from."""
    op: Callable[..., Any]
    """The public function: op(**inputs) -> Tensor or tuple of Tensors."""
    reference: Callable[..., Any]
    """Frozen plain PyTorch with the same arguments and results, any float dtype. Under autograd it yields the
    reference gradients; with float64 inputs it is the oracle."""
    eager: Callable[..., Any] | None = None
    """The op as the public model code writes it, where that differs from `reference`: the baseline of byte counts and
    timings. None: the reference is the baseline."""
    make_inputs: MakeInputs
    """Inputs for a case."""
    differentiable: tuple[str, ...]
    """Names of the inputs that gradients are returned for (skipped where the input is None)."""
    differentiable_outputs: tuple[int, ...] | None = None
    """Indices of the outputs with a gradient; None: all."""
    test_cases: tuple[Case, ...]
    """Odd, one-element, strided and mixed cases, small enough for the interpreter."""
    bench_cases: tuple[Case, ...]
    """Shapes A (352x624, 81 frames) and B (480x832, 81 frames) of HunyuanVideo-1.5."""
    bytes_forward: Callable[[Inputs], int]
    """Bytes that the forward op reads and writes for these inputs; meta tensors will do."""
    bytes_backward: Callable[[Inputs], int]
    """The same for the backward op."""
    bytes_formula: tuple[str, str]
    """Forward and backward bytes in letters for the README, with S = bytes of one large tensor."""
    atol_fp32: float = 1e-5
    """float32: largest allowed error over the root mean square of the oracle's tensor."""
    k_bf16: float = 2.0
    """bfloat16: the op's error against the float64 oracle may be this many times the bfloat16 reference's error."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """Element types of the large inputs that the tests run through."""
    kernels: Callable[[], tuple[Kernel, ...]] = tuple
    """Kernels to build ahead of time."""


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of the elements of the tensors; None counts nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def random_tensor(
    *shape: int,
    dtype: torch.dtype,
    device: torch.device | str,
    generator: torch.Generator | None,
    strided: bool = False,
) -> Tensor:
    """A standard normal tensor; `strided` makes it a view of a wider one, as a chunk of a fused projection is.

    How much wider is drawn too: two strided tensors of one shape have different strides.
    """
    if generator is None or torch.device(device).type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    gap = int(torch.randint(1, 64, (), generator=generator)) if strided else 0
    stored = torch.randn((*shape[:-1], shape[-1] + gap), generator=generator)
    return stored.to(dtype).to(device)[..., : shape[-1]]


def specs() -> dict[str, OpSpec]:
    """Every op by name, in the order of `OPS`."""
    return {name: importlib.import_module(f"sage_kernels.{name}").SPEC for name in OPS}
