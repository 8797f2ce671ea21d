"""The seam for sequence parallelism: two threads with half of the video tokens each compute what one computes."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.policy import accelerate
from sage_fast.policy.attention import attention, attention_backward
from tests.policy.oracle import latents, prompt, tiny_transformer

RANKS = 2


class Exchange:
    """All threads put a tensor and get everybody's."""

    def __init__(self) -> None:
        self.slots: list[Any] = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=30)

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        result = list(self.slots)
        self.barrier.wait()
        return result


class Join(torch.autograd.Function):
    """Gather along a dimension; every rank differentiates the same loss, so a share's gradient is its slice."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, dim: int, rank: int, exchange: Exchange) -> Tensor:
        ctx.dim, ctx.rank = dim, rank
        return torch.cat(exchange.all_gather(rank, share), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad.chunk(RANKS, ctx.dim)[ctx.rank], None, None, None


@dataclass
class Layout:
    rank: int
    exchange: Exchange

    def split(self, tokens: Tensor, dim: int) -> Tensor:
        return tokens.chunk(RANKS, dim)[self.rank]

    def join(self, tokens: Tensor, dim: int) -> Tensor:
        return Join.apply(tokens, dim, self.rank, self.exchange)


@dataclass
class GatheredAttention:
    """Own queries against everybody's keys. Rank 0 alone answers for the replicated text's keys and values."""

    rank: int
    exchange: Exchange

    def joint(self, k: Tensor, v: Tensor, num_video: int) -> tuple[Tensor, Tensor]:
        parts = self.exchange.all_gather(self.rank, (k[:, :num_video], v[:, :num_video]))
        keys, values = zip(*parts, strict=True)
        return torch.cat([*keys, k[:, num_video:]], 1), torch.cat([*values, v[:, num_video:]], 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, num_video: int) -> tuple[Tensor, Tensor]:
        return attention(q, *self.joint(k, v, num_video), backend="reference")

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, num_video: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Text queries are on every rank: their share of the keys' gradient counts once, as does the text's own.
        dq, dk, dv = attention_backward(grad, q, *self.joint(k, v, num_video), out, lse, backend="reference")
        video = attention_backward(
            torch.cat([grad[:, :num_video], torch.zeros_like(grad[:, num_video:])], 1),
            *(q, *self.joint(k, v, num_video), out, lse),
            backend="reference",
        )
        own = (dk, dv) if self.rank == 0 else video[1:]
        summed = [torch.stack(parts).sum(0) for parts in zip(*self.exchange.all_gather(self.rank, own), strict=True)]
        here = slice(self.rank * num_video, (self.rank + 1) * num_video)
        text = slice(RANKS * num_video, None)
        return dq, *(torch.cat([s[:, here], s[:, text]], 1) for s in summed)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_shares_of_the_video_tokens_compute_the_whole(checkpointing: Any) -> None:
    model = tiny_transformer(layers=2, dtype=torch.float64)
    x, timestep, prompts = latents(1), torch.tensor([400.0]), [prompt(5, 2, dtype=torch.float64)]
    exchange = Exchange()

    def run(rank: int | None) -> tuple[Tensor, dict[str, Tensor]]:
        own: Any = copy.deepcopy(model)
        acceleration = accelerate(own, checkpointing=checkpointing)
        if rank is not None:
            acceleration.attention = GatheredAttention(rank, exchange)
            acceleration.sequence = Layout(rank, exchange)
        output = own(hidden_states=x, timestep=timestep, prompts=prompts, return_dict=False)[0]
        output.square().sum().backward()
        return output.detach(), {n: p.grad for n, p in own.named_parameters() if p.grad is not None}

    expected, gradients = run(None)
    with ThreadPoolExecutor(RANKS) as pool:
        results = list(pool.map(run, range(RANKS)))
    for output, _ in results:
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    # What only video tokens reach: the gradients of the ranks sum to the whole.
    for name in ("transformer_blocks.0.ff.net.0.proj.weight", "transformer_blocks.1.attn.to_q.weight", "proj_out.bias"):
        total = sum(share[name] for _, share in results)
        torch.testing.assert_close(total, gradients[name], rtol=1e-9, atol=1e-9)
