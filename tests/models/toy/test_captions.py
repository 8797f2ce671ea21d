"""Captions round trip, the split is balanced, words have fixed embeddings."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from sage_fast.models.toy.captions import (
    EMBED_DIM,
    GLYPH_DIM,
    VOCABULARY,
    Caption,
    WordEncoder,
    all_captions,
    caption_of,
    parse_caption,
    tokenize,
)
from sage_fast.models.toy.renderer import COLOURS, MOTIONS, SHAPES, Scene
from sage_fast.run.prompt_files import read_prompts

PROMPTS = Path(__file__).parents[3] / "configs" / "prompts"


def test_all_captions_round_trip():
    captions = all_captions()
    assert len({caption.text for caption in captions}) == 120
    assert all(parse_caption(caption.text) == caption for caption in captions)


def test_caption_of_a_scene():
    scene = Scene(colour="red", shape="circle", motion="left", along=1, across=-2)
    assert caption_of(scene).text == "a red circle moving left"


def test_case_and_spacing_do_not_matter():
    assert parse_caption("  A Red circle  MOVING left ") == Caption(colour="red", shape="circle", motion="left")


@pytest.mark.parametrize("text", ["", "a red circle", "red a circle moving left", "a red circle moving left left"])
def test_other_sentences_are_errors(text):
    with pytest.raises(ValueError, match="not of the form"):
        parse_caption(text)


@pytest.mark.parametrize("read", [tokenize, parse_caption, lambda text: WordEncoder().encode([text])])
def test_unknown_words_are_named_with_the_vocabulary(read):
    with pytest.raises(ValueError, match=r"'pink'.*purple"):
        read("a pink circle moving left")


def test_the_unconditional_token_cannot_be_typed():
    with pytest.raises(ValueError, match="Unknown word"):
        tokenize(VOCABULARY[0])


def test_word_embeddings():
    red, blue, free = WordEncoder().encode(["a red circle moving left", "a blue circle moving left", ""])
    assert red.text.shape == (5, EMBED_DIM) and red.text.dtype == torch.float32
    assert red.glyph.shape == (0, GLYPH_DIM)
    assert free.text.shape == (1, EMBED_DIM)
    assert torch.allclose(red.text.square().mean(1), torch.ones(5))
    assert (red.text != blue.text).any(1).tolist() == [False, True, False, False, False]
    assert len(VOCABULARY) <= EMBED_DIM and EMBED_DIM % 8 == 0


def test_the_shipped_prompt_files_are_disjoint_halves_that_are_balanced():
    halves = [read_prompts(PROMPTS / f"{name}.csv") for name in ("toy_train", "toy_eval")]
    captions = [[parse_caption(prompt.text) for prompt in half] for half in halves]
    assert {caption for half in captions for caption in half} == set(all_captions())
    for number, (half, found) in enumerate(zip(halves, captions, strict=True)):
        assert [prompt.index for prompt in half] == list(range(1000 * number, 1000 * number + 60))
        assert all(prompt.text == caption.text for prompt, caption in zip(half, found, strict=True))
        assert all(prompt.seed is None for prompt in half)
        # By the parity of a caption's places, so that each pair of values of two attributes is in both halves.
        places = [(list(COLOURS).index(c.colour), SHAPES.index(c.shape), MOTIONS.index(c.motion)) for c in found]
        assert {sum(place) % 2 for place in places} == {number}
        for attribute in ("colour", "shape", "motion"):
            counts = Counter(getattr(caption, attribute) for caption in found)
            assert len(set(counts.values())) == 1
