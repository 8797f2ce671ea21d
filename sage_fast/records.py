"""The records that travel between the stages of one GRPO update, and the metrics it
ends in.

    Prompt -> PromptEmbeds -> Trajectory -> videos -> rewards -> GroupAdvantages -> ScoredRollout -> PolicyTerms
    -> metrics

Shapes: B samples of a micro-batch, N of a rollout, V of a rollout on all ranks; T
rollout steps, K trained steps per sample; C F H W latent channels, frames, rows,
columns; L text tokens, Li image tokens, D their width; P prompts of a rollout, G videos
per prompt.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_fast.config.sections import VideoConfig
from sage_fast.noise import NoiseKey
from sage_fast.objective import GroupAdvantages
from sage_fast.sde import TransitionTable


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One line of a prompt file.

    `index` names the prompt in the run: the noise of a sample is a function of it, so
    it must be unique and must not depend on the order in which prompts are visited.
    `seed` is mixed with the run's seed, see `noise_seed`. `image` is the file of the
    picture that an image-to-video model animates. `columns` has the other columns of
    its row in the file, for rewards.

    Example: `Prompt(text="a red circle moving left", index=17)`
    """

    text: str
    index: int
    seed: int | None = None
    image: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)

    def asked(self, video: VideoConfig) -> "str | Pictured":
        """The question to a prompt encoder for such videos: the text, or a text with
        its picture.
        """
        if self.image is None:
            return self.text
        size = video.height, video.width, video.num_frames
        return Pictured(self.text, self.image, *size)


class Pictured(NamedTuple):
    """A text and the picture that a video of it begins with.

    Attributes:
        image: its file.
        height, width: of the video, in pixels; the picture is scaled and cropped to
            them.
        num_frames: of the video, 1 where the conditioning has none of the others.

    Example: `Pictured("the fox jumps", "fox.png", 480, 832)`
    """

    text: str
    image: str
    height: int
    width: int
    num_frames: int = 1


def text_of(asked: str | Pictured) -> str:
    """The words in a question to a prompt encoder."""
    return asked if isinstance(asked, str) else asked.text


SHORT_CAPTION = 40
"""Words of the median prompt below which a file is called short; HunyuanVideo-1.5 is
used with 80 to 200.
"""


def word_count(prompt: str) -> int:
    """Words of a prompt; of Chinese, which is written without spaces, every three
    characters count as two words.
    """
    others, characters = re.subn("[\u4e00-\u9fff]", "", prompt)
    words = sum(any(map(str.isalnum, word)) for word in others.split())
    return words + round(characters * 2 / 3)


@dataclass(frozen=True, kw_only=True)
class PromptEmbeds:
    """Conditioning of one prompt: the valid tokens only, no padding and hence no mask.

    Attributes:
        text: (L, D) float; the language model's tokens, L >= 1.
        glyph: (Lg, Dg) float; the ByT5 tokens of quoted text, Lg = 0 when the prompt
            quotes nothing, or the model has no such encoder.
        image: (Li, Di) float; the vision encoder's tokens of the picture, None where
            there is none.
        frame: (C, F, H, W) float; the picture as latents beside those of the video, of
            its first frame or of all, None where there is none.
        kept: (C, F, H, W) float; latents of the first frames that every video of the
            prompt has as they are, None where it draws all of them.

    Example: "a red circle moving left" in the toy world is `text` of shape (5, 32) and
    `glyph` of shape (0, 32).
    """

    text: Tensor
    glyph: Tensor = field(default_factory=lambda: torch.zeros(0, 1))
    image: Tensor | None = None
    frame: Tensor | None = None
    kept: Tensor | None = None

    @property
    def lengths(self) -> tuple[int, int, int]:
        """(L, Lg, Li)."""
        return (
            len(self.text),
            len(self.glyph),
            0 if self.image is None else len(self.image),
        )

    def to(self, device: torch.device | str) -> "PromptEmbeds":
        moved: dict[str, Any] = {
            name: None if part is None else part.to(device)
            for name, part in vars(self).items()
        }
        return PromptEmbeds(**moved)

    def beside(self, prompt: "PromptEmbeds") -> "PromptEmbeds":
        """These words with another prompt's picture: the unconditional branch, in which
        guidance keeps the picture.
        """
        return replace(self, image=prompt.image, frame=prompt.frame, kept=prompt.kept)


def with_kept(latents: Tensor, prompts: Sequence[PromptEmbeds]) -> Tensor:
    """Latents (B, C, F, H, W) with the frames that prompts keep in their place; the same
    tensor where they keep none.
    """
    if all(prompt.kept is None for prompt in prompts):
        return latents
    latents = latents.clone()
    for row, prompt in zip(latents, prompts, strict=True):
        if prompt.kept is not None:
            row[:, : prompt.kept.shape[1]] = prompt.kept
    return latents


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One video of a rollout: which prompt it answers, which member of the prompt's
    group it is, and the number of that group; in an evaluation the prompt's index.
    `latents` are those sampled, (C, F, H, W) float32 on the CPU, for rewards that read
    them.

    Example: with num_generations = 4, the samples of one prompt have `member` 0, 1, 2
    and 3.
    """

    prompt: Prompt
    embeds: PromptEmbeds
    member: int
    group: int = 0
    latents: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Record of one micro-batch's rollout for the policy update.

    The noise itself is not stored: it is a function of `keys` and the step. So
    (latents, velocities, keys) determine the transition exactly, and no rounded
    log-probability is ever subtracted from another.

    Attributes:
        latents: T tensors (B, C, F, H, W) float32, the states x_0 .. x_{T-1} that the
            policy was evaluated at.
        velocities: T tensors (B, C, F, H, W) float32, the guided velocities v_old that
            the sampler used. Both are empty where only the final latents are trained
            on.
        final: (B, C, F, H, W) float32, x_T, which is decoded to video.

    Example: 16 toy samples at 8 steps hold 8 latents and 8 velocities of shape (16, 96,
    4, 4, 4).
    """

    samples: Sequence[Sample]
    keys: Sequence[NoiseKey]
    table: TransitionTable
    latents: Sequence[Tensor]
    velocities: Sequence[Tensor]
    final: Tensor


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """Everything one rollout hands to its optimizer updates on this rank.

    Attributes:
        trajectories: micro-batches that together hold the N samples, group after group.
        all_orders: V lists of K step indices, each sample's own order.
        rows: (R, N) int64, which of the V samples each of R data-parallel ranks has, in
            the order of its micro-batches.
        rank: which of the R this one is.
        all_advantages: (V,) float32.
        all_trained: (V,) bool, False for groups dropped because a reward failed and for
            videos that `training.best_and_worst` leaves out.
        second_half: number of the first of the V that belongs to it, see
            `objectives.base.second_half`; None where halves are not compared.

    Example: 12 prompts x 8 videos in micro-batches of 16 are 6 trajectories, and N = V
    = 96. On 2 ranks each has 3 of them and N = 48, while V stays 96. Where ranks have
    dealt out what is trained (`deal`), R N may be less than V.
    """

    trajectories: Sequence[Trajectory]
    all_orders: Sequence[Sequence[int]]
    rows: Tensor
    rank: int
    all_advantages: Tensor
    all_trained: Tensor
    second_half: int | None = None

    @property
    def own(self) -> Tensor:
        """(N,), which of the V samples are this rank's."""
        return self.rows[self.rank]

    @property
    def orders(self) -> Sequence[Sequence[int]]:
        """N of them, of this rank."""
        return [self.all_orders[row] for row in self.own.tolist()]

    @property
    def advantages(self) -> Tensor:
        """(N,), of this rank."""
        return self.all_advantages[self.own]

    @property
    def trained(self) -> Tensor:
        """(N,), of this rank."""
        return self.all_trained[self.own]

    @property
    def middle(self) -> int | None:
        """Row of this rank at which the second half begins: 0 or N where all of them
        belong to one half.
        """
        if self.second_half is None:
            return None
        return int((self.own < self.second_half).sum())

    @property
    def num_trained(self) -> int:
        """Trained samples of all ranks."""
        return int(self.all_trained.sum())

    def batches(self) -> Iterator[tuple[slice, Trajectory]]:
        """Each micro-batch with the rows of its samples among the N."""
        first = 0
        for trajectory in self.trajectories:
            yield slice(first, first + len(trajectory.samples)), trajectory
            first += len(trajectory.samples)


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """The scores of a rollout on all ranks, before its gradient is taken; tensors are
    on the CPU.

    Attributes:
        update: optimizer updates done before it.
        prompts: P of them.
        scores: name -> (P, G) float64.
        reward: (P, G), their weighted sum.
        advantages: (P, G) float32.
        trained: (P,) bool, False for groups dropped because a reward failed, whose
            numbers mean nothing.

    Example: 8 prompts x 16 videos of the toy world have `scores["VQ"]` of shape (8,
    16).
    """

    update: int
    prompts: Sequence[Prompt]
    scores: Mapping[str, Tensor]
    reward: Tensor
    advantages: Tensor
    trained: Tensor


# --------------------------------------------------------------------------------------
# metrics


def reward_metrics(
    scores: Mapping[str, Tensor],
    overall: Tensor,
    advantages: GroupAdvantages,
    dropped: Tensor,
    table: TransitionTable,
) -> dict[str, float]:
    """Statistics of a rollout's rewards, by the names that metrics.jsonl and dashboards
    use.

    Args:
        scores: name -> (P, G) of the groups that are trained on.
        overall: (P, G), their weighted sum.
        advantages: of these groups.
        dropped: bool, one per group of the rollout.
        table: the rollout's sampler.
    """
    metrics = {
        "reward/mean": float(overall.mean()),
        "reward/std": float(overall.std(correction=0)),
        "reward/dropped_groups": int(dropped.sum()),
        "advantage/group_std": float(overall.std(dim=1, correction=0).mean()),
        "advantage/abs_mean": float(advantages.advantages.abs().mean()),
        "advantage/zero_spread_groups": int(advantages.zero_spread.sum()),
    }
    # An ODE has no gain.
    if table.trainable.any():
        gains = table.gain[table.trainable].abs()
        metrics |= {
            "gain/abs_min": float(gains.min()),
            "gain/abs_max": float(gains.max()),
        }
    for name, values in scores.items():
        metrics[f"reward/{name}_mean"] = float(values.mean())
        metrics[f"reward/{name}_std"] = float(values.std(correction=0))
    return metrics
