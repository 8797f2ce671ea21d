"""Every attribute of a scene changes the pixels as it claims."""

import dataclasses

import pytest
import torch

from sage_fast.models.toy.renderer import (
    BACKGROUND,
    COLOURS,
    MOTIONS,
    SHAPES,
    Scene,
    all_scenes,
    coverage,
    render_batch,
    to_uint8,
    track,
)


def render(scene, *size):
    return render_batch([scene], *size)[0]


SCENE = Scene(colour="red", shape="circle", motion="left")


def object_mass(video):
    """Share of object per pixel, from the distance to the background; video (F, 3, H, W)."""
    return (video - torch.tensor(BACKGROUND).view(3, 1, 1)).norm(dim=1)


def centres(video):
    mass = object_mass(video)
    grid = torch.arange(16) + 0.5
    total = mass.sum((1, 2))
    return torch.stack([(mass.sum(1) * grid).sum(1) / total, (mass.sum(2) * grid).sum(1) / total], dim=1)


def test_there_are_1800_distinct_scenes_and_videos():
    scenes = all_scenes()
    videos = to_uint8(render_batch(scenes))
    assert len(scenes) == 6 * 4 * 5 * 15
    assert len({video.numpy().tobytes() for video in videos}) == len(scenes)


@pytest.mark.parametrize("colour", COLOURS)
def test_colour_fills_the_object(colour):
    video = render(dataclasses.replace(SCENE, colour=colour, shape="square", motion="closer"))
    assert torch.allclose(video[-1, :, 8, 8], torch.tensor(COLOURS[colour]))
    assert torch.allclose(video[-1, :, 0, 0], torch.tensor(BACKGROUND))


@pytest.mark.parametrize("first", SHAPES)
@pytest.mark.parametrize("second", SHAPES)
def test_shapes_differ_clearly_but_have_similar_area(first, second):
    masks = [coverage(shape, track(SCENE)) for shape in (first, second)]
    areas = [mask.sum() / 8 for mask in masks]
    assert 0.6 < areas[0] / areas[1] < 1.7
    if first != second:
        assert (masks[0] - masks[1]).abs().sum() / 8 > 2.5


@pytest.mark.parametrize(
    ("motion", "step"),
    [("left", (-1, 0)), ("right", (1, 0)), ("up", (0, -1)), ("down", (0, 1)), ("closer", (0, 0))],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_motion_is_one_pixel_a_frame(motion, step, shape):
    steps = centres(render(dataclasses.replace(SCENE, motion=motion, shape=shape))).diff(dim=0)
    tolerance = 0.01 if motion != "closer" else 0.15
    assert torch.allclose(steps, torch.tensor(step).float().expand(7, 2), atol=tolerance)


def test_only_closer_grows():
    for motion in MOTIONS:
        mass = object_mass(render(dataclasses.replace(SCENE, motion=motion))).sum((1, 2))
        if motion == "closer":
            assert (mass.diff() > 0).all() and mass[-1] > 4 * mass[0]
        else:
            assert torch.allclose(mass, mass[:1].expand(8), rtol=1e-4)


@pytest.mark.parametrize("motion", MOTIONS)
def test_position_shifts_the_whole_track(motion):
    base = centres(render(dataclasses.replace(SCENE, motion=motion)))
    along = centres(render(dataclasses.replace(SCENE, motion=motion, along=1))) - base
    across = centres(render(dataclasses.replace(SCENE, motion=motion, across=-2))) - base
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    axis, other = (x, y) if motion in ("left", "right") else (y, x)
    assert torch.allclose(along, axis.expand(8, 2), atol=0.01)
    assert torch.allclose(across, -2 * other.expand(8, 2), atol=0.01)


def test_errors_name_the_field_and_the_choices():
    with pytest.raises(ValueError, match=r"Scene.colour is 'pink'; use one of red"):
        Scene(colour="pink", shape="circle", motion="left")
    with pytest.raises(ValueError, match=r"Scene.across is 3"):
        Scene(colour="red", shape="circle", motion="left", across=3)
    with pytest.raises(ValueError, match="at least 2 frames"):
        render(SCENE, 1)
