"""One table of ops. It drives the tests, the benchmarks, the ahead-of-time builds and
the table in kernels/README.md.

Every file of `ops/` ends with `SPEC = OpSpec(...)`; this module holds the record types
and collects the files.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

OPS: tuple[str, ...] = (
    "adaln",
    "gated_residual",
    "gated_residual_adaln",
    "qk_norm_rope",
    "qk_norm_across_heads",
)
OPS += ("gelu_tanh", "sde_step", "policy_loss")
"""Modules of sage_kernels.ops that define a SPEC, in the order of the README's table.
"""

Device = torch.device | str
Inputs = dict[str, Any]
"""Keyword arguments of an op: tensors, numbers and None."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape to test or to time, with the way its inputs are laid out.

    Example:
        >>> Case(id="odd", shape={"batch": 2, "tokens": 7, "width": 33}, strided=True)
        Case(id='odd', shape={'batch': 2, 'tokens': 7, 'width': 33}, strided=True, mixed=False, frozen=(), backward={})
    """

    id: str
    """Readable test id."""
    shape: Mapping[str, int]
    """Named sizes; the names are the op's own."""
    strided: bool = False
    """Inputs are views with gaps between their rows, as chunks of a wider tensor are.
    """
    mixed: bool = False
    """Small inputs (modulation, norm weights) are float32 whatever the dtype of the
    large ones.
    """
    frozen: tuple[str, ...] = ()
    """Differentiable inputs that need no gradient here, as the modulation does not
    under LoRA.
    """
    backward: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the backward operator beyond what autograd gives it, as the fused
    block passes them: a value, or a function of the other arguments by name.
    """


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """All that tests, benchmarks and documents need to know about an op.

    Example: the last lines of ops/adaln.py.
    """

    name: str
    """Name of the op, its file, its reference, its test and its row everywhere."""
    formula: str
    """Formula, in one line of plain text."""
    op: Callable[..., Any]
    """The public function: op(**inputs) -> Tensor or tuple of Tensors."""
    reference: Callable[..., Any]
    """Frozen plain PyTorch with the same arguments and results, any float dtype. Under
    autograd it yields the reference gradients; with float64 inputs it is the oracle.
    """
    eager: Callable[..., Any] | None = None
    """The op as the public model code writes it, where that differs from `reference`:
    the baseline of byte counts and timings. None: the reference is the baseline.
    """
    make_inputs: Callable[[Case, torch.dtype, Device, Generator | None], Inputs]
    """Inputs for a case, for the op and its reference. The generator draws on its own
    device; None, or device "meta", asks for tensors without meaningful values.
    """
    differentiable: tuple[str, ...]
    """Names of the inputs that gradients are returned for (skipped where the input is
    None).
    """
    differentiable_outputs: tuple[int, ...] | None = None
    """Indices of the outputs with a gradient; None: all."""
    test_cases: tuple[Case, ...]
    """Odd, one-element, strided and mixed cases, small enough for the interpreter."""
    bench_cases: tuple[Case, ...]
    """Cases that are timed, counted and built ahead of time, in the variants that
    training runs. A and B come first: 352x624 and 480x832 at 81 frames of
    HunyuanVideo-1.5 trained with LoRA.
    """
    wide_cases: tuple[Case, ...] = ()
    """Shapes beyond the model's that are built ahead of time, in bfloat16."""
    bench_dtype: torch.dtype = torch.bfloat16
    """Type of the large inputs in training."""
    letters: Callable[[Inputs], Mapping[str, int]]
    """Bytes of the letters in `bytes_formula`, for the inputs of case A or B; meta
    tensors will do.
    """
    bytes_formula: tuple[str, str]
    """Traffic of the forward and the backward operator of cases A and B, a sum like "2
    S + 2 m".
    """
    atol_fp32: float = 1e-5
    """float32: largest allowed error over the root mean square of the oracle's tensor.
    """
    least_scale: Callable[[Inputs], Mapping[str, float]] | None = None
    """Inputs -> {"out 1": s} for outputs that are means of terms of both signs: their
    errors are shares of s where it is larger than the root mean square, which by chance
    can be near zero.
    """
    k_bf16: float = 1.1
    """bfloat16: the op's error against the float64 oracle may be this many times the
    bfloat16 reference's error.
    """
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    """Element types of the large inputs that the tests run through and that are built
    ahead of time.
    """

    def for_case(self, case: Case) -> "OpSpec":
        """The op with no gradient for what the case freezes."""
        return replace(
            self,
            differentiable=tuple(
                name for name in self.differentiable if name not in case.frozen
            ),
        )

    def with_gradient(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that have a gradient."""
        indices = self.differentiable_outputs
        if indices is None:
            return list(outputs)
        return [outputs[index] for index in indices if index < len(outputs)]

    def bytes_by_formula(self, inputs: Inputs) -> tuple[int, int]:
        """Forward and backward bytes of case A or B by `bytes_formula`."""
        letters = self.letters(inputs)

        def total(formula: str) -> int:
            terms = [term.split() for term in formula.split(" + ") if term]
            return sum(
                (int(factor[0]) if factor else 1) * letters[letter]
                for *factor, letter in terms
            )

        forward, backward = self.bytes_formula
        return total(forward), total(backward)


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of the elements of the tensors; None counts nothing."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if tensor is not None
    )


def random_tensor(
    *shape: int,
    dtype: torch.dtype,
    device: Device,
    generator: Generator | None,
    strided: bool = False,
) -> Tensor:
    """A standard normal tensor, drawn on the generator's device; `strided` makes it a
    view of a wider one, as a chunk of a fused projection is.

    How much wider is drawn too: two strided tensors of one shape have different
    strides.
    """
    if generator is None or torch.device(device).type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    draw: dict[str, Any] = {"generator": generator, "device": generator.device}
    gap = int(torch.randint(1, 64, (), **draw)) if strided else 0
    stored = torch.randn((*shape[:-1], shape[-1] + gap), **draw)
    return stored.to(dtype).to(device)[..., : shape[-1]]


LATENT_SIZES = ("batch", "channels", "frames", "height", "width")


def latent_shape(batch: int, *sizes: int, **options: int) -> dict[str, int]:
    """Shape of a case on latents: sizes of a batch, and options of the op."""
    return dict(zip(LATENT_SIZES, (batch, *sizes), strict=True)) | options


def random_latents(
    case: Case, dtype: torch.dtype, device: Device, generator: Generator | None
) -> Tensor:
    """A (B, C, F, H, W) tensor of the case's sizes."""
    sizes = [case.shape[name] for name in LATENT_SIZES]
    return random_tensor(
        *sizes, dtype=dtype, device=device, generator=generator, strided=case.strided
    )


def noise_ids_of(rows: int, device: Device) -> Tensor:
    """(B, 3) int64, two different key words and another step a row."""
    words = (
        torch.arange(1, 2 * rows + 1, dtype=torch.int64).view(rows, 2).mul(0x3C6EF372)
        & 0xFFFFFFFF
    )
    return torch.cat([words, torch.arange(rows).unsqueeze(1)], dim=1).to(device)


def specs() -> dict[str, OpSpec]:
    """Every op by name, in the order of `OPS`."""
    return {
        name: importlib.import_module(f"sage_kernels.ops.{name}").SPEC for name in OPS
    }
