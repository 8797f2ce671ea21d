"""Work of the tests of sequence parallelism in every process or thread: one tiny model, whole and shared out."""

import copy
import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast import accelerate
from sage_fast.distributed.ulysses import shard_sequence
from sage_fast.models.hunyuan15.backbone import velocity
from sage_fast.models.transformer import Checkpointing
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.policy.lora import add_lora
from tests.models.hunyuan15.oracle import latents, prompt, tiny_transformer

LAYERS = 2

Result = tuple[Tensor, dict[str, Tensor]]
"""Velocity, and gradients by parameter."""


@dataclass(frozen=True)
class Case:
    """One call with gradients. size: of the latents, whose product is N. prompts: (text, glyph) tokens of every one."""

    size: tuple[int, int, int] = (1, 5, 5)
    prompts: tuple[tuple[int, int], ...] = ((5, 2),)
    checkpointing: Checkpointing = "none"
    lora: bool = False
    guidance: Literal["paired", "split"] | None = None
    heads: int = 4
    head_dim: int = 16
    dtype: torch.dtype = torch.float64


def transformer(case: Case) -> Any:
    """The same weights in every process and thread; a thread must not be the first to ask, for random numbers' sake."""
    return copy.deepcopy(_transformer(case.lora, case.heads, case.head_dim, case.dtype))


@functools.cache
def _transformer(lora: bool, heads: int, head_dim: int, dtype: torch.dtype) -> Any:
    axes = (head_dim // 3 // 2 * 2,) * 2
    model = tiny_transformer(
        layers=LAYERS,
        dtype=dtype,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        rope_axes_dim=(head_dim - sum(axes), *axes),
    )
    if lora:
        targets = [
            "attn.to_q",
            "attn.to_out.0",
            "attn.add_v_proj",
            "attn.to_add_out",
            "ff.net.2",
            "ff_context.net.0.proj",
        ]
        add_lora(model, rank=2, alpha=None, target_modules=targets, seed=0)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)  # adapters are made in float32
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def compute(case: Case, group: Any = None) -> Result:
    """Velocity and gradients; on the ranks of a group, this rank's part of the gradients."""
    model = transformer(case)
    acceleration = accelerate(model, checkpointing=case.checkpointing)
    if group is not None:
        shard_sequence(acceleration, group)
    x = latents(len(case.prompts), size=case.size)
    sigma = torch.linspace(0.3, 0.7, len(case.prompts))
    prompts = [prompt(*tokens, seed=i, dtype=case.dtype) for i, tokens in enumerate(case.prompts)]
    if case.guidance is None:
        output = velocity(model, x, sigma, prompts)
        output.square().sum().backward()
    else:
        policy = GuidedPolicy(model, prompt(3, 0, seed=9, dtype=case.dtype), 6.0)
        cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        output = policy.velocity_and_gradient(x, sigma, prompts, [cotangent], split=case.guidance == "split")
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(given: Tensor, expected: Tensor, *, least: float = 0.0) -> float:
    """Largest error over the largest expected value, or over `least` where that is larger; infinite of a NaN."""
    error = float((given - expected).abs().max())
    return error / max(float(expected.abs().max()), least) if math.isfinite(error) else math.inf


def gradient_errors(parts: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of every gradient, the sum of the ranks' parts.

    Some are zero but for rounding (the bias of a key moves all scores of a query alike), so each is measured against at
    least a millionth of the largest of all.
    """
    assert all(part.keys() == expected.keys() for part in parts)
    least = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
    return {
        name: relative_error(torch.stack([part[name] for part in parts]).sum(0), gradient, least=least)
        for name, gradient in expected.items()
    }


def check(results: Sequence[Result], expected: Result, limit: float = 1e-10) -> None:
    """Every rank has the velocity of one process, and their gradients add up to its gradients."""
    for velocity_of_rank, _ in results:
        assert relative_error(velocity_of_rank, expected[0]) < limit
    name, error = max(gradient_errors([own for _, own in results], expected[1]).items(), key=lambda item: item[1])
    assert error < limit, name


class Recorder(TorchDispatchMode):
    """Collectives of a stretch of code, as (operator, bytes of its input), and how often a value was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            (given,) = args[1] if isinstance(args[1], list) else args[1:2]
            size = given.numel() * given.element_size()
            self.collectives.append((func._overloadpacket.__name__, size))
        self.waits += func._overloadpacket.__name__ in ("_local_scalar_dense", "nonzero")
        return func(*args, **(kwargs or {}))


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class ThreadGroup:
    """A process group of threads in one process, for `thread_collectives`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def members(self) -> list["Member"]:
        return [Member(self, rank) for rank in range(self.size)]


@dataclass(frozen=True)
class Member:
    """The group as one thread sees it."""

    group: ThreadGroup
    rank: int

    def gather(self, value: Tensor) -> list[Tensor]:
        self.group.slots[self.rank] = value.detach().clone()
        self.group.barrier.wait()
        values = list(self.group.slots)
        self.group.barrier.wait()
        return values


def thread_collectives(monkeypatch: Any) -> None:
    """Let torch.distributed's functions that sequence parallelism calls serve members of a `ThreadGroup`."""

    def all_to_all_single(received: Tensor, send: Tensor, *, group: Member) -> None:
        assert received.is_contiguous() and send.is_contiguous() and received.numel() == send.numel()
        rows = received.view(group.group.size, -1)
        for source, sent in enumerate(group.gather(send)):
            rows[source] = sent.view(group.group.size, -1)[group.rank]

    def all_gather(gathered: list[Tensor], share: Tensor, *, group: Member) -> None:
        assert share.is_contiguous()
        for target, sent in zip(gathered, group.gather(share), strict=True):
            assert target.is_contiguous()
            target.copy_(sent)

    monkeypatch.setattr(dist, "get_world_size", lambda group: group.group.size)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(dist, "all_gather", all_gather)
