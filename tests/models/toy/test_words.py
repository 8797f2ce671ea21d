"""The family `toy_words`: prompts, their features, the grey codec, the shipped base
model and prompt files.
"""

import pytest
import torch

from sage_fast.config.load import load_config
from sage_fast.models.toy.components import ASSETS, WEIGHTS_NAME
from sage_fast.models.toy.words import (
    HEIGHT,
    LENGTHS,
    MOTIONS,
    NUM_FRAMES,
    WIDTH,
    GreyCodec,
    LetterEncoder,
    Words,
    parse_prompt,
    prompt_of,
)
from sage_fast.rewards.ocr import quoted_text
from sage_fast.run.prompt_files import read_prompts

PROMPTS = ASSETS.parents[3] / "configs/prompts"


def test_prompts_are_read_as_they_are_written() -> None:
    assert parse_prompt(prompt_of("LUNCH", "closer")) == ("LUNCH", "closer")
    assert quoted_text(prompt_of("LUNCH", "closer")) == "lunch"
    for text in (
        'the word "DOG" moving left',
        'the word "CAT" moving up',
        "CAT",
        'the word "UNEARTH" moving left',
    ):
        with pytest.raises(ValueError, match="3 to 5 letters of ACEHKLNRSTUY"):
            parse_prompt(text)


def test_a_letter_says_what_it_is_and_where() -> None:
    one, other, free = LetterEncoder().encode(
        [prompt_of("TEST", "left"), prompt_of("TEN", "left"), " "]
    )
    assert (
        one.text.shape == (5, 32)
        and free.text.shape == (1, 32)
        and one.glyph.shape == (0, 32)
    )
    assert torch.allclose(one.text.square().mean(1), torch.ones(5))
    assert not torch.equal(one.text[0], one.text[3]), "the same letter elsewhere"
    assert not torch.equal(one.text[0], other.text[0]), (
        "the first of four and the first of three"
    )
    assert torch.equal(one.text[4], other.text[3]), "the motion"


def test_the_grey_codec_loses_nothing_of_grey_videos() -> None:
    grey = torch.randint(
        0, 256, (2, NUM_FRAMES, 1, HEIGHT, WIDTH), dtype=torch.uint8
    ).expand(-1, -1, 3, -1, -1)
    latents = GreyCodec().encode(grey)
    assert latents.shape == (2, 32, 2, 4, 12) and torch.equal(
        GreyCodec().decode(latents), grey
    )


def test_the_shipped_base_and_its_preset() -> None:
    config = load_config("words_cpu")
    components = Words().load(config.model)
    description = Words().describe(config.model)
    assert description.latent_shape(NUM_FRAMES, HEIGHT, WIDTH) == (32, 2, 4, 12)
    assert components.transformer.config.text_embed_dim == 32
    assert (Words.shipped / WEIGHTS_NAME).stat().st_size < 3e6


def test_prompt_files_share_no_word() -> None:
    train, held_out = (
        [parse_prompt(prompt.text) for prompt in read_prompts(PROMPTS / f"{name}.csv")]
        for name in ("words_train", "words_eval")
    )
    assert len(train) == 96 and len(held_out) == 48
    words = [{word for word, _ in half} for half in (train, held_out)]
    assert not words[0] & words[1] and len(words[0]) == 96 and len(words[1]) == 48
    for half in (train, held_out):
        assert {(len(word), motion) for word, motion in half} == {
            (n, motion) for n in LENGTHS for motion in MOTIONS
        }
