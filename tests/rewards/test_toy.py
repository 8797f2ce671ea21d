"""The toy rewards rank videos as an eye would, and cannot be had cheaply."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from sage_fast.models.toy.renderer import (
    BACKGROUND,
    COLOURS,
    MOTIONS,
    SHAPES,
    caption_of,
    manifold_for,
    render_batch,
    to_uint8,
)
from sage_fast.rewards.toy import ToyReward

MANIFOLD = manifold_for(8, 16, 16)
GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randperm(len(MANIFOLD.scenes), generator=GENERATOR)[:24].tolist()
SCENES = [MANIFOLD.scenes[row] for row in ROWS]
PROMPTS = [caption_of(scene).text for scene in SCENES]
PERFECT = MANIFOLD.videos[ROWS]
BACKGROUND_COLOUR = to_uint8(torch.tensor(BACKGROUND)).view(1, 1, 3, 1, 1)
BLANK = BACKGROUND_COLOUR.expand_as(PERFECT).contiguous()
REWARD = ToyReward()


def as_bytes(videos):
    return videos.clamp(0, 255).round().to(torch.uint8)


def changed(attribute, values):
    values = list(values)
    scenes = []
    for scene in SCENES:
        place = values.index(getattr(scene, attribute)) + 1
        other = {attribute: values[place % len(values)]}
        scenes.append(dataclasses.replace(scene, **other))
    return to_uint8(render_batch(scenes))


def blurred(size):
    frames = PERFECT.flatten(0, 1).float()
    frames = functional.pad(frames, (size // 2,) * 4, mode="replicate")
    return as_bytes(functional.avg_pool2d(frames, size, 1)).view(PERFECT.shape)


def noisy(level):
    noise = torch.randn(PERFECT.shape, generator=torch.Generator().manual_seed(1))
    return as_bytes(PERFECT.float() + 255 * level * noise)


def dimmed(level):
    return as_bytes((PERFECT.float() - BLANK.float()) * level + BLANK.float())


def pure_noise():
    generator = torch.Generator().manual_seed(2)
    levels = torch.randint(0, 256, PERFECT.shape, generator=generator)
    return levels.to(torch.uint8)


def mean(videos):
    scores = REWARD.score(videos, PROMPTS)
    return {name: value.mean().item() for name, value in scores.items()}


def test_every_legal_video_is_perfect():
    prompts = [caption_of(scene).text for scene in MANIFOLD.scenes]
    scores = REWARD.score(MANIFOLD.videos[::15], prompts[::15])
    for name in ("VQ", "MQ", "TA"):
        assert scores[name].dtype == torch.float32 and scores[name].shape == (120,)
        assert torch.allclose(scores[name], torch.ones(120), atol=1e-4), name
    assert torch.equal(scores["manifold_distance"], torch.zeros(120))
    assert torch.equal(scores["aligned"], torch.ones(120))


@pytest.mark.parametrize(
    "damage",
    [
        lambda level: blurred(int(1 + 2 * level)),
        lambda level: noisy(0.05 * level),
        lambda level: dimmed(1 - 0.25 * level),
    ],
    ids=["blur", "noise", "fainter"],
)
def test_more_damage_means_less_of_everything(damage):
    scores = [mean(PERFECT), *(mean(damage(level)) for level in (1, 2, 3))]
    for name in ("VQ", "MQ", "TA"):
        values = [score[name] for score in scores]
        assert all(worse < better for better, worse in pairwise(values)), (name, values)
    distances = [score["manifold_distance"] for score in scores]
    assert distances == sorted(distances)


@pytest.mark.parametrize(
    ("attribute", "values"),
    [("colour", COLOURS), ("shape", SHAPES), ("motion", MOTIONS)],
)
def test_a_wrong_attribute_costs_alignment_alone(attribute, values):
    wrong = mean(changed(attribute, values))
    assert (wrong["VQ"], wrong["MQ"]) == pytest.approx((1, 1), abs=1e-4)
    assert 0.3 < wrong["TA"] < 0.45 < mean(blurred(3))["TA"]
    assert wrong["TA"] > mean(pure_noise())["TA"] + 1
    assert wrong["manifold_distance"] == wrong["aligned"] == 0


@pytest.mark.parametrize("videos", [BLANK, pure_noise()], ids=["blank", "noise"])
def test_blank_and_noise_are_worst(videos):
    scores = mean(videos)
    assert scores["VQ"] < -1.9 and scores["MQ"] < -0.5 and scores["TA"] < -0.99


@pytest.mark.parametrize(
    ("videos", "prompt", "message"),
    [
        (PERFECT, PROMPTS[0], "24 videos and 1 prompts"),
        (PERFECT[:1], "a pink circle moving left", "'pink'"),
        (PERFECT[:1].float(), PROMPTS[0], "Expected uint8"),
    ],
    ids=["prompts", "colour", "dtype"],
)
def test_what_cannot_be_scored_is_refused(videos, prompt, message):
    with pytest.raises(ValueError, match=message):
        REWARD.score(videos, [prompt])


def test_a_second_object_costs_quality():
    moved = [
        dataclasses.replace(scene, across=-2 if scene.across > 0 else 2)
        for scene in SCENES
    ]
    scores = mean(torch.maximum(PERFECT, to_uint8(render_batch(moved))))
    assert scores["VQ"] < -0.2 and scores["MQ"] < 0.5 and scores["TA"] < 0.6


def test_spoiled_motion_is_found():
    frozen = mean(PERFECT[:, 4:5].expand_as(PERFECT).contiguous())
    assert frozen["VQ"] == pytest.approx(1, abs=1e-4)
    assert frozen["MQ"] < 0.25 < mean(blurred(5))["MQ"]
    assert frozen["TA"] < mean(PERFECT)["TA"] - 0.6
    flicker = PERFECT.clone()
    recoloured = PERFECT.clone()
    flicker[:, 3] = BLANK[:, 3]
    recoloured[:, ::2] = changed("colour", COLOURS)[:, ::2]
    for spoiled in (flicker, recoloured, PERFECT[:, [3, 0, 6, 1, 7, 4, 2, 5]]):
        assert mean(spoiled)["MQ"] < 0.45
