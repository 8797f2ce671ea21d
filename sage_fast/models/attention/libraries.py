"""The libraries that compute attention, one class each: what it can run, and its
forward and backward call.

`LIBRARIES` is the table of them; `attention.py` chooses from it and makes the chosen
one an op. To add a library, write a class and put it into the table. Each call names
the function it was written against; optional packages are imported where they are
called.

Every `forward` gives (out, lse) of  out = softmax(q k^T / sqrt(D)) v,  every `backward`
the gradients from them.

Shapes: B batch, Nq and Nk tokens of query and key, H heads, D head dim; q (B, Nq, H,
D), k and v (B, Nk, H, D).
"""

import functools
import importlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

Backend = Literal[
    "cudnn", "flash2", "flash3", "flash4", "xformers", "sdpa", "reference"
]

HALF = (torch.bfloat16, torch.float16)

Gradients = tuple[Tensor, Tensor, Tensor]


class Use(NamedTuple):
    """Attention that is asked for: the device and type of q, k and v, and whether
    gradients repeat bit for bit.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    deterministic: bool = False


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """For messages: "bfloat16, float16"."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, N, H, D) to aten's (B, H, N, D), as views."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Contiguous buffers; `empty_like` would copy the strides of a view."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Torch's deterministic mode for one call: the only way to ask its own attention
    kernels for it.
    """
    if not wanted:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Library:
    """The inputs that one backend can run, and its two calls.

    `forward` and `backward` take and give (B, N, H, D); `attention.py` makes the
    results contiguous.
    """

    name: Backend
    install: str
    """Advice where the library is missing."""
    module: str | None = None
    """The module that must import."""
    dtypes: tuple[torch.dtype, ...] = HALF
    capabilities: tuple[int, int] = (8, 99)
    """Smallest and largest major compute capability of the GPU."""
    head_dims: tuple[int, int] = (8, 256)
    """A divisor of the head dim, and its largest value."""
    deterministic: bool = False
    """Tells whether `backward` can give the same bits every time."""

    def unavailable(self, use: Use) -> str | None:
        """Why this backend cannot run there, or None if it can. Cheap checks first: the
        last one imports.
        """
        if use.device.type == "meta":
            return None
        if use.device.type != "cuda":
            return f"it runs on NVIDIA GPUs, and the device is {use.device.type}"
        major, minor = torch.cuda.get_device_capability(use.device)
        least, most = self.capabilities
        if not least <= major <= most:
            span = f"{least}.x to {most}.x"
            if most == 99:
                span = f"{least}.x or newer"
            elif least == most:
                span = f"{least}.x"
            return (
                f"it needs a GPU of compute capability {span}, and this one has "
                f"{major}.{minor}"
            )
        if use.dtype not in self.dtypes:
            return (
                f"it computes in {dtype_names(self.dtypes)}, not in "
                f"{dtype_names((use.dtype,))}"
            )
        multiple, largest = self.head_dims
        if use.head_dim % multiple or use.head_dim > largest:
            return (
                f"it needs a head dim that is a multiple of {multiple} up to "
                f"{largest}, not {use.head_dim}"
            )
        if use.deterministic and not self.deterministic:
            return "its backward pass is not deterministic"
        return self._missing()

    def _missing(self) -> str | None:
        if self.module is None:
            return None
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            # An installed library built for another torch or CUDA fails here too, so
            # the error itself is shown.
            return (
                f"{self.module} does not import ({str(error).splitlines()[0]}); "
                f"{self.install}"
            )
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
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
        deterministic: bool,
    ) -> Gradients:
        """(dq, dk, dv); `deterministic` asks for the same bits every time."""
        raise NotImplementedError


class Reference(Library):
    """Plain PyTorch in float32, or float64 for float64. Stores Nq x Nk scores: for
    tests and small inputs.
    """

    name = "reference"
    install = "it is part of this project"
    deterministic = True

    def unavailable(self, use: Use) -> str | None:
        """Runs everywhere."""
        if use.dtype.is_floating_point:
            return None
        return f"it computes in floating point, not in {dtype_names((use.dtype,))}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The formulas of `attention.py`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), k.to(wide)) * _scale(q)
        lse = scores.logsumexp(-1)
        out = torch.einsum(
            "bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v.to(wide)
        )
        return out.to(q.dtype), lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        deterministic: bool,
    ) -> Gradients:
        """The formulas of `attention.py`."""
        dtype = q.dtype
        # The lse is float32, or float64 for float64: the type to compute in.
        grad_out, q, k, v, out = (
            tensor.to(lse.dtype) for tensor in (grad_out, q, k, v, out)
        )
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k) * _scale(q) - lse[..., None]).exp()
        delta = torch.einsum("bqhd,bqhd->bhq", grad_out, out)
        ds = (
            _scale(q)
            * p
            * (torch.einsum("bqhd,bkhd->bhqk", grad_out, v) - delta[..., None])
        )
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, k)
        dk = torch.einsum("bhqk,bqhd->bkhd", ds, q)
        dv = torch.einsum("bhqk,bqhd->bkhd", p, grad_out)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class Sdpa(Library):
    """The kernels inside torch, through the aten ops that return the lse.

    CPU: flash. CUDA: flash (FlashAttention-2) for half precision from compute
    capability 8.0 on, the memory-efficient kernel for float32 and older GPUs. aten's
    layout is (B, H, N, D), a transposed view of ours. With dropout 0 the backward
    kernels do not read their random state, so they are given empty tensors.
    """

    name = "sdpa"
    install = "it is part of torch"
    dtypes = (*HALF, torch.float32)
    capabilities = (7, 99)
    deterministic = True

    def unavailable(self, use: Use) -> str | None:
        """CPU: any head dim and float dtype."""
        if use.device.type == "cpu":
            allowed = (*self.dtypes, torch.float64)
            if use.dtype in allowed:
                return None
            return f"it computes in {dtype_names(allowed)}, not in {use.dtype}"
        older = (
            use.device.type == "cuda"
            and torch.cuda.get_device_capability(use.device)[0] < 8
        )
        if older and use.dtype == torch.bfloat16:
            return "bfloat16 needs a GPU of compute capability 8.x or newer"
        return super().unavailable(use)

    def kernel(self, q: Tensor) -> Literal["cpu", "flash", "efficient"]:
        """The one that takes such a query."""
        if q.device.type == "cpu":
            return "cpu"
        newer = q.dtype in HALF and torch.cuda.get_device_capability(q.device)[0] >= 8
        return "flash" if newer else "efficient"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        aten = torch.ops.aten
        query, key, value = _heads_first(q, k, v)
        kernel = self.kernel(q)
        if kernel == "cpu":
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, scale=_scale(q)
            )
        elif kernel == "flash":
            out, lse, *_ = aten._scaled_dot_product_flash_attention(
                query, key, value, scale=_scale(q)
            )
        else:
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(
                query, key, value, None, True, scale=_scale(q)
            )
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
        deterministic: bool,
    ) -> Gradients:
        aten = torch.ops.aten
        grad, query, key, value, result = _heads_first(grad_out, q, k, v, out)
        kernel = self.kernel(q)
        if kernel == "cpu":
            # One thread owns one (batch, head), so the order of its sums never changes.
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, result, lse, 0.0, False, scale=_scale(q)
            )
        elif kernel == "flash":
            seed, offset = (
                torch.empty(size, dtype=torch.uint64, device=q.device)
                for size in (2, 0)
            )
            lengths = (None, None, q.shape[1], k.shape[1])
            with _deterministic_algorithms(deterministic):
                dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                    grad,
                    query,
                    key,
                    value,
                    result,
                    lse,
                    *lengths,
                    0.0,
                    False,
                    seed,
                    offset,
                    scale=_scale(q),
                )
        else:
            # The kernel wants rows of the lse at multiples of 32, and infinity where
            # there is no query: exp(-inf) = 0.
            padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
            seed, offset = (
                torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)
            )
            wanted = [True, True, True, False]
            with _deterministic_algorithms(deterministic):
                dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
                    grad,
                    query,
                    key,
                    value,
                    None,
                    result,
                    padded,
                    seed,
                    offset,
                    0.0,
                    wanted,
                    scale=_scale(q),
                )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class Cudnn(Library):
    """cuDNN's fused attention as torch ships it. torch itself refuses it where
    determinism is asked for.
    """

    name = "cudnn"
    install = "install a torch that is built for CUDA, with cuDNN 9 or newer"
    head_dims = (8, 128)

    def _missing(self) -> str | None:
        # None where torch has no cuDNN
        version = torch.backends.cudnn.version()
        if version is not None and version >= 90000:
            return None
        return f"cuDNN is {version or 'missing'}; {self.install}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *_heads_first(q, k, v), None, True, scale=_scale(q)
        )
        # from (B, H, Nq, 1), torch 2.9 and newer
        return out.transpose(1, 2), lse.reshape(lse.shape[:3])

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        deterministic: bool,
    ) -> Gradients:
        """As in `Library`; by torch's flash kernel where cuDNN's would be wrong."""
        if (
            k.shape[1] % 128 == 64
            and torch.cuda.get_device_capability(q.device)[0] == 9
        ):
            # On Hopper the padded half of the last 128 keys has a score of 0: exp(0 -
            # lse) overflows where an lse is below -88.7, and dq is NaN
            # (pytorch/pytorch, issue 196678; NVIDIA/cudnn-frontend, pull request 628).
            return LIBRARIES["sdpa"].backward(
                grad_out, q, k, v, out, lse, deterministic
            )
        grad, query, key, value, result = _heads_first(grad_out, q, k, v, out)
        seed, offset = (
            torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)
        )
        lengths = (None, None, q.shape[1], k.shape[1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad,
            query,
            key,
            value,
            result,
            lse[..., None],
            seed,
            offset,
            None,
            *lengths,
            0.0,
            False,
            scale=_scale(q),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# Neither dropout, mask, window, cap nor bias.
_FLASH2_DENSE: Mapping[str, Any] = {
    "dropout_p": 0.0,
    "causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


class Flash2(Library):
    """flash-attn 2.7 and newer: `flash_attn.flash_attn_interface`, whose private pair
    is the one that gives the lse.
    """

    name = "flash2"
    install = 'install flash-attn: pip install --no-build-isolation "flash-attn>=2.7"'
    module = "flash_attn.flash_attn_interface"
    deterministic = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(
            q, k, v, softmax_scale=_scale(q), return_softmax=False, **_FLASH2_DENSE
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
        deterministic: bool,
    ) -> Gradients:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        dq, dk, dv = empty_gradients(q, k, v)
        options = {
            "softmax_scale": _scale(q),
            "deterministic": deterministic,
            **_FLASH2_DENSE,
        }
        _flash_attn_backward(grad_out, q, k, v, out, lse, dq, dk, dv, **options)
        return dq, dk, dv


@functools.cache
def _hub_flash3() -> Any:
    """The interface of the newest build that the `kernels` package has in its cache on
    this machine; None where there is none that loads. Nothing is downloaded: it is
    code.
    """
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        # models-- before the hub had repositories of kernels, kernels-- since.
        cache = Path(os.environ.get("KERNELS_CACHE") or HF_HUB_CACHE)
        folders = cache.glob("*s--kernels-community--flash-attn3/snapshots/*")
        folder = max(folders, key=lambda path: path.stat().st_mtime)
        # By name, because a checkout of this project has a folder that is called so
        # too.
        load = importlib.import_module("kernels").get_local_kernel
        return load(folder).flash_attn_interface
    except Exception as error:  # noqa: BLE001  releases of that package raise AssertionError and more
        logger.debug("No FlashAttention-3 from the hub: %s", error)
        return None


class Flash3(Library):
    """FlashAttention-3: `flash_attn_interface` of the `hopper` folder of
    flash-attention, or the hub's build of it.

    Arguments go by position: between releases the optional ones gained defaults and
    `causal` became `is_causal`, but their order stayed.
    """

    name = "flash3"
    install = (
        "install FlashAttention-3, the fastest on this GPU: pip install kernels, then "
        '`python -c "from kernels import get_kernel; '
        "get_kernel('kernels-community/flash-attn3')\"`, "
        "or build the hopper folder of github.com/Dao-AILab/flash-attention"
    )
    module = "flash_attn_interface"
    capabilities = (9, 9)
    deterministic = True

    def _missing(self) -> str | None:
        missing = super()._missing()
        return None if missing is None or _hub_flash3() is not None else missing

    def _interface(self) -> Any:
        """The source build's module, or the hub's."""
        if super()._missing() is None:
            return importlib.import_module("flash_attn_interface")
        return _hub_flash3()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # From k_new to v_descale: caches, pages, ragged lengths, rotary tables, float8
        # scales.
        absent = (None,) * 20
        out, lse, *_ = self._interface()._flash_attn_forward(
            q, k, v, *absent, _scale(q), False
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
        deterministic: bool,
    ) -> Gradients:
        dq, dk, dv = empty_gradients(q, k, v)
        # From cu_seqlens_q to max_seqlen_k: ragged lengths.
        absent = (None,) * 6
        self._interface()._flash_attn_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse,
            *absent,
            dq,
            dk,
            dv,
            _scale(q),
            False,
            deterministic=deterministic,
        )
        return dq, dk, dv


class Flash4(Library):
    """FlashAttention-4, in CuTe-DSL: `flash_attn.cute`. Deterministic from Blackwell
    on.
    """

    name = "flash4"
    install = "install FlashAttention-4: pip install flash-attn-4"
    module = "flash_attn.cute.interface"
    capabilities = (9, 11)
    head_dims = (8, 128)
    deterministic = True

    def unavailable(self, use: Use) -> str | None:
        if (
            use.deterministic
            and use.device.type == "cuda"
            and torch.cuda.get_device_capability(use.device)[0] < 10
        ):
            return "its backward pass is deterministic on Blackwell GPUs only"
        return super().unavailable(use)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(
            q, k, v, softmax_scale=_scale(q), causal=False, return_lse=True
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
        deterministic: bool,
    ) -> Gradients:
        from flash_attn.cute.interface import _flash_attn_bwd

        # Releases before the option existed are asked for it only by those who need it,
        # and then refuse.
        option = {"deterministic": True} if deterministic else {}
        dq, dk, dv, *_ = _flash_attn_bwd(
            q, k, v, out, grad_out, lse, softmax_scale=_scale(q), causal=False, **option
        )
        return dq, dk, dv


class Xformers(Library):
    """xformers' memory-efficient attention, which picks its own kernel and warns that
    it may not be deterministic.
    """

    name = "xformers"
    install = 'install xformers: pip install "xformers>=0.0.33"'
    module = "xformers.ops.fmha"
    dtypes = (*HALF, torch.float32)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from xformers.ops.fmha import memory_efficient_attention_forward_requires_grad

        out, lse = memory_efficient_attention_forward_requires_grad(
            q, k, v, scale=_scale(q)
        )
        # some of its kernels round up to a multiple of 32 queries
        return out, lse[..., : q.shape[1]]

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        deterministic: bool,
    ) -> Gradients:
        """As in `Library`; xformers pads the lse by itself."""
        from xformers.ops.fmha import memory_efficient_attention_backward

        dq, dk, dv, *_ = memory_efficient_attention_backward(
            grad_out, out, lse, q, k, v, scale=_scale(q)
        )
        return dq, dk, dv


LIBRARIES: Mapping[str, Library] = {
    library.name: library
    for library in (
        Cudnn(),
        Flash2(),
        Flash3(),
        Flash4(),
        Xformers(),
        Sdpa(),
        Reference(),
    )
}
