"""Calls that one block makes in the Python thread, launches left out: a GPU waits for
it where blocks are short.

Counted on a CPU with a block of one head and a few tokens. Kernels and attention are
not run: where Triton or the library would take over, nothing happens. A call of a
function, in Python or in C, takes 0.5 to 1 us on a server's core; unlike the time, the
number of calls is the same on every machine and under any load.
"""

import gc
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args
from unittest import mock

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from benchmarks.workload import TINY
from sage_fast import accelerate
from sage_fast.config.sections import LoraConfig
from sage_fast.models.attention.libraries import LIBRARIES
from sage_fast.models.fused import Rotary
from sage_fast.policy.lora import add_lora
from sage_kernels import common, launch

Trained = Literal["nothing", "lora"]
"""Weights that need gradients."""
HEAD_DIM = 8
TOKENS = 24
TEXT = 4
"""One head; tokens enough for the wide form of low-rank updates
(`projection.room_for_low`).
"""
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
"""Code that some versions of Python call, and others run in place, generator
expressions among them.
"""


def measure_host() -> dict[str, float]:
    """Calls of the forward and of the backward pass, by weights that are trained."""
    found: dict[str, float] = {}
    for trained in get_args(Trained):
        found[f"host.forward/{trained}"], found[f"host.backward/{trained}"] = (
            block_calls(trained)
        )
    return found


def block_calls(trained: Trained) -> tuple[int, int]:
    """Calls of the forward and of the backward pass of a block in the middle, with
    `selective` checkpointing.
    """
    config = TINY | {
        "num_attention_heads": 1,
        "attention_head_dim": HEAD_DIM,
        "rope_axes_dim": (2, 2, 4),
    }
    transformer = HunyuanVideo15Transformer3DModel(
        **config | {"num_layers": 3}
    ).requires_grad_(False)
    if trained == "lora":
        add_lora(
            transformer,
            rank=8,
            alpha=None,
            target_modules=LoraConfig().target_modules,
            seed=0,
        )
    accelerate(
        transformer,
        attention="sdpa",
        kernels="triton",
        checkpointing="selective",
        adaln="weights",
    )
    table = torch.ones(TOKENS, HEAD_DIM)
    transformer._acceleration.rotary = Rotary(table, table)  # type: ignore[attr-defined]
    x, text = (
        torch.randn(1, tokens, HEAD_DIM).requires_grad_() for tokens in (TOKENS, TEXT)
    )
    modulation = torch.randn(1, 6 * HEAD_DIM)
    block = transformer.transformer_blocks[1]

    def forward() -> tuple[Tensor, ...]:
        return block(x, text, modulation, modulation, modulation)

    def attend(q: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], q.shape[1])

    def attend_backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:3])

    with (
        mock.patch.object(launch, "start", lambda *arguments: None),
        mock.patch.object(common, "POISON_EMPTY", False),
        mock.patch.multiple(
            LIBRARIES["sdpa"], forward=attend, backward=attend_backward
        ),
    ):
        outputs = forward()  # what is made once, such as tables, is not counted
        torch.autograd.backward(
            outputs, [torch.ones_like(output) for output in outputs]
        )
        outputs, forward_calls = _counted(forward)
        cotangents = [torch.ones_like(output) for output in outputs]
        return forward_calls, _counted(
            lambda: torch.autograd.backward(outputs, cotangents)
        )[1]


def _counted(function: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a function and the calls, in Python and in C, that it made; the
    same on every Python.
    """
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "c_call" or (
            event == "call" and frame.f_code.co_name not in INLINED
        )

    gc.disable()  # finalizers of other objects would be counted
    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return result, calls
