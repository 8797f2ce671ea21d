"""The prompts that an update sees, and the order in which its steps are trained:
functions of the seed and a counter.

Shapes: P prompts, G videos per prompt, K trained steps per video.
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sage_fast.config.sections import TrainingConfig
from sage_fast.noise import NoiseKey
from sage_fast.records import Prompt, PromptEmbeds, Sample


def _generator(*parts: int | str) -> torch.Generator:
    digest = hashlib.blake2b(
        repr(parts).encode(), digest_size=8, person=b"sage_fast.order"
    ).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class PromptSchedule:
    """An endless sequence of prompts, epoch after epoch, each in its own order.

    Prompt number k is a function of (seed, k), so resuming needs only the counter.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        self.prompts = list(prompts)
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._order = list[int]()

    def take(self, start: int, count: int) -> list[Prompt]:
        """Prompts number start .. start + count - 1."""
        taken = []
        for number in range(start, start + count):
            epoch, place = divmod(number, len(self.prompts))
            if self.shuffle:
                # One order is kept, since prompts are taken in sequence.
                if epoch != self._epoch:
                    order = torch.randperm(
                        len(self.prompts),
                        generator=_generator("prompts", self.seed, epoch),
                    )
                    self._epoch = epoch
                    self._order = order.tolist()
                place = self._order[place]
            taken.append(self.prompts[place])
        return taken


def used_prompts(
    schedule: PromptSchedule,
    eval_prompts: Sequence[Prompt],
    training: TrainingConfig,
    prompts_per_rollout: int,
    done: tuple[int, int] = (0, 0),
) -> list[Prompt]:
    """Prompts that a run will sample from, each once, in the order of their first use;
    an evaluation's come last.

    Args:
        eval_prompts: none where the run does not evaluate.
        prompts_per_rollout: of all ranks.
        done: updates and rollouts that lie behind the run.
    """
    updates = max(0, training.num_updates - done[0])
    left = math.ceil(updates / training.updates_per_rollout)
    # Two epochs' length holds a whole epoch, wherever it begins.
    count = min(left * prompts_per_rollout, 2 * len(schedule.prompts))
    used = schedule.take(done[1] * prompts_per_rollout, count)
    return list(dict.fromkeys([*used, *eval_prompts]))


def make_groups(
    prompts: Sequence[Prompt],
    embed: Callable[[Prompt], PromptEmbeds],
    num_generations: int,
    numbers: Iterable[int],
) -> list[Sample]:
    """Some samples of one rollout, group after group.

    Args:
        prompts: of the rollout, one per group.
        embed: conditioning of a prompt; called once for every group that has samples
            here.
        numbers: of these samples among all, ascending.
    """
    members = group_members(prompts, num_generations)
    samples = []
    # Of a group there may be some alone.
    for number, places in itertools.groupby(
        numbers, lambda number: number // num_generations
    ):
        group = [members[place] for place in places]
        embeds = embed(group[0][0])
        samples += [
            Sample(prompt=prompt, embeds=embeds, member=member, group=number)
            for prompt, member in group
        ]
    return samples


def group_members(
    prompts: Sequence[Prompt], num_generations: int
) -> list[tuple[Prompt, int]]:
    """Prompt and member of every sample of a rollout, on all ranks.

    A prompt that occurs twice gets two groups with consecutive member numbers, so no
    two samples share noise.
    """
    seen: Counter[int] = Counter()
    found = []
    for prompt in prompts:
        first = seen[prompt.index]
        seen[prompt.index] += num_generations
        found += [(prompt, first + g) for g in range(num_generations)]
    return found


def num_trained(fraction: float, trainable: int) -> int:
    """How many of so many trainable steps are trained: their share, rounded down as in
    other trainers, at least one.
    """
    return max(1, int(fraction * trainable))


def step_order(
    key: NoiseKey, trainable: Sequence[int], fraction: float, permute: bool
) -> list[int]:
    """The steps of one sample that are trained, in the order in which they are visited.

    Args:
        key: of the sample, whose permutation is a function of it.
        trainable: step indices that have a policy gradient.
        fraction: share of them to train; at least one is.
        permute: in random order (so with fraction < 1 a random choice); otherwise the
            first ones, in order.
    """
    count = num_trained(fraction, len(trainable))
    if not permute:
        return list(trainable[:count])
    generator = _generator(
        "steps", key.seed, key.update, key.prompt_index, key.sample_index
    )
    order = torch.randperm(len(trainable), generator=generator)[:count]
    return [trainable[i] for i in order.tolist()]


def uniform(key: NoiseKey, count: int) -> Tensor:
    """Uniform numbers in [0, 1), (count,) float64: a function of a sample's key."""
    generator = _generator(
        "levels", key.seed, key.update, key.prompt_index, key.sample_index
    )
    return torch.rand(count, generator=generator, dtype=torch.float64)


def kl_factors(seed: int, update: int, num_steps: int, fraction: float) -> list[float]:
    """Weights of the position KL at each of the K positions in every sample's order:
    1/q at a share q, 0 elsewhere.

    The positions are the same for all videos of a rollout, so a micro-batch runs as a
    whole and ranks keep step. With permuted steps they are other steps of every video.

    Args:
        seed: of the run.
        update: of the rollout.
        num_steps: K.
        fraction: q before it is rounded, see `num_trained`.
    """
    count = num_trained(fraction, num_steps)
    drawn = torch.randperm(
        num_steps, generator=_generator("position KL", seed, update)
    )[:count]
    factors = torch.zeros(num_steps, dtype=torch.float64)
    factors[drawn] = num_steps / count
    return factors.tolist()


def best_and_worst(advantages: Tensor, count: int) -> Tensor:
    """Mask of the trained videos of every group, (P, G) bool; advantages (P, G).

    They are the `count` best and as many of the worst, or with 0 all. Of equal
    advantages that of the earlier member counts as higher, so that the choice is the
    same everywhere.
    """
    if not count:
        return torch.ones_like(advantages, dtype=torch.bool)
    # The second argsort turns the order of the members into the place of each.
    rank = advantages.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank < count) | (rank >= advantages.shape[1] - count)


def deal(due: Tensor) -> Tensor:
    """Numbers (R, M') of the micro-batches that each of R ranks trains, ascending.

    M' is the mean of those that are due, rounded up. They stay with the rank that
    sampled them, except what it has above M', which goes to ranks with less. A rank
    that has less even so keeps some that are not due: all have M', so ranks that must
    keep step can make equally many passes.

    Args:
        due: (R, M) bool, which micro-batches have a trained video; rank r has sampled r
            M .. r M + M - 1.
    """
    ranks, sampled = due.shape
    share = math.ceil(int(due.sum()) / ranks)
    # Of each rank, those that are due first.
    own = (
        (~due).int().argsort(dim=1, stable=True)
        + sampled * torch.arange(ranks)[:, None]
    ).tolist()
    counts = due.sum(dim=1).tolist()
    surplus = [
        number
        for numbers, count in zip(own, counts, strict=True)
        for number in numbers[share:count]
    ]
    dealt = []
    for numbers, count in zip(own, counts, strict=True):
        taken = surplus[: max(0, share - count)]
        del surplus[: len(taken)]
        dealt.append(sorted([*taken, *numbers[: share - len(taken)]]))
    return torch.tensor(dealt)


def split_evenly(count: int, parts: int) -> list[range]:
    """0 .. count-1 in `parts` consecutive ranges whose lengths differ by at most one."""
    bounds = [count * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]
