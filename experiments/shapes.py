"""The toy world as its base model sees it: of a caption's videos some show another
colour, shape or motion.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.captioned import Phase, World
from experiments.exact_policy import ExactPolicy
from sage_fast.models.toy.components import TRANSFORMER_CONFIG, PatchCodec, WordEncoder
from sage_fast.models.toy.renderer import (
    COLOURS,
    HEIGHT,
    MOTIONS,
    NUM_FRAMES,
    SHAPES,
    WIDTH,
    all_captions,
    manifold_for,
)
from sage_fast.records import PromptEmbeds


@dataclass(frozen=True, kw_only=True)
class ShapesPhase(Phase):
    """See `Phase`."""

    name = "shapes"
    transformer = TRANSFORMER_CONFIG
    dtype = torch.bfloat16

    wrong_colour: float
    """Share of a caption's videos that differ from it in their colour alone."""
    wrong_shape: float
    """Likewise in their shape."""
    wrong_motion: float
    """Likewise in their motion."""

    def world(self, generator: torch.Generator) -> World:
        return ShapesWorld(self, generator)


PHASES = (
    ShapesPhase(
        steps=8000, wrong_colour=0.35 / 3, wrong_shape=0.35 / 3, wrong_motion=0.35 / 3
    ),
    # The last steps of a path decide how far a sample lies from the legal videos.
    ShapesPhase(
        steps=5500,
        rate=0.5,
        noised_up_to=0.6,
        wrong_colour=0.35 / 3,
        wrong_shape=0.35 / 3,
        wrong_motion=0.35 / 3,
    ),
    # So far the same caption always gets the same scene, often a wrong one: with
    # nothing to choose from, post-training cannot mend it. A network of this size tells
    # colours apart in the noise where a scene is decided, shapes hardly.
    ShapesPhase(
        steps=4000, rate=0.5, wrong_colour=0.45, wrong_shape=0.0, wrong_motion=0.15
    ),
)


def shown_by_caption(phase: ShapesPhase) -> Tensor:
    """Shares of the shown captions: float32 (120, 120), row = caption, column = shown
    caption, rows sum to 1.
    """
    captions = all_captions()
    table = torch.zeros(len(captions), len(captions))
    wrong = {
        "colour": (phase.wrong_colour, COLOURS),
        "shape": (phase.wrong_shape, SHAPES),
        "motion": (phase.wrong_motion, MOTIONS),
    }
    for row, caption in enumerate(captions):
        table[row, row] = 1 - sum(share for share, _ in wrong.values())
        for name, (share, values) in wrong.items():
            for value in values:
                if value != getattr(caption, name):
                    shown = caption._replace(**{name: value})
                    table[row, captions.index(shown)] = share / (len(values) - 1)
    return table


class ShapesWorld:
    """The badly captioned videos of the toy world.

    A caption is its row in `all_captions()`; the row after the last is the
    unconditional prompt.
    """

    def __init__(self, phase: ShapesPhase, generator: torch.Generator) -> None:
        self.generator = generator
        manifold = manifold_for(NUM_FRAMES, HEIGHT, WIDTH)
        self.latents = PatchCodec().encode(manifold.videos)
        self.shape = (*self.latents.shape[1:],)
        self.policy = ExactPolicy(self.latents)
        self.table = shown_by_caption(phase)
        self.unconditional = len(self.table)
        self.positions = len(self.latents) // len(self.table)
        anything = torch.full((1, len(self.table)), 1 / len(self.table))
        # The scenes are ordered by what a caption names; the positions vary fastest.
        self.log_prior = (
            torch.cat([self.table, anything])
            .log()
            .repeat_interleave(self.positions, dim=1)
        )
        self.embeds = WordEncoder().encode(
            [*(caption.text for caption in all_captions()), ""]
        )

    def draw_captions(self, count: int, dropped: float) -> Tensor:
        rows = torch.randint(self.unconditional, (count,), generator=self.generator)
        return torch.where(
            torch.rand(count, generator=self.generator) < dropped,
            self.unconditional,
            rows,
        )

    def draw_latents(self, captions: Tensor) -> Tensor:
        shares = torch.cat([self.table, self.table.mean(0, keepdim=True)])[captions]
        shown = torch.multinomial(shares, 1, generator=self.generator)[:, 0]
        return self.latents[
            shown * self.positions
            + torch.randint(self.positions, shown.shape, generator=self.generator)
        ]

    def prompts(self, captions: Tensor) -> list[PromptEmbeds]:
        return [self.embeds[row] for row in captions.tolist()]

    def velocity(self, latents: Tensor, sigma: Tensor, captions: Tensor) -> Tensor:
        return self.policy.velocity(0, latents, sigma, self.log_prior[captions])
