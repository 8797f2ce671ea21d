"""The calls of the libraries that need a GPU, against stand-ins for them.

Each stand-in has the parameters of the real function (flash-attn 2.8, FlashAttention-3
3.0, flash-attn-4, xformers 0.0.33, torch 2.13), refuses what is not dense attention,
and computes with what arrives under each name, so that a swapped argument is a wrong
number.
"""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.models.attention import libraries
from sage_fast.models.attention.libraries import LIBRARIES, Sdpa
from tests.models.attention.attention_cases import (
    TOLERANCE,
    Inputs,
    assert_matches_oracle,
    make_inputs,
)


def forward_of(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    assert scale == q.shape[-1] ** -0.5
    return LIBRARIES["reference"].forward(q, k, v)


def backward_of(*arguments: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments: grad_out, q, k, v, out, lse."""
    assert scale == arguments[1].shape[-1] ** -0.5 and arguments[5].is_contiguous()
    return LIBRARIES["reference"].backward(*arguments, deterministic=False)


class Interface(NamedTuple):
    """The two functions of a library by name and parameters; those behind | have a
    default.
    """

    module: str
    forward: str
    forward_parameters: str
    backward: str
    backward_parameters: str


INTERFACES = {
    "flash2": Interface(
        "flash_attn.flash_attn_interface",
        "_flash_attn_forward",
        (
            "q k v dropout_p softmax_scale causal window_size_left window_size_right "
            "softcap alibi_slopes return_softmax"
        ),
        "_flash_attn_backward",
        "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal "
        "window_size_left window_size_right softcap "
        "alibi_slopes deterministic | rng_state",
    ),
    "flash3": Interface(
        "flash_attn_interface",
        "_flash_attn_forward",
        "q k v | k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new "
        "seqused_q seqused_k max_seqlen_q "
        "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
        "seqlens_rotary q_descale k_descale "
        "v_descale softmax_scale causal",
        "_flash_attn_backward",
        "dout q k v out softmax_lse | cu_seqlens_q cu_seqlens_k sequed_q sequed_k "
        "max_seqlen_q max_seqlen_k dq dk dv "
        "softmax_scale is_causal window_size_left window_size_right softcap "
        "deterministic",
    ),
    "flash4": Interface(
        "flash_attn.cute.interface",
        "_flash_attn_fwd",
        "q k v | cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q "
        "max_seqlen_k page_table softmax_scale "
        "causal return_lse",
        "_flash_attn_bwd",
        (
            "q k v out dout lse | softmax_scale causal softcap window_size_left "
            "window_size_right deterministic dq dk dv"
        ),
    ),
    "xformers": Interface(
        "xformers.ops.fmha",
        "memory_efficient_attention_forward_requires_grad",
        "query key value | attn_bias p scale",
        "memory_efficient_attention_backward",
        "grad output lse query key value | attn_bias p scale",
    ),
}
ROLES = {"query": "q", "key": "k", "value": "v", "dout": "grad", "output": "out"}
ROLES |= {"softmax_lse": "lse", "softmax_scale": "scale"}


def stand_in(parameters: str, seen: dict[str, Any]) -> Callable[..., Any]:
    """A function of these parameters that refuses what is not dense attention."""
    required, _, optional = (part.split() for part in parameters.partition("|"))
    names = required + optional

    def call(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        assert len(given) == len(args) and not given.keys() & options.keys()
        given |= options
        assert set(required) <= given.keys() <= set(names)
        given = {ROLES.get(name, name): value for name, value in given.items()}
        scale = given.pop("scale")
        seen["deterministic"] = given.pop("deterministic", False)
        assert given.pop("return_lse", True) is True
        buffers = [given.pop(name) for name in ("dq", "dk", "dv") if name in given]
        tensors = [
            given.pop(name)
            for name in ("grad", "q", "k", "v", "out", "lse")
            if name in given
        ]
        assert all(value in (None, False, 0.0, -1) for value in given.values()), given
        if len(tensors) == 3:
            return forward_of(*tensors, scale)
        results = backward_of(*tensors, scale=scale)
        for buffer, result in zip(buffers, results, strict=False):
            buffer.copy_(result)
        return torch.empty(0) if buffers else results

    return call


def module_of(backend: str, seen: dict[str, Any]) -> types.ModuleType:
    interface = INTERFACES[backend]
    forward = stand_in(interface.forward_parameters, seen)

    def padded(*args: Any, **options: Any) -> tuple[Any, ...]:
        """Results as the library gives them: more of them."""
        out, lse = forward(*args, **options)
        if backend == "xformers":
            return out, torch.nn.functional.pad(
                lse, (0, -lse.shape[-1] % 32), value=torch.inf
            )
        return (out, lse) if backend == "flash4" else (out, lse, torch.empty(0), None)

    fake = types.ModuleType(interface.module)
    setattr(fake, interface.forward, padded)
    setattr(fake, interface.backward, stand_in(interface.backward_parameters, seen))
    return fake


def run_calls(
    backend: str, inputs: Inputs, deterministic: bool = False
) -> tuple[Tensor, ...]:
    """out, lse and gradients by a library's two calls, without the op's check that it
    can run here.
    """
    q, k, v, grad_out = inputs
    out, lse = LIBRARIES[backend].forward(q, k, v)
    out = out.contiguous()
    lse = lse.contiguous()
    return (
        out,
        lse,
        *LIBRARIES[backend].backward(grad_out, q, k, v, out, lse, deterministic),
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backend", INTERFACES)
def test_calls_of_a_library_fit_its_signature(
    monkeypatch: pytest.MonkeyPatch, backend: str, deterministic: bool
) -> None:
    seen: dict[str, Any] = {}
    fake = module_of(backend, seen)
    parents = fake.__name__.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        monkeypatch.setitem(
            sys.modules,
            ".".join(parents[:depth]),
            types.ModuleType(".".join(parents[:depth])),
        )
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    assert (
        fake.__name__ == LIBRARIES[backend].module
        and LIBRARIES[backend]._missing() is None
    )
    inputs = make_inputs("more-keys", torch.float32, "fused")
    assert_matches_oracle(run_calls(backend, inputs, deterministic), inputs, 1e-6)
    assert seen["deterministic"] == (deterministic and LIBRARIES[backend].deterministic)


class AtenOnCuda(TorchDispatchMode):
    """Stands in for aten's CUDA attention: arguments by the names of the schema,
    results as those ops give them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::_scaled_dot_product_")
        if not name.startswith(("cudnn", "flash", "efficient")):
            return func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        given = {
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value()
        }
        given |= dict(
            zip((argument.name for argument in arguments), args, strict=False)
        ) | (kwargs or {})
        assert (
            given["dropout_p"] == 0.0
            and given["is_causal"] is False
            and given.get("attn_bias") is None
        )
        self.called.append((name, torch.are_deterministic_algorithms_enabled()))
        q, k, v = (given[key].transpose(1, 2) for key in ("query", "key", "value"))
        padding = -q.shape[1] % 32 if name.startswith("efficient") else 0
        if not name.endswith("_backward"):
            assert given.get("compute_log_sumexp", True) is True
            out, lse = forward_of(q, k, v, given["scale"])
            lse = torch.nn.functional.pad(lse, (0, padding), value=torch.inf)
            lse = lse[..., None] if name.startswith("cudnn") else lse
            unused = [
                torch.empty(0) if str(value.type) == "Tensor" else 0
                for value in func._schema.returns[2:]
            ]
            return out.transpose(1, 2), lse, *unused
        lse = given["logsumexp"]
        if name.startswith("cudnn"):
            assert lse.ndim == 4
            lse = lse[..., 0]
        if name.startswith("efficient"):
            assert (
                lse.shape[-1] == q.shape[1] + padding
                and lse[..., q.shape[1] :].isinf().all()
            )
            assert given["grad_input_mask"] == [True, True, True, False]
        else:
            assert given["cum_seq_q"] is None and given["cum_seq_k"] is None
            assert (given["max_q"], given["max_k"]) == (q.shape[1], k.shape[1])
        grad = given["grad_out_" if "grad_out_" in given else "grad_out"].transpose(
            1, 2
        )
        lse = lse[..., : q.shape[1]].contiguous()
        results = backward_of(
            grad, q, k, v, given["out"].transpose(1, 2), lse, scale=given["scale"]
        )
        return *(x.transpose(1, 2) for x in results), *[None] * (
            len(func._schema.returns) - 3
        )


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
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    op: str,
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: capability
    )
    inputs = make_inputs("more-keys", dtype, "fused")
    with monkeypatch.context() as patch, AtenOnCuda() as mode:
        choose = Sdpa.kernel
        on_gpu = types.SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
        patch.setattr(Sdpa, "kernel", lambda self, q: choose(self, on_gpu))
        results = run_calls(backend, inputs)
        if LIBRARIES[backend].deterministic:
            run_calls(backend, inputs, deterministic=True)
    assert_matches_oracle(results, inputs, TOLERANCE[dtype])
    assert mode.called[:2] == [(op, False), (op + "_backward", False)]
    # Torch's deterministic mode, which is how its own kernels are asked, lasts for the
    # one call.
    assert mode.called[3:] == (
        [(op + "_backward", True)] if LIBRARIES[backend].deterministic else []
    )
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("capability", "taken"), [((9, 0), "flash"), ((10, 0), "cudnn"), ((8, 0), "cudnn")]
)
def test_cudnn_leaves_64_keys_beyond_a_multiple_of_128_to_flash_on_hopper(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], taken: str
) -> None:
    """There cuDNN's own backward pass gives NaN where scores are very negative."""
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: capability
    )
    monkeypatch.setattr(Sdpa, "kernel", lambda self, q: "flash")
    inputs = make_inputs("half-a-tile", torch.bfloat16)
    with AtenOnCuda() as mode:
        results = run_calls("cudnn", inputs)
    assert_matches_oracle(results, inputs, TOLERANCE[torch.bfloat16])
    assert [name for name, _ in mode.called] == [
        "cudnn_attention",
        f"{taken}_attention_backward",
    ]


@pytest.mark.parametrize("kind", ["model", "kernel"])
def test_flash3_is_taken_from_the_hubs_cache_where_there_is_no_source_build(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cache holds nothing, flash3 is as absent as before."""
    loaded: list[Path] = []

    def load(repo_path: Path, *, backend: str | None = None) -> object:
        loaded.append(repo_path)
        return types.SimpleNamespace(flash_attn_interface=module_of("flash3", {}))

    package = types.SimpleNamespace(get_local_kernel=load)
    monkeypatch.setitem(sys.modules, "kernels", package)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    snapshot = tmp_path / f"{kind}s--kernels-community--flash-attn3/snapshots/0123"
    libraries._hub_flash3.cache_clear()
    assert "kernels-community/flash-attn3" in str(LIBRARIES["flash3"]._missing())
    snapshot.mkdir(parents=True)
    libraries._hub_flash3.cache_clear()
    inputs = make_inputs("more-keys", torch.float32)
    assert_matches_oracle(run_calls("flash3", inputs), inputs, 1e-6)
    assert loaded == [snapshot]
    libraries._hub_flash3.cache_clear()
