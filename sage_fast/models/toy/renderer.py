"""The toy world: one coloured shape that moves with constant velocity over a plain dark
background.

Scenes with their captions, and the videos that are drawn of them. The finite set of
scenes (6 colours x 4 shapes x 5 motions x 15 positions = 1,800 videos) *is* the data
manifold of the toy world: every legal video can be written down, so the distance of a
sample from it can be measured.

Geometry is in units of 1/16 of the shorter side of the frame, so a 16 x 16 frame has
one unit per pixel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.95, 0.15, 0.15),
    "green": (0.15, 0.85, 0.25),
    "blue": (0.20, 0.40, 1.00),
    "yellow": (0.98, 0.88, 0.10),
    "purple": (0.80, 0.20, 0.90),
    "white": (0.95, 0.95, 0.95),
}
SHAPES = ("circle", "square", "triangle", "cross")
MOTIONS = ("left", "right", "up", "down", "closer")
ALONG = (-1, 0, 1)
ACROSS = (-2, -1, 0, 1, 2)
BACKGROUND = (0.06, 0.06, 0.08)

NUM_FRAMES = 8
HEIGHT = 16
WIDTH = 16

UNITS_PER_SIDE = 16
# In units: the radius of an object, and its way from the first frame to the last.
RADIUS = 3.0
TRAVEL = 7.0
# Of the radius, in the first and in the last frame.
CLOSER_SCALE = (0.55, 1.35)
SUPERSAMPLING = 8

UNCONDITIONAL = "<unconditional>"
VOCABULARY = (UNCONDITIONAL, "a", *COLOURS, *SHAPES, "moving", *MOTIONS)

_DIRECTIONS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "closer": (0.0, 0.0),
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Everything that determines one legal video.

    `along` and `across` are the nuisance: the whole track is shifted by `along` units
    in the direction of its axis of motion and by `across` units at right angles to it
    (for "closer": down and to the right). They are not in the caption.

    Example: `Scene(colour="red", shape="circle", motion="left", along=0, across=2)`.
    """

    colour: str
    shape: str
    motion: str
    along: int = 0
    across: int = 0


def all_scenes() -> tuple[Scene, ...]:
    """The 1,800 legal scenes, ordered by colour, shape, motion, along, across (the last
    varies fastest).
    """
    return tuple(
        Scene(colour=colour, shape=shape, motion=motion, along=along, across=across)
        for colour, shape, motion, along, across in product(
            COLOURS, SHAPES, MOTIONS, ALONG, ACROSS
        )
    )


class Caption(NamedTuple):
    """The attributes that a caption names, e.g. `Caption(colour="red", shape="circle",
    motion="left")`.
    """

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
    """Vocabulary indices of the words of `text`; the empty text is the one
    unconditional token.

    ValueError names the first unknown word and the vocabulary.
    """
    words = text.lower().split() or [UNCONDITIONAL]
    for word in words:
        if word not in VOCABULARY or (word == UNCONDITIONAL and text.strip()):
            known = ", ".join(VOCABULARY[1:])
            raise ValueError(
                f"Unknown word {word!r} in the toy prompt {text!r}; the toy world "
                f"knows: {known}."
            )
    return [VOCABULARY.index(word) for word in words]


def parse_caption(text: str) -> Caption:
    """Read "a COLOUR SHAPE moving DIRECTION" (case and spacing do not matter).

    ValueError for unknown words and for sentences of another form.
    """
    words = [VOCABULARY[token] for token in tokenize(text)]
    caption = Caption(words[1], words[2], words[4]) if len(words) == 5 else None
    if caption not in all_captions() or caption.text.split() != words:
        raise ValueError(
            f"The toy prompt {text!r} is not of the form 'a COLOUR SHAPE moving "
            "DIRECTION', with a colour of "
            f"{', '.join(COLOURS)}; a shape of {', '.join(SHAPES)}; a direction of "
            f"{', '.join(MOTIONS)}."
        )
    return caption


def track(scene: Scene, num_frames: int = NUM_FRAMES) -> Tensor:
    """Centre and size of the object in every frame.

    Returns float32 (F, 3): x and y of the centre relative to the centre of the frame (x
    to the right, y down, units), and the radius (units). Positions are linear in time;
    so is the radius of "closer".
    """
    time = torch.linspace(-0.5, 0.5, num_frames)
    direction_x, direction_y = _DIRECTIONS[scene.motion]
    horizontal = direction_x != 0
    shift_x, shift_y = (
        (scene.along, scene.across) if horizontal else (scene.across, scene.along)
    )
    x = shift_x + direction_x * TRAVEL * time
    y = shift_y + direction_y * TRAVEL * time
    small, large = CLOSER_SCALE if scene.motion == "closer" else (1.0, 1.0)
    radius = RADIUS * ((small + large) / 2 + (large - small) * time)
    return torch.stack([x, y, radius], dim=1)


def _inside(shape: str, dx: Tensor, dy: Tensor, radius: Tensor) -> Tensor:
    """Tell whether the points at (dx, dy) from the centre belong to the shape; all have
    about equal area.
    """
    if shape == "circle":
        return dx**2 + dy**2 <= (1.05 * radius) ** 2
    if shape == "square":
        return torch.maximum(dx.abs(), dy.abs()) <= 0.95 * radius
    if shape == "triangle":
        return (dy <= 0.95 * radius) & (dx.abs() <= 0.58 * (dy + 1.15 * radius))
    thin = 0.37 * radius
    long = 1.15 * radius
    upright = (dx.abs() <= thin) & (dy.abs() <= long)
    level = (dy.abs() <= thin) & (dx.abs() <= long)
    return upright | level


def coverage(
    shape: str, tracks: Tensor, height: int = HEIGHT, width: int = WIDTH
) -> Tensor:
    """Anti-aliased masks of one shape.

    Args:
        shape: one of `SHAPES`.
        tracks: (..., 3), as `track` returns them.
        height, width: size of the frame in pixels.

    Returns float32 (..., H, W) in [0, 1]: the share of each pixel that the shape
    covers, by 8 x 8 samples a pixel.
    """
    pixels_per_unit = min(height, width) / UNITS_PER_SIDE
    lead = tracks.shape[:-1]
    x, y, radius = (part.reshape(-1, 1, 1) for part in tracks.unbind(-1))

    # Places of the samples from the middle of the frame, in units.
    samples_x, samples_y = (
        ((torch.arange(size * SUPERSAMPLING) + 0.5) / SUPERSAMPLING - size / 2)
        / pixels_per_unit
        for size in (width, height)
    )
    inside = _inside(
        shape, samples_x.view(1, 1, -1) - x, samples_y.view(1, -1, 1) - y, radius
    )
    return torch.nn.functional.avg_pool2d(inside.float(), SUPERSAMPLING).view(
        *lead, height, width
    )


def render_batch(
    scenes: Sequence[Scene],
    num_frames: int = NUM_FRAMES,
    height: int = HEIGHT,
    width: int = WIDTH,
) -> Tensor:
    """Render scenes to float32 (B, F, 3, H, W) in [0, 1]. ValueError for sizes that
    cannot show a motion.
    """
    if num_frames < 2 or min(height, width) < 8:
        raise ValueError(
            f"Cannot draw {num_frames} frames of {height} x {width}: use at least 2 "
            "frames and 8 pixels a side."
        )
    masks = torch.empty(len(scenes), num_frames, height, width)
    for shape in SHAPES:
        rows = [row for row, scene in enumerate(scenes) if scene.shape == shape]
        # The colour does not change the mask: each distinct track is rasterised once.
        distinct = {
            (scenes[row].motion, scenes[row].along, scenes[row].across): row
            for row in rows
        }
        drawn = {
            key: coverage(shape, track(scenes[row], num_frames), height, width)
            for key, row in distinct.items()
        }
        for row in rows:
            masks[row] = drawn[
                scenes[row].motion, scenes[row].along, scenes[row].across
            ]
    colours = torch.tensor([COLOURS[scene.colour] for scene in scenes]).view(
        -1, 1, 3, 1, 1
    )
    background = torch.tensor(BACKGROUND).view(1, 1, 3, 1, 1)
    return background + masks[:, :, None] * (colours - background)


def to_uint8(videos: Tensor) -> Tensor:
    """Round float videos in [0, 1] (any shape) to uint8; values outside are clipped."""
    return (videos.clamp(0, 1) * 255).round().to(torch.uint8)


class Manifold:
    """Every legal video of one size, rendered once (8 x 16 x 16: 1,800 videos, 44 MB as
    float32, on the CPU).

    Attributes:
        scenes: the M scenes, in the order of `all_scenes`.
        videos: uint8 (M, F, 3, H, W), the rendering of each scene.
        table: float32 (M, F*3*H*W), the same videos in [0, 1] minus the background
            colour.
        energy: float32 (M,), squared norm of each row of `table`; a blank video would
            have 0.
    """

    def __init__(self, num_frames: int, height: int, width: int) -> None:
        self.scenes: tuple[Scene, ...] = all_scenes()
        self.videos = to_uint8(render_batch(self.scenes, num_frames, height, width))
        # The background as it is after rounding, so that background pixels of the table
        # are exactly zero.
        self.background = to_uint8(torch.tensor(BACKGROUND)).float().view(3, 1, 1) / 255
        self.table = self.flatten(self.videos)
        self.energy = self.table.square().sum(1)

    def flatten(self, videos: Tensor) -> Tensor:
        """uint8 (B, F, 3, H, W) -> float32 (B, F*3*H*W) on the CPU, in [0, 1] minus the
        background colour.

        ValueError when the videos have another dtype or size than this manifold.
        """
        if videos.dtype != torch.uint8 or videos.shape[1:] != self.videos.shape[1:]:
            expected = ", ".join(map(str, self.videos.shape[1:]))
            raise ValueError(
                f"Expected uint8 videos (B, {expected}), got {videos.dtype} "
                f"{tuple(videos.shape)}."
            )
        return (videos.cpu().float() / 255 - self.background).flatten(1)

    def squared_distances(self, flat: Tensor) -> Tensor:
        """Squared distances, float32 (B, M), of flattened videos to the legal ones, to
        about 1e-4.
        """
        # |a - b|^2 = |a|^2 - 2 a b + |b|^2, which rounding can make slightly negative.
        parts = [
            part.square().sum(1, keepdim=True) - 2 * part @ self.table.T + self.energy
            for part in flat.split(256)
        ]
        return torch.cat(parts).clamp_min(0)

    def distance(self, videos: Tensor) -> Tensor:
        """Root mean square pixel distance to the nearest legal video, float32 (B,),
        pixels in [0, 1].

        Exactly 0 for a legal video; about 0.14 to 0.25 for a blank one, about 0.5 for
        noise.
        """
        flat = self.flatten(videos)
        nearest = self.squared_distances(flat).argmin(1)
        # The matmul form finds the neighbour; the distance itself is taken directly,
        # free of cancellation.
        return (flat - self.table[nearest]).square().mean(1).sqrt().to(videos.device)


manifold_for = lru_cache(maxsize=4)(Manifold)
"""The (cached) manifold of one video size."""
