"""The calls of the libraries that need a GPU, against stand-ins for them.

Each stand-in has the signature of the real function (flash-attn 2.8, FlashAttention-3 3.0, flash-attn-4, xformers
0.0.33, torch 2.13), refuses what is not dense attention, and computes with what arrives under each name, so that a
swapped argument is a wrong number.
"""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.models.attention import libraries
from sage_fast.models.attention.libraries import LIBRARIES
from tests.models.attention.attention_cases import TOLERANCE, Inputs, assert_matches_oracle, make_inputs


def forward_of(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    assert scale == q.shape[-1] ** -0.5
    return LIBRARIES["reference"].forward(q, k, v)


def backward_of(*arguments: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments: grad_out, q, k, v, out, lse."""
    assert scale == arguments[1].shape[-1] ** -0.5 and arguments[5].is_contiguous()
    return LIBRARIES["reference"].backward(*arguments, deterministic=False)


def all_absent(arguments: dict[str, Any], *names: str) -> None:
    assert all(arguments[name] is None for name in names)


def flash2_module(seen: dict[str, Any]) -> types.ModuleType:
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, causal, window_size_left, window_size_right, softcap) == (0.0, False, -1, -1, 0.0)
        assert alibi_slopes is None and return_softmax is False
        return *forward_of(q, k, v, softmax_scale), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, causal, window_size_left, window_size_right, softcap) == (0.0, False, -1, -1, 0.0)
        assert alibi_slopes is None and rng_state is None
        seen["deterministic"] = deterministic
        results = backward_of(dout, q, k, v, out, softmax_lse, scale=softmax_scale)
        for buffer, result in zip((dq, dk, dv), results, strict=True):
            buffer.copy_(result)
        return torch.empty(0)

    fake = types.ModuleType("flash_attn.flash_attn_interface")
    fake._flash_attn_forward, fake._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    return fake


def flash3_module(seen: dict[str, Any]) -> types.ModuleType:
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
        sm_margin=0,
    ):  # fmt: skip
        all_absent(locals(), "k_new", "out_", "cu_seqlens_q", "max_seqlen_k", "seqlens_rotary", "v_descale")
        assert (causal, window_size_left, window_size_right, attention_chunk, softcap) == (False, -1, -1, 0, 0.0)
        return *forward_of(q, k, v, softmax_scale), torch.tensor([]), torch.tensor([])

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        all_absent(locals(), "cu_seqlens_q", "cu_seqlens_k", "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k")
        assert (is_causal, window_size_left, window_size_right, softcap) == (False, -1, -1, 0.0)
        seen["deterministic"] = deterministic
        results = backward_of(dout, q, k, v, out, softmax_lse, scale=softmax_scale)
        for buffer, result in zip((dq, dk, dv), results, strict=True):
            buffer.copy_(result)
        return torch.empty(0)

    fake = types.ModuleType("flash_attn_interface")
    fake._flash_attn_forward, fake._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    return fake


def flash4_module(seen: dict[str, Any]) -> types.ModuleType:
    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, learnable_sink=None, m_block_size=128, n_block_size=128, num_threads=384,
        num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None,
        cu_total_m_blocks=None, cu_total_n_blocks=None, return_lse=False, out=None, lse=None, aux_tensors=None,
    ):  # fmt: skip
        all_absent(locals(), "cu_seqlens_q", "seqused_k", "window_size_left", "softcap", "out", "lse")
        assert (causal, num_splits) == (False, 1)
        out, lse = forward_of(q, k, v, softmax_scale)
        return out, lse if return_lse else None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
        num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
        AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, block_sparse_tensors=None,
    ):  # fmt: skip
        all_absent(locals(), "cu_seqlens_q", "seqused_k", "window_size_left", "dq")
        assert (causal, softcap) == (False, 0.0)
        seen["deterministic"] = deterministic
        return backward_of(dout, q, k, v, out, lse, scale=softmax_scale)

    fake = types.ModuleType("flash_attn.cute.interface")
    fake._flash_attn_fwd, fake._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    return fake


def xformers_module(seen: dict[str, Any]) -> types.ModuleType:
    def memory_efficient_attention_forward_requires_grad(
        query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None
    ):
        assert attn_bias is None and p == 0.0 and op is None
        out, lse = forward_of(query, key, value, scale)
        # The CUTLASS kernel's rows end at a multiple of 32.
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)

    def memory_efficient_attention_backward(
        grad, output, lse, query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None
    ):
        assert attn_bias is None and p == 0.0 and op is None
        seen["deterministic"] = False
        return backward_of(grad, query, key, value, output, lse, scale=scale)

    fake = types.ModuleType("xformers.ops.fmha")
    fake.memory_efficient_attention_forward_requires_grad = memory_efficient_attention_forward_requires_grad
    fake.memory_efficient_attention_backward = memory_efficient_attention_backward
    return fake


FAKES = {"flash2": flash2_module, "flash3": flash3_module, "flash4": flash4_module, "xformers": xformers_module}


def run_calls(backend: str, inputs: Inputs, deterministic: bool = False) -> tuple[Tensor, ...]:
    """out, lse and gradients by a library's two calls, without the op's check that it can run here."""
    q, k, v, grad_out = inputs
    out, lse = LIBRARIES[backend].forward(q, k, v)
    out, lse = out.contiguous(), lse.contiguous()
    return out, lse, *LIBRARIES[backend].backward(grad_out, q, k, v, out, lse, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backend", FAKES)
def test_calls_of_a_library_fit_its_signature(
    monkeypatch: pytest.MonkeyPatch, backend: str, deterministic: bool
) -> None:
    seen: dict[str, Any] = {}
    fake = FAKES[backend](seen)
    parents = fake.__name__.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parents[:depth]), types.ModuleType(".".join(parents[:depth])))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    assert fake.__name__ == LIBRARIES[backend].module and LIBRARIES[backend]._missing() is None
    inputs = make_inputs("more-keys", torch.float32, "fused")
    assert_matches_oracle(run_calls(backend, inputs, deterministic), inputs, 1e-6)
    assert seen["deterministic"] == (deterministic and LIBRARIES[backend].deterministic)


class AtenOnCuda(TorchDispatchMode):
    """Stands in for aten's CUDA attention: arguments by the names of the schema, results as those ops give them."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::_scaled_dot_product_")
        if not name.startswith(("cudnn", "flash", "efficient")):
            return func(*args, **(kwargs or {}))
        given = {
            argument.name: argument.default_value for argument in func._schema.arguments if argument.has_default_value()
        }
        given |= dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        assert given["dropout_p"] == 0.0 and given["is_causal"] is False and given.get("attn_bias") is None
        self.called.append((name, torch.are_deterministic_algorithms_enabled()))
        q, k, v = (given[key].transpose(1, 2) for key in ("query", "key", "value"))
        padding = -q.shape[1] % 32 if name.startswith("efficient") else 0
        if not name.endswith("_backward"):
            assert given.get("compute_log_sumexp", True) is True
            out, lse = forward_of(q, k, v, given["scale"])
            lse = torch.nn.functional.pad(lse, (0, padding), value=torch.inf)
            lse = lse[..., None] if name.startswith("cudnn") else lse
            unused = [torch.empty(0) if str(value.type) == "Tensor" else 0 for value in func._schema.returns[2:]]
            return out.transpose(1, 2), lse, *unused
        lse = given["logsumexp"]
        if name.startswith("cudnn"):
            assert lse.ndim == 4
            lse = lse[..., 0]
        if name.startswith("efficient"):
            assert lse.shape[-1] == q.shape[1] + padding and lse[..., q.shape[1] :].isinf().all()
            assert given["grad_input_mask"] == [True, True, True, False]
        else:
            assert given["cum_seq_q"] is None and given["cum_seq_k"] is None
            assert (given["max_q"], given["max_k"]) == (q.shape[1], k.shape[1])
        grad = given["grad_out_" if "grad_out_" in given else "grad_out"].transpose(1, 2)
        lse = lse[..., : q.shape[1]].contiguous()
        results = backward_of(grad, q, k, v, given["out"].transpose(1, 2), lse, scale=given["scale"])
        return *(x.transpose(1, 2) for x in results), *[None] * (len(func._schema.returns) - 3)


@pytest.mark.parametrize(
    ("backend", "dtype", "capability", "op"),
    [
        ("cudnn", torch.bfloat16, (9, 0), "cudnn_attention"),
        ("sdpa", torch.bfloat16, (8, 0), "flash_attention"),
        ("sdpa", torch.float16, (7, 5), "efficient_attention"),
        ("sdpa", torch.float32, (9, 0), "efficient_attention"),
    ],
)
def test_calls_of_torch_on_a_gpu_fit_the_schema(
    monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype, capability: tuple[int, int], op: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    inputs = make_inputs("more-keys", dtype, "fused")
    with monkeypatch.context() as patch, AtenOnCuda() as mode:
        patch.setattr(type(LIBRARIES["sdpa"]), "_on_cpu", staticmethod(lambda q: False))
        results = run_calls(backend, inputs)
        if LIBRARIES[backend].deterministic:
            run_calls(backend, inputs, deterministic=True)
    assert_matches_oracle(results, inputs, TOLERANCE[dtype])
    assert mode.called[:2] == [(op, False), (op + "_backward", False)]
    # Torch's deterministic mode, which is how its own kernels are asked, lasts for the one call.
    assert mode.called[3:] == ([(op + "_backward", True)] if LIBRARIES[backend].deterministic else [])
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kind", ["model", "kernel"])
def test_flash3_is_taken_from_the_hubs_cache_where_there_is_no_source_build(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the call of either age of the package; where the cache holds nothing, flash3 is as absent as before."""
    called: list[tuple[object, ...]] = []

    def forward(*arguments: object) -> tuple[str, str, None]:
        called.append(arguments)
        return "out", "lse", None

    build = types.SimpleNamespace(flash_attn_interface=types.SimpleNamespace(_flash_attn_forward=forward))
    loaded: list[Path] = []

    def load(repo_path: Path, *, backend: str | None = None) -> object:
        loaded.append(repo_path)
        return build

    def load_by_name(repo_path: Path, package_name: str) -> object:
        assert package_name == "flash_attn3"
        return load(repo_path)

    package = types.ModuleType("kernels")
    package.get_local_kernel = load if kind == "kernel" else load_by_name  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", package)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    flash3, snapshot = LIBRARIES["flash3"], tmp_path / f"{kind}s--kernels-community--flash-attn3/snapshots/0123"
    libraries._hub_flash3.cache_clear()
    assert "kernels-community/flash-attn3" in str(flash3._missing())
    snapshot.mkdir(parents=True)
    libraries._hub_flash3.cache_clear()
    assert flash3._missing() is None
    q = torch.zeros(1, 3, 2, 64)
    assert flash3.forward(q, q, q) == ("out", "lse")
    assert loaded == [snapshot] and called[0][3:] == (*(None,) * 20, 64**-0.5, False)
    libraries._hub_flash3.cache_clear()
