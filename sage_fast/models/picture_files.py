"""Pictures that videos begin with: files read as people see them, and what of one a
video shows.
"""

import logging
from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageOps

from sage_fast.records import Pictured

logger = logging.getLogger(__name__)

SMALLEST = 16
"""Pixels of a side; the video autoencoder makes one latent of as many."""

LEAST_SHOWN = 2 / 3
"""Share of a picture below which its cropping is warned of: a square in a video of
480x832 keeps 58 %.
"""


def read_picture(file: str) -> Image.Image:
    """A picture in RGB, upright as its camera says, transparent parts on white.

    ValueError names a file that cannot be read, or not as people see it, and says why.
    """
    try:
        with Image.open(file) as opened:
            count = getattr(opened, "n_frames", 1)
            # a camera's, with its picture first and previews behind
            if count > 1 and opened.format != "MPO":
                raise ValueError(f"it holds {count} pictures")
            if opened.mode in ("F", "I"):
                raise ValueError(
                    "its pixels have 32 bits, and nothing says which are black and "
                    "white"
                )
            if min(opened.size) < SMALLEST:
                raise ValueError(
                    f"it has {opened.width}x{opened.height} pixels, and {SMALLEST} a "
                    "side are the least"
                )
            picture = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I;16"):
            # Greys from 0 to 65535, of which Pillow cuts off all above 255.
            picture = Image.fromarray((np.asarray(picture) // 257).astype(np.uint8))
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(
                Image.new("RGBA", picture.size, "white"), picture
            )
        return picture.convert("RGB")
    # The readers of the formats raise errors of many kinds.
    except Exception as error:
        raise ValueError(
            f"{file} cannot be read as a picture: {error}. Save it again as one PNG "
            "or JPEG of 8 bits a colour."
        ) from error


def check_pictures(asked: Iterable[str | Pictured]) -> None:
    """Read the pictures of questions to a prompt encoder, and warn where the video
    shows little of one.

    ValueError as `read_picture`.
    """
    cropped = {}
    for one in asked:
        if isinstance(one, Pictured):
            picture = read_picture(one.image)
            ratio = picture.width * one.height / (picture.height * one.width)
            cropped[min(ratio, 1 / ratio)] = one
    least = min(cropped, default=1.0)
    if least < LEAST_SHOWN:
        logger.warning(
            "Of the picture %s a video %d wide and %d high shows %.0f %%. Crop it "
            "yourself, or set video.width and "
            "video.height to its shape.",
            *(
                cropped[least].image,
                cropped[least].width,
                cropped[least].height,
                100 * least,
            ),
        )
