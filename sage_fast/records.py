"""The records that travel between the stages of one GRPO update.

    Prompt -> PromptEmbeds -> Trajectory -> videos -> rewards -> GroupAdvantages -> PolicyTerms -> Metrics

Shape letters: B samples of a micro-batch, T rollout steps, C F H W latent channels, frames, rows, columns,
L text tokens, D text width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_fast.noise import NoiseKey
from sage_fast.sde import TransitionTable


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One line of a prompt file.

    `index` names the prompt in the run: the noise of a sample is a function of it, so it must be unique and must
    not depend on the order in which prompts are visited. `seed` replaces the run's seed for this prompt.

    Example: `Prompt(text="a red circle moving left", index=17)`
    """

    text: str
    index: int
    seed: int | None = None


SHORT_CAPTION = 40
"""Words of the median prompt below which a file is called short; HunyuanVideo-1.5 is used with 80 to 200."""


def word_count(prompt: str) -> int:
    """Words of a prompt; of Chinese, which is written without spaces, every three characters count as two words."""
    characters = sum("\u4e00" <= character <= "\u9fff" for character in prompt)
    words = sum(any(c.isalnum() and not "\u4e00" <= c <= "\u9fff" for c in word) for word in prompt.split())
    return words + round(characters * 2 / 3)


@dataclass(frozen=True, kw_only=True)
class PromptEmbeds:
    """Text conditioning of one prompt: the valid tokens only, no padding and hence no mask.

    text: (L, D) float; the language model's tokens, L >= 1.
    glyph: (Lg, Dg) float; the ByT5 tokens of quoted text, Lg = 0 when the prompt quotes nothing.

    Example: "a red circle moving left" in the toy world is `text` of shape (5, 32) and `glyph` of shape (0, 32).
    """

    text: Tensor
    glyph: Tensor

    def to(self, device: torch.device | str) -> "PromptEmbeds":
        return PromptEmbeds(text=self.text.to(device), glyph=self.glyph.to(device))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One video of a rollout: which prompt it answers and which member of the prompt's group it is.

    Example: with num_generations = 4, the samples of one prompt have `member` 0, 1, 2 and 3.
    """

    prompt: Prompt
    embeds: PromptEmbeds
    member: int


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What a rollout of one micro-batch leaves behind for the policy update.

    The noise itself is not stored: it is a function of `keys` and the step. So (latents, velocities, keys) determine
    the transition exactly, and no rounded log-probability is ever subtracted from another.

    latents: T tensors (B, C, F, H, W) float32, the states x_0 .. x_{T-1} the policy was evaluated at.
    velocities: T tensors (B, C, F, H, W) float32, the guided velocities v_old used by the sampler.
    final: (B, C, F, H, W) float32, x_T, what is decoded to video.

    Example: 16 toy samples at 8 steps hold 8 latents and 8 velocities of shape (16, 96, 4, 4, 4).
    """

    samples: Sequence[Sample]
    keys: Sequence[NoiseKey]
    table: TransitionTable
    latents: Sequence[Tensor]
    velocities: Sequence[Tensor]
    final: Tensor
