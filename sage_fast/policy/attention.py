"""Attention as one op over the libraries that compute it fast; no kernel is written here.

    out = softmax(scale q k^T) v,   lse = log sum_j exp(scale q . k_j),   scale = 1 / sqrt(D)

Dense, not causal, no mask, no dropout: what HunyuanVideo-1.5 needs once padded tokens are dropped. The pair (out, lse)
is all that a backward pass wants besides q, k and v, so a caller may keep it and recompute the rest. With
p = exp(scale q k^T - lse) and delta = rowsum(grad_out * out):

    dv = p^T grad_out,   ds = scale p (grad_out v^T - delta),   dq = ds k,   dk = ds^T q

Source: Dao (arXiv 2307.08691), section 3.1 and algorithm 2.

`attention` and `attention_backward` are `torch.library` ops: they trace, run on fake and meta tensors whether or not
the library is installed, and count their floating-point operations. `resolve_backend` chooses among the libraries;
each is one class below, and `LIBRARIES` is the table of them.

Shapes: B batch, Nq and Nk tokens of query and key, H heads, D head dim.
"""

import functools
import importlib
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from sage_fast.config import ConfigError

logger = logging.getLogger(__name__)

Backend = Literal["cudnn", "flash2", "flash3", "flash4", "xformers", "sdpa", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

HALF = (torch.bfloat16, torch.float16)

Gradients = tuple[Tensor, Tensor, Tensor]


class Library:
    """What one backend can run, and its two calls.

    `forward` and `backward` take and give (B, N, H, D); the ops above them make the results contiguous.
    """

    name: Backend
    install: str
    """What to do where the library is missing."""
    module: str | None = None
    """The module that must import."""
    dtypes: tuple[torch.dtype, ...] = HALF
    capabilities: tuple[int, int] = (8, 99)
    """Smallest and largest major compute capability of the GPU."""
    head_dims: tuple[int, int] = (8, 256)
    """What the head dim must be a multiple of, and its largest value."""
    deterministic: bool = False
    """Whether `backward` can give the same bits every time."""

    def unavailable(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False
    ) -> str | None:
        """Why this backend cannot run there, or None if it can. Cheap checks first: the last one imports."""
        if device.type == "meta":
            return None
        if device.type != "cuda":
            return f"it runs on NVIDIA GPUs, and the device is {device.type}"
        major, minor = torch.cuda.get_device_capability(device)
        least, most = self.capabilities
        if not least <= major <= most:
            span = f"{least}.x or newer" if most == 99 else f"{least}.x" if least == most else f"{least}.x to {most}.x"
            return f"it needs a GPU of compute capability {span}, and this one has {major}.{minor}"
        if dtype not in self.dtypes:
            return f"it computes in {_names(self.dtypes)}, not in {_names((dtype,))}"
        multiple, largest = self.head_dims
        if head_dim % multiple or head_dim > largest:
            return f"it needs a head dim that is a multiple of {multiple} up to {largest}, not {head_dim}"
        if deterministic and not self.deterministic:
            return "its backward pass is not deterministic"
        return self._missing()

    def _missing(self) -> str | None:
        if self.module is None:
            return None
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            # An installed library built for another torch or CUDA fails here too, so the error itself is told.
            return f"{self.module} does not import ({str(error).splitlines()[0]}); {self.install}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        raise NotImplementedError

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        determinism: bool,
    ) -> Gradients:
        """(dq, dk, dv); `determinism` asks for the same bits every time."""
        raise NotImplementedError


class Reference(Library):
    """Plain PyTorch in float32, or float64 for float64. Stores Nq x Nk scores: for tests and small inputs."""

    name = "reference"
    install = "it is part of this project"
    deterministic = True

    def unavailable(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False
    ) -> str | None:
        """Runs everywhere."""
        return None if dtype.is_floating_point else f"it computes in floating point, not in {_names((dtype,))}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """As in the formula of this file."""
        wide = _lse_dtype(q.dtype)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), k.to(wide)) * scale
        lse = scores.logsumexp(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v.to(wide))
        return out.to(q.dtype), lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        determinism: bool,
    ) -> Gradients:
        """As in the formula of this file."""
        dtype = q.dtype
        grad_out, q, k, v, out = (tensor.to(lse.dtype) for tensor in (grad_out, q, k, v, out))
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale - lse[..., None]).exp()
        delta = torch.einsum("bqhd,bqhd->bhq", grad_out, out)
        ds = scale * p * (torch.einsum("bqhd,bkhd->bhqk", grad_out, v) - delta[..., None])
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, k)
        dk = torch.einsum("bhqk,bqhd->bkhd", ds, q)
        dv = torch.einsum("bhqk,bqhd->bkhd", p, grad_out)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class Sdpa(Library):
    """The kernels inside torch, through the aten ops that return the lse.

    CPU: flash. CUDA: flash (FlashAttention-2) for half precision from compute capability 8.0 on, the memory-efficient
    kernel for float32 and older GPUs. aten's layout is (B, H, N, D), a transposed view of ours. With dropout 0 the
    backward kernels do not read their random state, so they are given empty tensors.
    """

    name = "sdpa"
    install = "it is part of torch"
    dtypes = (*HALF, torch.float32)
    capabilities = (7, 99)
    deterministic = True

    def unavailable(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False
    ) -> str | None:
        """CPU: any head dim and float dtype."""
        if device.type == "cpu":
            return (
                None if dtype in (*self.dtypes, torch.float64) else f"it computes in {_names(self.dtypes)} and float64"
            )
        reason = super().unavailable(device, dtype, head_dim, deterministic)
        if reason is None and device.type == "cuda" and dtype == torch.bfloat16:
            if torch.cuda.get_device_capability(device)[0] < 8:
                return "bfloat16 needs a GPU of compute capability 8.x or newer"
        return reason

    @staticmethod
    def _is_flash(q: Tensor) -> bool:
        return q.dtype in HALF and torch.cuda.get_device_capability(q.device)[0] >= 8

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """As in `Library`."""
        aten = torch.ops.aten
        query, key, value = _heads_first(q, k, v)
        if q.device.type == "cpu":
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
        elif self._is_flash(q):
            out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
        else:
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, scale=scale)
            lse = lse[..., : q.shape[1]]  # rounded up to a multiple of 32 queries
        return out.transpose(1, 2), lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        determinism: bool,
    ) -> Gradients:
        """As in `Library`."""
        aten = torch.ops.aten
        grad, query, key, value, result = _heads_first(grad_out, q, k, v, out)
        if q.device.type == "cpu":
            # One thread owns one (batch, head), so the order of its sums never changes.
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, result, lse, 0.0, False, scale=scale
            )
        elif self._is_flash(q):
            seed, offset = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in (2, 0))
            lengths = (None, None, q.shape[1], k.shape[1])
            with _deterministic_algorithms(determinism):
                dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                    grad, query, key, value, result, lse, *lengths, 0.0, False, seed, offset, scale=scale
                )
        else:
            # The kernel wants rows of the lse at multiples of 32, and infinity where there is no query: exp(-inf) = 0.
            padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
            seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
            wanted = [True, True, True, False]
            with _deterministic_algorithms(determinism):
                dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
                    grad, query, key, value, None, result, padded, seed, offset, 0.0, wanted, scale=scale
                )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class Cudnn(Library):
    """cuDNN's fused attention as torch ships it. torch itself refuses it where determinism is asked for."""

    name = "cudnn"
    install = "install a torch that is built for CUDA, with cuDNN 9 or newer"
    head_dims = (8, 128)

    def _missing(self) -> str | None:
        version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return None if version is not None and version >= 90000 else f"cuDNN is {version or 'missing'}; {self.install}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """As in `Library`."""
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *_heads_first(q, k, v), None, True, scale=scale
        )
        return out.transpose(1, 2), lse.reshape(lse.shape[:3])  # cuDNN's is (B, H, Nq, 1)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        determinism: bool,
    ) -> Gradients:
        """As in `Library`."""
        grad, query, key, value, result = _heads_first(grad_out, q, k, v, out)
        seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
        lengths = (None, None, q.shape[1], k.shape[1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, result, lse[..., None], seed, offset, None, *lengths, 0.0, False, scale=scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class Flash2(Library):
    """flash-attn 2.7 and newer: `flash_attn.flash_attn_interface`, whose private pair is the one that gives the lse."""

    name = "flash2"
    install = 'install flash-attn: pip install --no-build-isolation "flash-attn>=2.7"'
    module = "flash_attn.flash_attn_interface"
    deterministic = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """As in `Library`."""
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(
            q,
            k,
            v,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=False,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        determinism: bool,
    ) -> Gradients:
        """As in `Library`."""
        from flash_attn.flash_attn_interface import _flash_attn_backward

        dq, dk, dv = _empty_gradients(q, k, v)
        _flash_attn_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=False,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=determinism,
        )
        return dq, dk, dv


class Flash3(Library):
    """FlashAttention-3, the `hopper` folder of flash-attention: `flash_attn_interface`.

    Arguments go by position: between releases the optional ones gained defaults and `causal` became `is_causal`, but
    their order stayed.
    """

    name = "flash3"
    install = "install FlashAttention-3 from the hopper folder of github.com/Dao-AILab/flash-attention"
    module = "flash_attn_interface"
    capabilities = (9, 9)
    deterministic = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """As in `Library`."""
        from flash_attn_interface import _flash_attn_forward

        # From k_new to v_descale: caches, pages, ragged lengths, rotary tables, float8 scales.
        absent = (None,) * 20
        out, lse, *_ = _flash_attn_forward(q, k, v, *absent, scale, False)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        determinism: bool,
    ) -> Gradients:
        """As in `Library`."""
        from flash_attn_interface import _flash_attn_backward

        dq, dk, dv = _empty_gradients(q, k, v)
        # From cu_seqlens_q to max_seqlen_k: ragged lengths.
        absent = (None,) * 6
        _flash_attn_backward(grad_out, q, k, v, out, lse, *absent, dq, dk, dv, scale, False, deterministic=determinism)
        return dq, dk, dv


class Flash4(Library):
    """FlashAttention-4, in CuTe-DSL: `flash_attn.cute`. Deterministic from Blackwell on."""

    name = "flash4"
    install = "install FlashAttention-4: pip install flash-attn-4"
    module = "flash_attn.cute.interface"
    capabilities = (9, 11)
    head_dims = (8, 128)
    deterministic = True

    def unavailable(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False
    ) -> str | None:
        """As in `Library`."""
        if deterministic and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 10:
            return "its backward pass is deterministic on Blackwell GPUs only"
        return super().unavailable(device, dtype, head_dim, deterministic)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """As in `Library`."""
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=False, return_lse=True)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        determinism: bool,
    ) -> Gradients:
        """As in `Library`."""
        from flash_attn.cute.interface import _flash_attn_bwd

        # Releases before the option existed are asked for it only by those who need it, and then refuse.
        option = {"deterministic": True} if determinism else {}
        dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, grad_out, lse, softmax_scale=scale, causal=False, **option)
        return dq, dk, dv


class Xformers(Library):
    """xformers' memory-efficient attention, which picks its own kernel. "This operator may be nondeterministic"."""

    name = "xformers"
    install = 'install xformers: pip install "xformers>=0.0.33"'
    module = "xformers.ops.fmha"
    dtypes = (*HALF, torch.float32)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """As in `Library`."""
        from xformers.ops.fmha import memory_efficient_attention_forward_requires_grad

        out, lse = memory_efficient_attention_forward_requires_grad(q, k, v, scale=scale)
        return out, lse[..., : q.shape[1]]  # some of its kernels round up to a multiple of 32 queries

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        determinism: bool,
    ) -> Gradients:
        """As in `Library`; xformers pads the lse by itself."""
        from xformers.ops.fmha import memory_efficient_attention_backward

        dq, dk, dv, *_ = memory_efficient_attention_backward(grad_out, out, lse, q, k, v, scale=scale)
        return dq, dk, dv


LIBRARIES: Mapping[Backend, Library] = {
    library.name: library for library in (Cudnn(), Flash2(), Flash3(), Flash4(), Xformers(), Sdpa(), Reference())
}

# The order in which `auto` tries, by major compute capability: the fastest published first. bf16, head dim 128:
# * Hopper, forward / backward TFLOP/s on an H100: FlashAttention-3 648 / 561, cuDNN 595 / 516, FlashAttention-2
#   370 / 322 (Shah et al., arXiv 2407.08608, figures 5 and 6). FlashAttention-4 has no figure there and is left to an
#   explicit choice.
# * Blackwell: FlashAttention-4 up to 1.3x cuDNN 9.13 on a B200 (Zadouri et al., "FlashAttention-4", 2026, abstract).
# * Ampere and Ada: FlashAttention-2, up to 73 % of an A100's peak (Dao, arXiv 2307.08691, section 4.1); cuDNN's gain
#   over it is Hopper's and Blackwell's.
# xformers dispatches to FlashAttention-2 where it can; `sdpa` is torch's own build of it.
_ORDER: Mapping[int, tuple[Backend, ...]] = {
    7: ("xformers", "sdpa"),
    8: ("flash2", "cudnn", "xformers", "sdpa"),
    9: ("flash3", "cudnn", "flash2", "xformers", "sdpa"),
    10: ("flash4", "cudnn", "flash2", "xformers", "sdpa"),
}


def _candidates(device: torch.device, dtype: torch.dtype) -> tuple[Backend, ...]:
    """What `auto` tries, best first; the reference ends every order."""
    if dtype == torch.float64:
        return ("reference",)
    if device.type != "cuda":
        return ("sdpa", "reference")
    major = torch.cuda.get_device_capability(device)[0]
    return (*_ORDER[min(max(major, min(_ORDER)), max(_ORDER))], "reference")


_logged: set[tuple[str, str]] = set()


def resolve_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False
) -> Backend:
    """The backend that `name` means on a device.

    `auto` is the fastest one, by published speed, that is installed and can run: on a GPU see `_ORDER`, on a CPU
    `sdpa`, for float64 `reference`. The choice, and why faster ones were passed over, is logged once per device and
    choice.

    Args:
        name: `auto` or one of `BACKENDS`.
        device: where q, k and v live; on `meta` every name will do, as only shapes are computed.
        dtype: of q, k and v.
        head_dim: D.
        deterministic: the backward pass must give the same bits every time.

    Raises:
        ConfigError: an unknown name, or a backend that cannot run there; says why and what to do.
    """
    device = torch.device(device)
    if name == "auto":
        return _fastest(device, dtype, head_dim, deterministic)
    if name not in LIBRARIES:
        raise ConfigError(f"model.attention is {name!r}, but it must be auto or one of {', '.join(BACKENDS)}.")
    _require_runnable(name, device, dtype, head_dim, deterministic)
    return name  # type: ignore[return-value]  # a key of LIBRARIES is a Backend


def _fastest(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool) -> Backend:
    passed_over = []
    for name in _candidates(device, dtype):
        reason = LIBRARIES[name].unavailable(device, dtype, head_dim, deterministic)
        if reason is None:
            if (str(device), name) not in _logged:
                _logged.add((str(device), name))
                why = f" ({'; '.join(passed_over)})" if passed_over else ""
                logger.info("Attention backend on %s: %s%s", device, name, why)
            return name
        passed_over.append(f"not {name}: {reason}")
    raise ConfigError(f"No attention backend can run on {device} in {_names((dtype,))}: {'; '.join(passed_over)}.")


def backend_report(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> dict[str, str | None]:
    """Which backends can run on a device: name -> None if it can, else the reason why not."""
    device = torch.device(device)
    return {name: LIBRARIES[name].unavailable(device, dtype, head_dim) for name in BACKENDS}


@functools.cache
def _require_runnable(
    name: Backend, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool
) -> None:
    """Refuse a backend that cannot run. Cached: the ops ask at every call, and what is installed does not change."""
    reason = LIBRARIES[name].unavailable(device, dtype, head_dim, deterministic)
    if reason is None:
        return
    others = [other for other in BACKENDS if not LIBRARIES[other].unavailable(device, dtype, head_dim, deterministic)]
    raise ConfigError(
        f"The attention backend {name!r} cannot run on {device}: {reason}. "
        f"Or set model.attention to auto, or to one that can run here: {', '.join(others) or 'none'}."
    )


@torch.library.custom_op("sage_fast::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, backend: str, deterministic: bool) -> tuple[Tensor, Tensor]:
    _require_runnable(backend, q.device, q.dtype, q.shape[-1], deterministic)
    out, lse = LIBRARIES[backend].forward(q, k, v, q.shape[-1] ** -0.5)  # type: ignore[index]
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("sage_fast::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, backend: str, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _require_runnable(backend, q.device, q.dtype, q.shape[-1], deterministic)
    # Autograd may hand over a broadcast gradient, which no library reads.
    grad_out, lse = grad_out.contiguous(), lse.contiguous()
    library = LIBRARIES[backend]  # type: ignore[index]
    dq, dk, dv = library.backward(grad_out, q, k, v, out, lse, q.shape[-1] ** -0.5, deterministic)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, backend: str, deterministic: bool) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=_lse_dtype(q.dtype))


@_attention_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, backend: str, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, ctx.backend, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out: Tensor, grad_lse: Tensor | None):  # type: ignore[no-untyped-def]
    return *_attention_backward(grad_out, *ctx.saved_tensors, ctx.backend, ctx.deterministic), None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


def _forward_flops(q_shape: torch.Size, k_shape: torch.Size, *args: object, out_shape: object = None) -> int:
    """Two products of 2 B H Nq Nk D each, as torch counts its own attention."""
    batch, queries, heads, dim = q_shape
    return 4 * batch * heads * queries * k_shape[1] * dim


def _backward_flops(
    grad_shape: torch.Size, q_shape: torch.Size, k_shape: torch.Size, *args: object, out_shape: object = None
) -> int:
    """Five products: the scores again, and the four of the formula above; torch counts the same."""
    return 5 * _forward_flops(q_shape, k_shape) // 2


register_flop_formula(torch.ops.sage_fast.attention)(_forward_flops)
register_flop_formula(torch.ops.sage_fast.attention_backward)(_backward_flops)


def attention(q: Tensor, k: Tensor, v: Tensor, *, backend: str, deterministic: bool = False) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v and its log-sum-exp; differentiable in q, k and v, the lse taken as a constant.

    Args:
        q: (B, Nq, H, D). Batch and token strides may be anything, the last two dimensions are dense.
        k, v: (B, Nk, H, D), likewise.
        backend: one of `BACKENDS`; `resolve_backend` turns `auto` into one.
        deterministic: the backward pass gives the same bits every time.

    Returns:
        out: (B, Nq, H, D) contiguous, in q's dtype.
        lse: (B, H, Nq) float32, float64 for float64; natural logarithm of the sum of exp(scaled scores).

    Raises:
        ValueError: shapes, strides, dtypes or devices that do not fit, or a backend that cannot run there.
    """
    _check(backend, q=q, k=k, v=v)
    return _attention(q, k, v, backend, deterministic)


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    backend: str,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention`, for callers that write their backward pass by hand.

    Args:
        grad_out: (B, Nq, H, D), gradient with respect to out; copied if not contiguous.
        q, k, v: as given to `attention`.
        out, lse: as returned by it, by the same backend or another.
        backend, deterministic: as there.

    Returns:
        dq (B, Nq, H, D), dk and dv (B, Nk, H, D), contiguous, in q's dtype. Not differentiable again.

    Raises:
        ValueError: as in `attention`.
    """
    _check(backend, q=q, k=k, v=v, out=out, grad_out=grad_out)
    if lse.shape != (q.shape[0], q.shape[2], q.shape[1]):
        raise ValueError(
            f"lse has shape {tuple(lse.shape)}; it must be (B, H, Nq) = {(q.shape[0], q.shape[2], q.shape[1])}"
        )
    return _attention_backward(grad_out, q, k, v, out, lse, backend, deterministic)


def _check(backend: str, *, q: Tensor, k: Tensor, v: Tensor, **like_q: Tensor) -> None:
    """Refuse what no backend takes; a library's own message would not name the argument."""
    if backend not in LIBRARIES:
        hint = "; resolve_backend turns auto into one of them" if backend == "auto" else ""
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}{hint}")
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be (B, Nq, H, D) with no dimension empty")
    batch, _, heads, dim = q.shape
    if k.ndim != 4 or k.shape[1] == 0 or k.shape != (batch, k.shape[1], heads, dim):
        raise ValueError(
            f"k has shape {tuple(k.shape)}; it must be (B, Nk, H, D) = ({batch}, Nk, {heads}, {dim}), Nk at least 1"
        )
    for name, tensor, shape in [("v", v, k.shape), *((name, tensor, q.shape) for name, tensor in like_q.items())]:
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}")
    for name, tensor in {"q": q, "k": k, "v": v, **like_q}.items():
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, but q is {q.dtype} on {q.device}")
        if name != "grad_out" and (tensor.stride(3) != 1 or (heads > 1 and tensor.stride(2) != dim)) and dim > 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}; its last two dimensions must be dense, ({dim}, 1). "
                "Call .contiguous() on it"
            )


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, N, H, D) to aten's (B, H, N, D), as views."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Contiguous buffers; `empty_like` would copy the strides of a view."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Torch's deterministic mode for one call: the only way to ask its own attention kernels for it."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
