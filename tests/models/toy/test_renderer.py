"""The toy world: every attribute of a scene changes the pixels as it claims, captions
round trip, the codec loses nothing, and the distance is zero on the manifold and
positive off it.
"""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch

from sage_fast.models.toy.components import (
    EMBED_DIM,
    GLYPH_DIM,
    PatchCodec,
    WordEncoder,
)
from sage_fast.models.toy.renderer import (
    BACKGROUND,
    COLOURS,
    Caption,
    Scene,
    all_captions,
    all_scenes,
    caption_of,
    manifold_for,
    parse_caption,
    render_batch,
    to_uint8,
    tokenize,
)
from sage_fast.run.prompt_files import read_prompts

PROMPTS = Path(__file__).parents[3] / "configs" / "prompts"
MANIFOLD = manifold_for(8, 16, 16)
SCENE = Scene(colour="red", shape="circle", motion="left")


def render(scene, *size):
    return render_batch([scene], *size)[0]


def object_mass(video):
    """Share of object per pixel, from the distance to the background; video (F, 3, H,
    W).
    """
    return (video - torch.tensor(BACKGROUND).view(3, 1, 1)).norm(dim=1)


def centres(video):
    mass = object_mass(video)
    grid = torch.arange(16) + 0.5
    total = mass.sum((1, 2))
    return torch.stack(
        [(mass.sum(1) * grid).sum(1) / total, (mass.sum(2) * grid).sum(1) / total],
        dim=1,
    )


# --------------------------------------------------------------------------------------
# scenes and pixels


def test_there_are_1800_distinct_scenes_and_videos():
    assert len(all_scenes()) == 6 * 4 * 5 * 15
    assert len({video.numpy().tobytes() for video in MANIFOLD.videos}) == len(
        all_scenes()
    )


@pytest.mark.parametrize("colour", COLOURS)
def test_colour_fills_the_object(colour):
    video = render(
        dataclasses.replace(SCENE, colour=colour, shape="square", motion="closer")
    )
    assert torch.allclose(video[-1, :, 8, 8], torch.tensor(COLOURS[colour]))
    assert torch.allclose(video[-1, :, 0, 0], torch.tensor(BACKGROUND))


@pytest.mark.parametrize(
    ("motion", "step"),
    [
        ("left", (-1, 0)),
        ("right", (1, 0)),
        ("up", (0, -1)),
        ("down", (0, 1)),
        ("closer", (0, 0)),
    ],
)
def test_motion_is_one_pixel_a_frame_and_position_shifts_the_whole_track(motion, step):
    scene = dataclasses.replace(SCENE, motion=motion)
    video = render(scene)
    base = centres(video)
    mass = object_mass(video).sum((1, 2))
    tolerance = 0.01 if motion != "closer" else 0.15
    assert torch.allclose(
        base.diff(dim=0), torch.tensor(step).float().expand(7, 2), atol=tolerance
    )
    if motion == "closer":
        assert (mass.diff() > 0).all() and mass[-1] > 4 * mass[0]
    else:
        assert torch.allclose(mass, mass[:1].expand(8), rtol=1e-4)
    x = torch.tensor([1.0, 0.0])
    y = torch.tensor([0.0, 1.0])
    axis, other = (x, y) if motion in ("left", "right") else (y, x)
    along = centres(render(dataclasses.replace(scene, along=1))) - base
    across = centres(render(dataclasses.replace(scene, across=-2))) - base
    assert torch.allclose(along, axis.expand(8, 2), atol=0.01)
    assert torch.allclose(across, -2 * other.expand(8, 2), atol=0.01)


# --------------------------------------------------------------------------------------
# captions


def test_captions_round_trip_whatever_the_case_and_spacing():
    captions = all_captions()
    assert len({caption.text for caption in captions}) == 120
    assert all(parse_caption(caption.text) == caption for caption in captions)
    assert (
        caption_of(dataclasses.replace(SCENE, along=1, across=-2)).text
        == "a red circle moving left"
    )
    assert parse_caption("  A Red circle  MOVING left ") == Caption(
        colour="red", shape="circle", motion="left"
    )


def test_other_sentences_are_errors_and_unknown_words_are_named():
    for text in ("", "red a circle moving left", "a red circle moving left left"):
        with pytest.raises(ValueError, match="not of the form"):
            parse_caption(text)
    with pytest.raises(ValueError, match=r"'pink'.*purple"):
        tokenize("a pink circle moving left")


def test_word_embeddings():
    red, blue, free = WordEncoder().encode(
        ["a red circle moving left", "a blue circle moving left", ""]
    )
    assert red.text.shape == (5, EMBED_DIM) and red.text.dtype == torch.float32
    assert red.glyph.shape == (0, GLYPH_DIM) and free.text.shape == (1, EMBED_DIM)
    assert torch.allclose(red.text.square().mean(1), torch.ones(5))
    assert (red.text != blue.text).any(1).tolist() == [False, True, False, False, False]


def test_the_shipped_prompt_files_are_disjoint_halves_that_are_balanced():
    halves = [
        read_prompts(PROMPTS / f"{name}.csv") for name in ("toy_train", "toy_eval")
    ]
    captions = [[parse_caption(prompt.text) for prompt in half] for half in halves]
    assert {caption for half in captions for caption in half} == set(all_captions())
    for number, found in enumerate(captions):
        assert [prompt.index for prompt in halves[number]] == list(
            range(1000 * number, 1000 * number + 60)
        )
        for attribute in ("colour", "shape", "motion"):
            counts = Counter(getattr(caption, attribute) for caption in found)
            assert len(set(counts.values())) == 1


# --------------------------------------------------------------------------------------
# codec


@pytest.mark.parametrize("size", [(8, 16, 16), (2, 4, 8)], ids=str)
def test_round_trip_of_the_codec_is_exact_for_any_bytes(size):
    generator = torch.Generator().manual_seed(0)
    videos = torch.randint(
        0, 256, (3, size[0], 3, *size[1:]), generator=generator, dtype=torch.uint8
    )
    codec = PatchCodec()
    latents = codec.encode(videos)
    assert latents.dtype == torch.float32 and latents.shape == (
        3,
        *codec.latent_shape(*size),
    )
    assert torch.equal(codec.decode(latents), videos)


def test_a_size_that_the_codec_does_not_have_is_named():
    with pytest.raises(
        ValueError, match="height that is a positive multiple of 4, not 18"
    ):
        PatchCodec().latent_shape(8, 18, 16)


# --------------------------------------------------------------------------------------
# distance


def test_legal_videos_have_no_distance_and_are_what_the_renderer_draws():
    rows = torch.arange(0, len(MANIFOLD.scenes), 37)
    videos = MANIFOLD.videos[rows]
    assert torch.equal(MANIFOLD.distance(videos), torch.zeros(len(rows)))
    assert torch.equal(
        MANIFOLD.squared_distances(MANIFOLD.flatten(videos)).argmin(1), rows
    )
    for row in (0, 611, 1799):
        assert torch.equal(MANIFOLD.videos[row], to_uint8(render(MANIFOLD.scenes[row])))


def test_distance_against_brute_force():
    generator = torch.Generator().manual_seed(0)
    videos = torch.randint(
        0, 256, (4, 8, 3, 16, 16), generator=generator, dtype=torch.uint8
    )
    videos[1] = MANIFOLD.videos[5] // 2
    legal = MANIFOLD.videos.double() / 255
    brute = [
        ((video.double() / 255 - legal) ** 2).flatten(1).mean(1).sqrt().min()
        for video in videos
    ]
    assert torch.allclose(
        MANIFOLD.distance(videos).double(), torch.stack(brute), atol=1e-6
    )
