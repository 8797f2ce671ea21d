"""Time that one block takes of the Python thread, launches left out: a GPU waits for it where blocks are short.

Measured on a CPU with a block of one head and a few tokens, so that a product costs no more than its call. Kernels and
attention are not run: where Triton or the library would take over, nothing happens. The unit is the time of a cheap
call of PyTorch, `Tensor.view`, so that the machine matters little; it was 0.9 us where the limits were measured.
"""

import time
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from benchmarks.workload import TINY
from sage_fast import accelerate
from sage_fast.config.schema import LoraConfig
from sage_fast.models.attention.libraries import LIBRARIES
from sage_fast.models.hunyuan15.block import Rotary
from sage_fast.policy.lora import add_lora
from sage_kernels import common, launch

Trained = Literal["nothing", "lora"]
"""Which weights need gradients."""
HEAD_DIM, TOKENS, TEXT = 8, 24, 4
"""One head; tokens enough for the wide form of low-rank updates (`projection.room_for_low`)."""
REPEATS = 200


def block_views(trained: Trained) -> tuple[float, float]:
    """CPU time of the forward and of the backward pass of a block in the middle, with `selective` checkpointing.

    The fastest of `REPEATS` over the fastest view, so that the machine and what else it does change little.
    """
    config = TINY | {"num_attention_heads": 1, "attention_head_dim": HEAD_DIM, "rope_axes_dim": (2, 2, 4)}
    transformer = HunyuanVideo15Transformer3DModel(**config | {"num_layers": 3}).requires_grad_(False)
    if trained == "lora":
        add_lora(transformer, rank=8, alpha=None, target_modules=LoraConfig().target_modules, seed=0)
    accelerate(transformer, attention="sdpa", kernels="triton", checkpointing="selective", adaln="weights")
    table = torch.ones(TOKENS, HEAD_DIM)
    transformer._acceleration.rotary = Rotary(table, table)  # type: ignore[attr-defined]
    x, text = (torch.randn(1, tokens, HEAD_DIM).requires_grad_() for tokens in (TOKENS, TEXT))
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
        mock.patch.multiple(LIBRARIES["sdpa"], forward=attend, backward=attend_backward),
    ):
        cotangents = [torch.ones_like(output) for output in forward()]
        view = _fastest(lambda: (lambda: [x.view(1, -1) for _ in range(100)], ())) / 100
        backward = _fastest(lambda: (torch.autograd.backward, (forward(), cotangents)))
        return _fastest(lambda: (forward, ())) / view, backward / view


def _fastest(prepare: Callable[[], tuple[Callable[..., Any], Any]]) -> float:
    """CPU seconds of the call that `prepare` makes ready, the fewest of `REPEATS`."""
    found = []
    for _ in range(REPEATS):
        function, arguments = prepare()
        start = time.process_time()
        function(*arguments)
        found.append(time.process_time() - start)
    return min(found)
