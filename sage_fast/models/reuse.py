"""Feature cache for sampling: the blocks after the first are left out where the first one changes little.

A transformer computes x_1 = x_0 + first(x_0) and x_K = x_1 + rest(x_1). When its blocks run, what they added is kept:
first(x_0) and rest(x_1). At a later step the first block runs alone; if

    mean |first(x_0) - kept first| / mean |kept first|  <=  threshold

then x_K is taken to be x_1 + kept rest. This is the rule of first-block caching (TeaCache in its simplest form, and
`FirstBlockCacheConfig` of diffusers, against which a test holds it). It compares with the last step that was computed,
so changes add up over steps that were not, and needs no coefficients fitted to a model. diffusers' own hooks know
neither this class of transformer nor that ranks must agree, and stay on in the passes that are differentiated.

Shapes: B batch, N video tokens, or this rank's share of them, D width.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(kw_only=True)
class ReuseRule:
    """When features are used again, and how often they were.

    threshold: largest relative change of what the first block adds.
    tokens: the ranks that share a video's tokens, and must decide alike. weights: those that gather weights in every
    forward, and must run the same blocks. None for a rank on its own.

    Example: `ReuseRule(threshold=0.1)` for a policy on one GPU.
    """

    threshold: float
    tokens: dist.ProcessGroup | None = None
    weights: dist.ProcessGroup | None = None
    forwards: int = 0
    """Forwards that asked, since the last `take_counts`."""
    skipped: int = 0
    """Those of them that ran the first block alone."""

    def within(self, change: Tensor, kept: Tensor) -> bool:
        """Whether two tensors (B, N, D) are close enough. Waits for the GPU; collective over `tokens`."""
        sums = torch.stack([_sum_abs(change - kept), _sum_abs(kept)]).cpu()
        if self.tokens is not None:
            dist.all_reduce(sums, group=self.tokens)
        return bool(sums[0] <= self.threshold * sums[1])

    def any_computes(self, computes: bool) -> bool:
        """Whether any of the ranks that gather weights has to run its blocks. Collective over `weights`."""
        if self.weights is None:
            return computes
        flag = torch.tensor(int(computes))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.weights)
        return bool(flag)

    def take_counts(self) -> tuple[int, int]:
        """(skipped, forwards) since the last call."""
        counts = self.skipped, self.forwards
        self.skipped = self.forwards = 0
        return counts


def _sum_abs(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, 1, dtype=torch.promote_types(values.dtype, torch.float32))


class FeatureCache:
    """What the blocks added when they last ran, for one branch of guidance of one micro-batch.

    A video's decision is its own, whatever other ranks decide, so it is sampled alike on any number of ranks. What a
    rank computes only because another one has to is dropped.
    """

    def __init__(self, rule: ReuseRule) -> None:
        self.rule = rule
        self._kept: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._now: _Forward | None = None

    def begin(self, part: Hashable, start: Tensor, first: Tensor) -> bool:
        """Whether the blocks after the first have to run; `end` comes next in either case.

        Args:
            part: which samples of the micro-batch these are.
            start, first: tokens (B, N, D) before and after the first block.
        """
        rule, kept = self.rule, self._kept.get(part)
        change = first - start
        reuses = kept is not None and rule.within(change, kept[0])
        runs = rule.any_computes(not reuses)
        rule.forwards += 1
        rule.skipped += not runs
        self._now = _Forward(part, first, None if reuses else change)
        return runs

    def end(self, last: Tensor) -> Tensor:
        """Video tokens (B, N, D) after the last block, given what came out of the blocks that ran."""
        assert self._now is not None
        (part, first, change), self._now = self._now, None
        if change is None:
            return first + self._kept[part][1]
        self._kept[part] = change, last - first
        return last


class _Forward(NamedTuple):
    """The forward between `begin` and `end`; change is None where features are used again."""

    part: Hashable
    first: Tensor
    change: Tensor | None
