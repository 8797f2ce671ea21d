"""The world of words: its legal videos, its exact velocity against a sum over all of
them, and its pretraining.
"""

from collections.abc import Callable
from dataclasses import asdict
from itertools import product

import pytest
import torch
from safetensors import safe_open

from experiments import words
from experiments.exact_policy import ExactPolicy
from experiments.pretrain import PretrainConfig
from experiments.readers import BestAlone, load_judge
from experiments.words import HEIGHTS, PARTNER, PHASES, WordsWorld, render_word
from sage_fast.config.schema import RunConfig
from sage_fast.models.toy.components import ASSETS, WEIGHTS_NAME
from sage_fast.models.toy.words import (
    ALPHABET,
    MOTIONS,
    PLACES,
    GreyCodec,
    letter_places,
)
from sage_fast.records import ScoredRollout
from sage_fast.rewards.ocr import load_reader
from sage_fast.run.run import build_trainer


def test_drawn_latents_are_legal_videos() -> None:
    world = WordsWorld(0.0, torch.Generator().manual_seed(0))
    captions = world.draw_captions(6, dropped=0.0)
    videos = GreyCodec().decode(world.draw_latents(captions))
    for (motion, *word), video in zip(captions.tolist(), videos, strict=True):
        shown = "".join(ALPHABET[letter] for letter in word if letter >= 0)
        legal = torch.stack(
            [render_word(shown, MOTIONS[motion], height) for height in HEIGHTS]
        )
        # the blank one is rounded to bytes
        assert (legal.int() - video.int()).abs().amax((1, 2, 3, 4)).min() <= 2


@pytest.mark.parametrize("sigma", [0.05, 0.9])
def test_the_velocity_is_that_of_the_sum_over_all_videos(sigma: float) -> None:
    world = WordsWorld(0.3, torch.Generator().manual_seed(1))
    asked = [ALPHABET.index(letter) for letter in "CAT"]
    videos = []
    prior = []
    for height, wrong in product(range(len(HEIGHTS)), product((False, True), repeat=3)):
        chosen = torch.zeros(len(words.VARIANTS), len(PLACES), len(ALPHABET))
        for place, letter, mistaken in zip(letter_places(3), asked, wrong, strict=True):
            chosen[
                height, PLACES.index(place), PARTNER[letter] if mistaken else letter
            ] = 1
        videos.append((world.blank + chosen.flatten() @ world.ink).view(world.shape))
        prior.append(
            torch.tensor([0.3 if mistaken else 0.7 for mistaken in wrong]).log().sum()
        )
    noise = torch.randn(4, *world.shape, generator=world.generator)
    latents = (1 - sigma) * torch.stack(videos[4:8]) + sigma * noise
    level = torch.full((4,), sigma)
    caption = torch.tensor([[0, *asked, -1, -1]]).expand(4, -1)
    exact = ExactPolicy(torch.stack(videos)).velocity(
        0, latents, level, torch.stack(prior).expand(4, -1)
    )
    # letters overlap by 1e-3
    assert (world.velocity(latents, level, caption) - exact).abs().max() < 0.02


def test_a_dropped_caption_allows_every_word() -> None:
    world = WordsWorld(0.3, torch.Generator().manual_seed(2))
    captions = world.draw_captions(8, dropped=0.0)
    clean = world.draw_latents(captions)
    level = torch.full((8,), 0.3)
    latents = 0.7 * clean + 0.3 * torch.randn(clean.shape, generator=world.generator)
    given, free = (
        world.velocity(latents, level, c)
        for c in (captions, torch.full_like(captions, -1))
    )
    assert torch.allclose(given, free, atol=1e-2), (
        "at little noise the picture alone says what it shows"
    )
    assert world.prompts(torch.full_like(captions, -1))[0].lengths == (1, 0, 0)


def test_the_shipped_base_says_how_it_was_made() -> None:
    with safe_open(ASSETS / "words" / WEIGHTS_NAME, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["command"] in (ASSETS / "words/MADE_BY.md").read_text("utf-8")
    for name, value in asdict(PretrainConfig(phases=PHASES)).items():
        assert metadata[name] == str(value), name


def test_fine_tuning_on_the_best_leaves_one_video_of_each_group(
    tiny_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--training.update=forward_process",
        "--rollout.sde_type=ode",
        "--forward_process.old_decay=null",
    ]
    trainer = build_trainer(
        tiny_run(*words, "--objective.kl_mode=none", "--rollout.num_generations=4")
    )
    trainer.on_rollout = BestAlone().on_rollout
    seen: list[ScoredRollout] = []
    monkeypatch.setattr(trainer.objective, "measure", seen.append)
    trainer.iterate()
    assert seen[0].all_advantages.view(-1, 4).sort().values.tolist() == [[0, 0, 0, 1]]


@pytest.mark.slow
def test_two_readers_read_clean_videos() -> None:
    """300 words, no matter whether they are one; the second reader is EasyOCR, where it
    is installed.
    """
    for package in ("rapidocr", "easyocr", "easyocr_en_models"):
        pytest.importorskip(package)
    readers = (load_reader(480, 1, search=False), load_judge())

    generator = torch.Generator().manual_seed(3)
    captions = WordsWorld(0.0, generator).draw_captions(300, dropped=0.0).tolist()
    texts = [
        "".join(ALPHABET[letter] for letter in word if letter >= 0)
        for _, *word in captions
    ]
    motions = [MOTIONS[motion] for motion, *_ in captions]
    heights = torch.randint(-1, 2, (300,), generator=generator).tolist()
    # The frame that the reward reads.
    pictures = [
        render_word(*each)[2].permute(1, 2, 0).numpy()
        for each in zip(texts, motions, heights, strict=True)
    ]
    for read in readers:
        assert (
            sum(
                read(picture) == text
                for picture, text in zip(pictures, texts, strict=True)
            )
            >= 297
        )
