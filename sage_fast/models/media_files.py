"""Pictures and videos as files.

A picture is read as people see it, and cut to what a video shows of it. In memory
videos are uint8 tensors (F, 3, H, W), RGB; a file appears whole or not at all.
"""

import logging
import math
import os
import re
import unicodedata
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from sage_fast.config.files import replacing
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


# Players blur videos of a few pixels, and some refuse them.
MIN_VIDEO_SIDE = 128

# Of the words in a file name: a name has 255 bytes at most, 143 on an encrypted disk,
# and grows while it is written.
MAX_WORD_BYTES = 90

# x264's constant quality: visually lossless, since these files are looked at for
# artefacts of the model.
VIDEO_QUALITY = "14"


def video_file_name(index: int, prompt: str, member: int = 0, count: int = 1) -> str:
    """A readable file name: `03-a-red-circle.mp4`, with the member appended when a
    prompt has several videos.

    Letters, digits and symbols of any script stay, in the composed form of Unicode, and
    no name is too long for a disk.
    """
    composed = unicodedata.normalize("NFC", prompt.lower())
    kept = [
        c if unicodedata.category(c).startswith(("L", "M", "N", "So")) else "-"
        for c in composed
    ]
    # Bytes are counted, not letters; a letter that the cut goes through is dropped.
    words = (
        re.sub("-+", "-", "".join(kept))[:60]
        .encode()[:MAX_WORD_BYTES]
        .decode(errors="ignore")
        .strip("-")
    )
    return f"{index:02d}-{words or 'prompt'}{f'-{member}' if count > 1 else ''}.mp4"


def write_video(path: str | os.PathLike[str], video: Tensor, fps: float) -> None:
    """Write an H.264 mp4 (yuv420p, BT.709) that browsers play.

    A video whose short side is below 128 pixels is enlarged by the smallest integer
    factor that reaches it, each pixel becoming a square. An odd width or height gets
    its last column or row doubled, as yuv420p needs even sizes.

    Args:
        path: the file to write; missing folders are created.
        video: (F, 3, H, W) uint8, RGB.
        fps: frames per second.

    Raises:
        ValueError: another shape or dtype, or an ``fps`` that is not a positive number.
        OSError: the folder cannot be written to.
    """
    import av

    frames = video_frames(video, "video")
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(
            f"fps must be a positive number of frames per second, not {fps}"
        )
    factor = math.ceil(MIN_VIDEO_SIDE / min(frames.shape[1:3]))
    frames = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = frames.shape[1:3]
    frames = np.pad(
        frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge"
    )

    with (
        replacing(path) as temporary,
        av.open(str(temporary), "w", format="mp4") as container,
    ):
        # The index comes first, so that a browser plays before it has the whole file.
        container.options["movflags"] = "+faststart"
        # As a fraction of small numbers: a float such as 29.97 is one of huge ones.
        stream = container.add_stream(
            "libx264", rate=Fraction(fps).limit_denominator(10_000)
        )
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        # The same video must be the same file. With several threads, or with its
        # macroblock tree, which reads memory that it has not written (Valgrind shows
        # it), x264 chooses other quantizers once in a while.
        stream.options = {
            "crf": VIDEO_QUALITY,
            "preset": "medium",
            "x264-params": "mbtree=0",
        }
        context = stream.codec_context
        context.thread_count = 1
        # Without these tags players guess the matrix from the frame size, and colours
        # shift.
        context.colorspace = context.color_primaries = context.color_trc = 1  # BT.709
        context.color_range = 1  # limited
        for array in frames:
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(array), format="rgb24"
            )
            # One thread here too: by itself the conversion starts one per core for
            # every frame.
            frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", threads=1)
            container.mux(stream.encode(frame))
        # Without a frame the encoder gives those that it has held back.
        container.mux(stream.encode())


def read_video(path: str | os.PathLike[str]) -> Tensor:
    """The frames of an mp4 that `write_video` wrote: (F, 3, H, W) uint8 RGB, up to the
    losses of the codec.

    Raises:
        OSError: the file is missing or no video.
    """
    return read_video_and_rate(path)[0]


def read_video_and_rate(path: str | os.PathLike[str]) -> tuple[Tensor, float]:
    """As `read_video`, and the frames per second that the file declares."""
    import av

    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            frames = [
                f.reformat(
                    format="rgb24", src_colorspace="ITU709", threads=1
                ).to_ndarray()
                for f in container.decode(stream)
            ]
            fps = float(stream.average_rate or 0)
    # cut off, or without a video stream
    except (av.error.InvalidDataError, IndexError) as error:
        raise OSError(
            f"{path} is not a readable video ({error}). Delete it, so that it is made "
            "again."
        ) from error
    if not frames:
        raise OSError(f"{path} holds no frames. Delete it, so that it is made again.")
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2), fps


def video_frames(video: Tensor, what: str) -> np.ndarray:
    """The video as (F, H, W, 3) uint8 in host memory."""
    if video.dim() != 4 or video.shape[1] != 3 or 0 in video.shape:
        raise ValueError(
            f"{what} must have the shape (F, 3, H, W) with no empty side, not "
            f"{tuple(video.shape)}"
        )
    if video.dtype != torch.uint8:
        raise ValueError(
            f"{what} must be uint8 (0 to 255), not {video.dtype}; scale, round and "
            "convert it"
        )
    return video.detach().permute(0, 2, 3, 1).cpu().numpy()
