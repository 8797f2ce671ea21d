"""The world of words: short videos of a word that moves or grows, whose base model
often draws a wrong letter.

Its reward is a text reader that nobody here trained, `rewards/ocr.py`. The renderer and
the pretraining are `experiments/words.py` of the repository: a run needs neither.
"""

import re

import torch
from torch import Tensor

from sage_fast.models.toy.components import ASSETS, PatchCodec, Toy, WordEncoder
from sage_fast.models.toy.components import TRANSFORMER_CONFIG as SHAPES_CONFIG

ALPHABET = "ACEHKLNRSTUY"
"""Letters that two text readers tell apart at this size; an O is read as a zero."""
MOTIONS = ("left", "right", "closer")
LENGTHS = (3, 4, 5)
NUM_FRAMES = 4
HEIGHT = 16
WIDTH = 48

PLACES = range(-4, 5)
"""Middles of letters in half cells from the middle of the word: -2, 0, 2 of three
letters, -3, -1, 1, 3 of four.
"""
UNCONDITIONAL = "<unconditional>"
VOCABULARY = (UNCONDITIONAL, *ALPHABET, *MOTIONS)

TRANSFORMER_CONFIG = SHAPES_CONFIG | {
    "in_channels": 2 * 32 + 1,
    "out_channels": 32,
    "num_attention_heads": 3,
    "num_layers": 4,
    "mlp_ratio": 3.0,
    "text_embed_dim": 32,
}

PROMPT = re.compile(r'\s*the word "([A-Z]+)" moving ([a-z]+)\s*')


def prompt_of(word: str, motion: str) -> str:
    """The prompt of a word and its motion, as in 'the word "CAT" moving left'."""
    return f'the word "{word}" moving {motion}'


def parse_prompt(text: str) -> tuple[str, str]:
    """Word and motion of a prompt. ValueError, naming the form and the letters, for any
    other sentence.
    """
    found = PROMPT.fullmatch(text)
    word, motion = found.groups() if found else ("", "")
    if (
        len(word) not in LENGTHS
        or not set(word) <= set(ALPHABET)
        or motion not in MOTIONS
    ):
        raise ValueError(
            f'The prompt {text!r} is not of the form \'the word "WORD" moving '
            "DIRECTION', with a word of "
            f"{LENGTHS[0]} to {LENGTHS[-1]} letters of {ALPHABET} and a direction of "
            f"{', '.join(MOTIONS)}."
        )
    return word, motion


def letter_places(length: int) -> list[int]:
    """The places of the letters of a word, see `PLACES`."""
    return list(range(1 - length, length, 2))


class GreyCodec(PatchCodec):
    """Latents (32, 2, 4, 12) of grey videos, from blocks of 2 x 4 x 4 pixels."""

    mean = (0.2,)
    std = 0.26


class LetterEncoder(WordEncoder):
    """Prompt encoder of the world of words: a vector for each letter, which also says
    its place, one for the motion.

    A letter's vector is the sum of two one-hot vectors, of the letter and of its place:
    the features of a text encoder say both. All have unit root mean square.
    """

    def __init__(self) -> None:
        self._table = torch.eye(TRANSFORMER_CONFIG["text_embed_dim"])

    def features(self, text: str) -> Tensor:
        """Letters and motion of one text, float32 (L, 32), L = 1 for the empty text.
        ValueError as `parse_prompt`.
        """
        if not text.strip():
            rows = self._table[[VOCABULARY.index(UNCONDITIONAL)]]
        else:
            word, motion = parse_prompt(text)
            # Vectors of places lie behind those of the vocabulary; the motion has no
            # place.
            at = self._table[
                [
                    len(VOCABULARY) + PLACES.index(place)
                    for place in letter_places(len(word))
                ]
            ]
            rows = self._table[[VOCABULARY.index(name) for name in (*word, motion)]]
            rows = rows + torch.cat([at, torch.zeros_like(rows[:1])])
        return rows / rows.square().mean(1, keepdim=True).sqrt()


class Words(Toy):
    """The model family `toy_words`, see `ModelFamily`."""

    shipped = ASSETS / "words"
    text_tokens = LENGTHS[-1] + 1
    encoder = LetterEncoder
    codec = GreyCodec
