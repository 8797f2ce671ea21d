"""The world of words: its legal videos, and the velocity of a perfect model of badly
captioned ones.

A video shows a word of 3 to 5 letters that moves or grows. In the data of the base
model each letter is, with a stated probability, another one that looks like it, so a
caption is wrong by a letter more often than not. Letters do not overlap, so the
posterior of a noisy video factorises into its letters, and E[z - x0 | x, caption] has a
closed form although there are millions of videos.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import avg_pool2d

from experiments.captioned import Phase, World
from experiments.exact_policy import SPREAD
from sage_fast.models.toy.renderer import to_uint8
from sage_fast.models.toy.words import (
    ALPHABET,
    HEIGHT,
    LENGTHS,
    MOTIONS,
    NUM_FRAMES,
    PLACES,
    TRANSFORMER_CONFIG,
    WIDTH,
    GreyCodec,
    LetterEncoder,
    letter_places,
    prompt_of,
)
from sage_fast.records import PromptEmbeds

FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono-Bold.ttf"
SIZE = 13.0
CAPITALS = 0.73
"""Of the font, in pixels, and the height of its capitals as a share of that."""
CELL = 8
"""Pixels from letter to letter."""
TRAVEL = 6.0
"""Pixels from the first frame to the last."""
GROWTH = (0.64, 1.0)
HEIGHTS = (-1, 0, 1)
"""Pixels by which a word lies below the middle. The caption does not say."""
INK = 0.95
PAPER = 0.06
SUPERSAMPLING = 8

LOOK_ALIKES = ("HN", "TY", "CL", "ES", "KR", "AU")
"""Each letter is mistaken for the other of its pair."""
PARTNER = [
    ALPHABET.index(pair.replace(letter, ""))
    for letter in ALPHABET
    for pair in LOOK_ALIKES
    if letter in pair
]

VARIANTS = [(motion, height) for motion in MOTIONS for height in HEIGHTS]


@dataclass(frozen=True, kw_only=True)
class WordsPhase(Phase):
    """See `Phase`."""

    name = "words"
    transformer = TRANSFORMER_CONFIG
    dtype = torch.float32

    wrong_letter: float
    """Probability that a letter is drawn as the one that looks like it."""

    def world(self, generator: torch.Generator) -> World:
        return WordsWorld(self.wrong_letter, generator)


PHASES = (WordsPhase(steps=4500, wrong_letter=0.3),)


def draw_letter(letter: str, place: int, motion: str, height: int) -> Tensor:
    """Share of each pixel that a letter of a word covers, float32 (F, H, W)."""
    frames = []
    for frame in range(NUM_FRAMES):
        time = frame / (NUM_FRAMES - 1) - 0.5
        scale = 1.0
        if motion == "closer":
            scale = sum(GROWTH) / 2 + (GROWTH[1] - GROWTH[0]) * time
        x = (
            WIDTH / 2
            + place * scale * CELL / 2
            + TRAVEL * time * {"left": -1, "right": 1, "closer": 0}[motion]
        )
        base_line = HEIGHT / 2 + height + CAPITALS / 2 * SIZE * scale
        picture = Image.new("L", (WIDTH * SUPERSAMPLING, HEIGHT * SUPERSAMPLING))
        font = ImageFont.truetype(FONT, SIZE * scale * SUPERSAMPLING)
        ImageDraw.Draw(picture).text(
            (x * SUPERSAMPLING, base_line * SUPERSAMPLING),
            letter,
            fill=255,
            font=font,
            anchor="ms",
        )
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(
            picture.height, picture.width
        )
        frames.append(avg_pool2d(pixels[None].float() / 255, SUPERSAMPLING)[0])
    return torch.stack(frames)


@cache
def letters() -> Tensor:
    """Every letter at every place of every variant, as `draw_letter`: float32 (V, P, A,
    F, H, W).
    """
    drawn = [
        draw_letter(letter, place, *variant)
        for variant in VARIANTS
        for place in PLACES
        for letter in ALPHABET
    ]
    return torch.stack(drawn).view(
        len(VARIANTS), len(PLACES), len(ALPHABET), NUM_FRAMES, HEIGHT, WIDTH
    )


def render_word(word: str, motion: str, height: int = 0) -> Tensor:
    """The legal video of a word, uint8 (F, 3, H, W)."""
    places = [PLACES.index(place) for place in letter_places(len(word))]
    table = letters()[VARIANTS.index((motion, height))]
    ink = torch.stack(
        [
            table[place, ALPHABET.index(letter)]
            for place, letter in zip(places, word, strict=True)
        ]
    )
    return to_uint8(PAPER + (INK - PAPER) * ink.sum(0).clamp(0, 1))[:, None].expand(
        -1, 3, -1, -1
    )


class WordsWorld:
    """Badly captioned words: latents, captions, and the exact velocity of any latents.

    A caption is a row of 6 numbers: the motion, and the letters, -1 behind the last
    one. Six times -1 is the unconditional prompt, whose words have any length and
    letters, and any motion.

    Args:
        wrong: probability that a letter is drawn as its look-alike.
        generator: of all draws.
    """

    def __init__(self, wrong: float, generator: torch.Generator) -> None:
        self.generator = generator
        blank = to_uint8(torch.full((1, NUM_FRAMES, 3, HEIGHT, WIDTH), PAPER))
        # The encoding is linear up to its mean: a letter's latents are those of its ink
        # alone.
        table = letters().flatten(0, 2)
        inked = (PAPER + (INK - PAPER) * table)[:, :, None].expand(-1, -1, 3, -1, -1)
        codec = GreyCodec()
        self.shape = codec.latent_shape(NUM_FRAMES, HEIGHT, WIDTH)
        self.blank = codec.encode(blank).flatten()
        self.ink = codec.encode(inked * 255).flatten(1) - self.blank
        self.energy = self.ink.square().sum(1)
        self.motion_of = torch.tensor([MOTIONS.index(motion) for motion, _ in VARIANTS])
        self.places = [
            torch.tensor([PLACES.index(place) for place in letter_places(n)])
            for n in LENGTHS
        ]
        count = len(ALPHABET)
        # the last row: no letter asked for
        self.shown = torch.full((count + 1, count), 1 / count)
        self.shown[:count] = (1 - wrong) * torch.eye(count) + wrong * torch.eye(count)[
            PARTNER
        ]
        self.encoder = LetterEncoder()

    def draw_captions(self, count: int, dropped: float = 0.0) -> Tensor:
        """Captions int64 (count, 6), a share `dropped` of them unconditional."""
        captions = torch.randint(len(ALPHABET), (count, 6), generator=self.generator)
        captions[:, 0] = torch.randint(len(MOTIONS), (count,), generator=self.generator)
        length = torch.randint(
            LENGTHS[0], LENGTHS[-1] + 1, (count, 1), generator=self.generator
        )
        captions[torch.arange(6) > length] = -1
        captions[torch.rand(count, generator=self.generator) < dropped] = -1
        return captions

    def prompts(self, captions: Tensor) -> list[PromptEmbeds]:
        """Features of captions (B, 6), for the transformer."""
        texts = []
        for motion, *word in captions.tolist():
            spelled = "".join(ALPHABET[letter] for letter in word if letter >= 0)
            texts.append(prompt_of(spelled, MOTIONS[motion]) if motion >= 0 else "")
        return self.encoder.encode(texts)

    def draw_latents(self, captions: Tensor) -> Tensor:
        """Latents (B, C, F, H, W) of videos that have these captions (B, 6)."""
        free = captions[:, 0] < 0
        asked = torch.where(free[:, None], self.draw_captions(len(captions)), captions)
        heights = torch.randint(
            len(HEIGHTS), (len(captions),), generator=self.generator
        )
        variants = asked[:, 0] * len(HEIGHTS) + heights
        chosen = torch.zeros(len(captions), len(self.ink))
        grid = chosen.view(-1, len(VARIANTS), len(PLACES), len(ALPHABET))
        for row, (variant, word) in enumerate(zip(variants, asked[:, 1:], strict=True)):
            word = word[word >= 0]
            shown = torch.multinomial(self.shown[word], 1, generator=self.generator)[
                :, 0
            ]
            grid[row, variant, self.places[len(word) - LENGTHS[0]], shown] = 1.0
        return (self.blank + chosen @ self.ink).view(-1, *self.shape)

    def velocity(self, latents: Tensor, sigma: Tensor, captions: Tensor) -> Tensor:
        """E[z - x0 | x, caption] at latents (B, C, F, H, W), noise levels (B,) and
        captions (B, 6).

        The data are the legal videos, each with a Gaussian of standard deviation
        `SPREAD` around it.
        """
        x = latents.flatten(1)
        level = sigma[:, None]
        variance = (1 - level) ** 2 * SPREAD**2 + level**2
        # Logarithm of the likelihood of a letter at a place, against an empty place.
        inner = (x - (1 - level) * self.blank) @ self.ink.T
        score = ((1 - level) * inner - (1 - level) ** 2 / 2 * self.energy) / variance
        score = score.view(-1, len(VARIANTS), len(PLACES), len(ALPHABET))
        given = captions[:, 0] >= 0
        length = (captions[:, 1:] >= 0).sum(1)
        logits = []
        posteriors = []
        for number, places in zip(LENGTHS, self.places, strict=True):
            # Of captions of another length too, whose hypotheses get no weight below.
            # the row of -1 is the last
            prior = self.shown[captions[:, 1 : number + 1]].log()
            likely = score[:, :, places] + prior[:, None]
            logit = likely.logsumexp(3).sum(2)
            fits = ~given[:, None] | (
                (length == number)[:, None] & (self.motion_of == captions[:, :1])
            )
            logits.append(logit.masked_fill(~fits, -torch.inf))
            posteriors.append(likely.softmax(3))
        weight = (
            torch.stack(logits, 2)
            .flatten(1)
            .softmax(1)
            .view(len(x), len(VARIANTS), len(LENGTHS))
        )
        chosen = torch.zeros_like(score)
        for column, (places, posterior) in enumerate(
            zip(self.places, posteriors, strict=True)
        ):
            chosen[:, :, places] += weight[:, :, column, None, None] * posterior
        data = self.blank + chosen.flatten(1) @ self.ink
        residual = x - (1 - level) * data
        return (
            ((level - (1 - level) * SPREAD**2) / variance) * residual - data
        ).view_as(latents)
