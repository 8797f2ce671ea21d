"""Rewards of the toy world: visual quality, motion quality and text alignment, against
the known manifold.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from sage_fast.config.sections import VideoConfig
from sage_fast.models.toy.renderer import (
    COLOURS,
    MOTIONS,
    SHAPES,
    Caption,
    Manifold,
    all_scenes,
    caption_of,
    manifold_for,
    parse_caption,
)
from sage_fast.rewards.base import RewardCosts, check_videos

# A pixel counts as object from LOW to HIGH distance from the background (length of the
# RGB difference, smooth between). The dimmest colour is 1.0 away and the edges of clean
# objects pass through every value.
LOW = 0.25
HIGH = 0.75

# What counts as one unit of error in the track. A frozen object is 2.3 pixels (root
# mean square) off a moving track.
CENTRE_UNIT = 2.3
SPREAD_UNIT = 0.8
MASS_UNIT = 0.45
COLOUR_UNIT = 0.4

EMPTY_MASS = 1.0

# Slopes of VQ in the relative error of the picture and in the dirt of its background:
# they give a group of samples of the base model about the same spread in all three
# rewards. Dirt counts apart because the eye sees a faint texture that a squared error,
# dominated by the object, does not.
VQ_SLOPE = 3.0
DIRT_SLOPE = 8.0
# A pixel of a clean frame belongs to the background when no channel differs from it by
# more than this.
BACKGROUND = 0.02

# One frame cannot cost more than this, so that a few broken frames do not drown the
# rest.
FRAME_ERROR_LIMIT = 2.0


def _track_features(flat: Tensor, num_frames: int, height: int, width: int) -> Tensor:
    """Motion of the object, without regard to its identity.

    Args:
        flat: (B, F*3*H*W), as `Manifold.flatten` returns it.

    Returns float32 (B, F, 7), in units of error: centre x and y, spread (root mean
    square radius), size (square root of the covered area relative to the usual object),
    and the object's RGB minus its mean over the video.
    """
    pixels = flat.view(-1, num_frames, 3, height, width)
    contrast = pixels.square().sum(2).sqrt()
    mask = ((contrast - LOW) / (HIGH - LOW)).clamp(0, 1)
    # Smoothstep, which has no kink at either end.
    mask = mask * mask * (3 - 2 * mask)
    # Lengths count in sixteenths of the shorter side, as in the renderer; areas in
    # their squares.
    unit = min(height, width) / 16
    x = ((torch.arange(width) + 0.5) - width / 2) / unit
    y = ((torch.arange(height) + 0.5) - height / 2) / unit
    mass = mask.sum((2, 3)) / unit**2
    # The constant keeps an empty frame finite: its object is a point in the middle.
    weight = mask / (mass + EMPTY_MASS)[..., None, None] / unit**2
    centre_x = (weight * x).sum((2, 3))
    centre_y = (weight * y[:, None]).sum((2, 3))
    radius2 = (x - centre_x[..., None, None]) ** 2 + (
        y[:, None] - centre_y[..., None, None]
    ) ** 2
    spread = (weight * radius2).sum((2, 3)).clamp_min(1e-6).sqrt()
    colour = (weight[:, :, None] * pixels).sum((3, 4))
    # Frames without an object have no colour: they pull neither the mean nor the
    # deviation.
    share = mass / (mass.sum(1, keepdim=True) + EMPTY_MASS)
    colour_change = (colour - (share[..., None] * colour).sum(1, keepdim=True)) * (
        mass / (mass + EMPTY_MASS)
    ).unsqueeze(-1)
    usual_size = 30.0**0.5
    return torch.cat(
        [
            torch.stack([centre_x, centre_y], dim=2) / CENTRE_UNIT,
            (spread / SPREAD_UNIT)[..., None],
            (mass.sqrt() / usual_size / MASS_UNIT)[..., None],
            colour_change / COLOUR_UNIT,
        ],
        dim=2,
    )


@lru_cache(maxsize=4)
def _tables(num_frames: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tables that videos are measured against, all float32.

    The K distinct clean frames (K, 3*H*W) minus background; their energy (K,): squared
    norms; features of every legal video (M, F*7).
    """
    manifold = manifold_for(num_frames, height, width)
    distinct = torch.unique(manifold.videos.flatten(0, 1).flatten(1), dim=0)
    pixels = distinct.view(-1, 3, height, width).float() / 255
    frames = (pixels - manifold.background).flatten(1)
    features = _track_features(manifold.table, num_frames, height, width).flatten(1)
    return frames, frames.square().sum(1), features


class ToyReward:
    """VQ, MQ and TA of toy videos, from their pixels and the prompt's text alone.
    Deterministic, stateless.

    All three are 1 for every legal video of the prompt, and fall smoothly with the
    damage. Their scales are chosen so that a group of samples of one prompt has about
    the same spread in each.

    * **VQ**, visual quality, in (-inf, 1]: is every frame *some* clean picture,
      whatever the caption? The error of a frame is its distance to a clean frame
      relative to that frame's object, `|frame - clean| /
      |clean - blank|`, minimal over all clean frames; its dirt is the mean RGB distance from the background
      where that clean frame shows background. VQ is 1 minus 3 times the mean error
      minus 8 times the mean dirt. A blank video has -2, uniform noise about -10. Blur,
      a faint object, a second object and a dirty background all lower it.
    * **MQ**, motion quality, in (-1, 1]: does one object follow one legal track,
      whatever its colour and shape? In each frame the object's centre, spread, size and
      change of colour are measured; MQ is 1 minus their root mean square difference
      from the nearest legal video's. The units are such that a sharp object frozen in
      place has about 0 to 0.2. Jumps, flicker, fading, a changing colour and two
      objects lower it; a blank video has -0.6, noise -0.9.
    * **TA**, text alignment, in [-1, 1]: mean over colour, shape and motion. For one
      attribute, take the legal video nearest to the sample among those that have the
      prompt's value, and the same video with any other value of this attribute: the
      sample's place on the line between the two is 1 at the prompt's rendering, 0
      half-way, -1 at the closest alternative's. The presence of an object (at least
      half of its energy explained) pulls this up from -1, so that blank and noise have
      -1. One wrong attribute costs 2/3.

    Logged and never to be weighted: `manifold_distance`, root mean square pixel
    distance (pixels in [0, 1]) to the nearest of the 1,800 legal videos of any caption;
    0 for a legal video, and lower is better. `aligned`, 1 when that nearest video has
    the prompt's colour, shape and motion, else 0.

    Example: `ToyReward().score(videos, ["a red circle moving left"] * 8)["TA"]` has
    shape (8,).
    """

    LOWER_IS_BETTER: ClassVar = ("manifold_distance",)

    @staticmethod
    def costs(options: Mapping[str, Any], video: VideoConfig) -> RewardCosts:
        """The legal videos are kept as float32 and as bytes, with the distinct frames
        among them; three float32 copies of the videos are alive while they are drawn,
        in the first call.
        """
        numbers = len(all_scenes()) * video.num_frames * 3 * video.height * video.width
        # 4 bytes as float32, 1 as uint8, 2 for the frames, of which half are distinct.
        return RewardCosts(tables=7.0 * numbers, working=12.0 * numbers)

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score videos uint8 (B, F, 3, H, W) of B prompts: name -> float32 (B,) on the
        device of `videos`.

        ValueError when the numbers of videos and prompts differ, or a prompt is not a
        sentence of the toy world.
        """
        check_videos(videos, prompts)
        captions = [parse_caption(prompt) for prompt in prompts]
        num_frames, _, height, width = videos.shape[1:]
        manifold = manifold_for(num_frames, height, width)
        flat = manifold.flatten(videos)
        distances = manifold.squared_distances(flat)
        nearest = distances.argmin(1)
        aligned = [
            float(caption_of(manifold.scenes[row]) == caption)
            for row, caption in zip(nearest.tolist(), captions, strict=True)
        ]
        differences = flat - manifold.table[nearest]
        scores = {
            "VQ": _visual_quality(flat, num_frames, height, width),
            "MQ": _motion_quality(flat, num_frames, height, width),
            "TA": _text_alignment(distances, captions, manifold),
            "aligned": torch.tensor(aligned),
            "manifold_distance": differences.square().mean(1).sqrt(),
        }
        return {name: value.to(videos.device) for name, value in scores.items()}


def _visual_quality(flat: Tensor, num_frames: int, height: int, width: int) -> Tensor:
    table, energy, _ = _tables(num_frames, height, width)
    frames = flat.view(-1, 3 * height * width)
    costs = []
    for part in frames.split(512):
        # |frame - clean|^2 to all K clean frames by one product, a part of the frames at a time.
        squared = part.square().sum(1, keepdim=True) - 2 * part @ table.T + energy
        nearest = (squared / energy).argmin(1)
        clean = table[nearest].view(-1, 3, height * width)
        # Taken directly, so that a clean frame has exactly no error.
        squared_error = (part.view_as(clean) - clean).square().sum(1)
        error = (squared_error.sum(1) / energy[nearest]).sqrt()
        background = clean.abs().amax(1) < BACKGROUND
        dirt = (squared_error.sqrt() * background).sum(1) / background.sum(1)
        costs.append(VQ_SLOPE * error + DIRT_SLOPE * dirt)
    return 1 - torch.cat(costs).view(-1, num_frames).mean(1)


def _motion_quality(flat: Tensor, num_frames: int, height: int, width: int) -> Tensor:
    table = _tables(num_frames, height, width)[2]
    features = _track_features(flat, num_frames, height, width).flatten(1)
    nearest = table[torch.cdist(features, table).argmin(1)]
    differences = (features - nearest).view(len(features), num_frames, -1)
    squared = differences.square().sum(2)
    # x / (1 + x / L^2) is about x for small errors and tends to L^2, which bounds a
    # frame's cost.
    return 1 - (squared / (1 + squared / FRAME_ERROR_LIMIT**2)).mean(1).sqrt()


def _text_alignment(
    distances: Tensor, captions: Sequence[Caption], manifold: Manifold
) -> Tensor:
    sizes = (len(COLOURS), len(SHAPES), len(MOTIONS))
    # Scenes are ordered by colour, shape, motion and start: the number of a row has
    # these four places.
    rows = torch.arange(len(manifold.scenes)).view(*sizes, -1)
    scores = torch.empty(len(captions))
    for sample, caption in enumerate(captions):
        wanted = (
            list(COLOURS).index(caption.colour),
            SHAPES.index(caption.shape),
            MOTIONS.index(caption.motion),
        )
        total = 0.0
        for axis, value in enumerate(wanted):
            choices = rows.select(axis, value).flatten()
            best = choices[distances[sample, choices].argmin()]
            scene = torch.unravel_index(best, rows.shape)
            # The alternatives differ in this attribute only; a motion's alternatives
            # may start anywhere.
            others: list[Tensor | slice] = [
                *scene[:3],
                scene[3] if axis < 2 else slice(None),
            ]
            others[axis] = torch.tensor(
                [index for index in range(sizes[axis]) if index != value]
            )
            alternatives = rows[tuple(others)].flatten()
            differences = manifold.table[alternatives] - manifold.table[best]
            between = differences.square().sum(1)
            own = distances[sample]
            # Place on the line between two videos a and b: (|s - a|^2 - |s - b|^2) / |a
            # - b|^2, 1 at b and -1 at a.
            margin = ((own[alternatives] - own[best]) / between).min().clamp(-1, 1)
            # From 0 where the object's energy is not explained at all to 1 from a half
            # of it on.
            presence = (2 * (1 - own[best] / manifold.energy[best])).clamp(0, 1)
            total += ((1 + margin) / 2 * presence).item()
        scores[sample] = 2 * total / 3 - 1
    return scores
