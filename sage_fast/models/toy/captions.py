"""The language of the toy world: "a red circle moving left", and its word embeddings."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch

from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.models.toy.renderer import COLOURS, MOTIONS, SHAPES, Scene
from sage_fast.records import PromptEmbeds

UNCONDITIONAL = "<unconditional>"
VOCABULARY = (UNCONDITIONAL, "a", *COLOURS, *SHAPES, "moving", *MOTIONS)
EMBED_DIM = 24
GLYPH_DIM = 32


class Caption(NamedTuple):
    """The attributes that a caption names, e.g. `Caption(colour="red", shape="circle", motion="left")`."""

    colour: str
    shape: str
    motion: str

    @property
    def text(self) -> str:
        """The sentence, e.g. "a red circle moving left"."""
        return f"a {self.colour} {self.shape} moving {self.motion}"


def caption_of(scene: Scene) -> Caption:
    """The caption of a scene (its position is not part of it)."""
    return Caption(colour=scene.colour, shape=scene.shape, motion=scene.motion)


def all_captions() -> tuple[Caption, ...]:
    """The 120 captions, ordered by colour, shape, motion (the last varies fastest)."""
    return tuple(Caption(*words) for words in product(COLOURS, SHAPES, MOTIONS))


def tokenize(text: str) -> list[int]:
    """Vocabulary indices of the words of `text`; the empty text is the one unconditional token.

    ValueError names the first unknown word and the vocabulary.
    """
    words = text.lower().split() or [UNCONDITIONAL]
    for word in words:
        if word not in VOCABULARY or (word == UNCONDITIONAL and text.strip()):
            known = ", ".join(VOCABULARY[1:])
            raise ValueError(f"Unknown word {word!r} in the toy prompt {text!r}; the toy world knows: {known}.")
    return [VOCABULARY.index(word) for word in words]


def parse_caption(text: str) -> Caption:
    """Read "a COLOUR SHAPE moving DIRECTION" (case and spacing do not matter).

    ValueError for unknown words and for sentences of another form.
    """
    words = [VOCABULARY[token] for token in tokenize(text)]
    caption = Caption(words[1], words[2], words[4]) if len(words) == 5 else None
    if caption not in all_captions() or caption.text.split() != words:
        raise ValueError(
            f"The toy prompt {text!r} is not of the form 'a COLOUR SHAPE moving DIRECTION', with a colour of "
            f"{', '.join(COLOURS)}; a shape of {', '.join(SHAPES)}; a direction of {', '.join(MOTIONS)}."
        )
    return caption


class WordEncoder:
    """Prompt encoder of the toy world: one fixed one-hot vector per word, scaled to unit root mean square.

    The vectors are as wide as the vocabulary padded to a multiple of 8 (`EMBED_DIM`). It has no glyph
    branch.
    """

    def __init__(self) -> None:
        self._table = torch.eye(EMBED_DIM) * EMBED_DIM**0.5

    def prepare(
        self,
        texts: Sequence[str],
        world: World = SINGLE_PROCESS,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[tuple[int, int]]:
        """(L, Lg) of every text. ValueError as `encode`."""
        return [embeds.lengths for embeds in self.encode(texts)]

    def encode(self, texts: Sequence[str]) -> list[PromptEmbeds]:
        """One record per text: `text` float32 (L, 24), L words (1 for the empty text); `glyph` float32 (0, 32).

        ValueError names an unknown word. A sentence of known words that describes no scene is allowed.
        """
        return [
            PromptEmbeds(text=self._table[tokenize(text)].clone(), glyph=torch.zeros(0, GLYPH_DIM)) for text in texts
        ]
