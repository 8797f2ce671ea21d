"""Videos decode back to what was written; sheets and plots hold what they were given."""

import math
import zlib
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from sage_fast.models.media_files import (
    check_pictures,
    read_picture,
    read_video,
    video_file_name,
    write_video,
)
from sage_fast.records import Pictured
from sage_fast.run.metrics import MARGIN, Cell, contact_sheet


def colour_blocks(num_frames: int, height: int, width: int) -> torch.Tensor:
    """Four saturated quarters that trade places from frame to frame: (F, 3, H, W)
    uint8.
    """
    colours = torch.tensor(
        [[220, 30, 30], [30, 200, 40], [40, 50, 230], [240, 240, 240]],
        dtype=torch.uint8,
    )
    quarters = 2 * (torch.arange(height) >= height // 2)[:, None] + (
        torch.arange(width) >= width // 2
    )
    return torch.stack(
        [
            colours.roll(frame, 0)[quarters].permute(2, 0, 1)
            for frame in range(num_frames)
        ]
    )


@pytest.mark.parametrize(
    ("height", "width", "factor"),
    [(16, 24, 8), (120, 200, 2), (131, 135, 1)],
    ids=["tiny", "below-128", "odd"],
)
def test_video_decodes_back_in_order_and_colour(tmp_path, height, width, factor):
    video = colour_blocks(6, height, width)
    path = tmp_path / "new" / "video.mp4"
    write_video(path, video, fps=23.976)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (
            stream.codec_context.name == "h264"
            and stream.codec_context.pix_fmt == "yuv420p"
        )
        assert float(stream.average_rate) == pytest.approx(23.976, abs=1e-3)
        frames = container.decode(stream)
        decoded = np.stack(
            [
                f.reformat(format="rgb24", src_colorspace="ITU709").to_ndarray()
                for f in frames
            ]
        )
    tall = height * factor
    wide = width * factor
    assert decoded.shape == (6, tall + tall % 2, wide + wide % 2, 3)
    assert np.array_equal(read_video(path).permute(0, 2, 3, 1), decoded)
    expected = video.permute(0, 2, 3, 1).numpy().repeat(factor, 1).repeat(factor, 2)
    error = np.abs(decoded[:, :tall, :wide].astype(int) - expected)
    # Chroma has half the resolution, so the error sits at the edges between colours.
    assert error.mean() < 4 and np.median(error) <= 2
    padded = np.pad(
        decoded[:, :tall, :wide],
        ((0, 0), (0, tall % 2), (0, wide % 2), (0, 0)),
        mode="edge",
    )
    assert np.abs(decoded.astype(int) - padded).max() <= 8
    assert [entry.name for entry in path.parent.iterdir()] == ["video.mp4"]


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A red circle, moving LEFT!", "03-a-red-circle-moving-left.mp4"),
        ("一只猫在雪地里奔跑，阳光", "03-一只猫在雪地里奔跑-阳光.mp4"),
        ("قطة حمراء", "03-قطة-حمراء.mp4"),
        ("cafe\u0301", "03-café.mp4"),
        ("../\u202e\n\0", "03-prompt.mp4"),
        ("x" * 500, f"03-{'x' * 60}.mp4"),
        ("猫" * 500, f"03-{'猫' * 30}.mp4"),
        ("a" + "🦊" * 500, f"03-a{'🦊' * 22}.mp4"),
    ],
)
def test_file_names_keep_every_script_and_fit_on_a_disk(tmp_path, prompt, name):
    assert video_file_name(3, prompt) == name
    assert video_file_name(3, prompt, 1, 2) == name.replace(".mp4", "-1.mp4")
    (tmp_path / name).touch()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.slow
def test_the_same_video_is_the_same_file(tmp_path):
    video = torch.randint(
        0,
        256,
        (8, 3, 66, 98),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )
    files = set()
    for number in range(20):
        write_video(tmp_path / "a.mp4", video[:, :, : 66 - number % 2].contiguous(), 8)
        files.add((number % 2, (tmp_path / "a.mp4").read_bytes()))
    assert len(files) == 2


def test_a_sheet_has_a_row_of_frames_for_every_video_and_takes_captions_of_any_script(
    tmp_path,
):
    before = torch.zeros(9, 3, 16, 16, dtype=torch.uint8)
    after = before.clone()
    after[-1, 1] = 200
    captions = [
        "word " * 200,
        "x" * 500,
        "一只猫在雪地里奔跑" * 20,
        "two $lines$\nand \U0001f600 \ue000",
        "",
    ]
    contact_sheet(
        tmp_path / "s.png",
        [Cell(caption=caption, videos=[before, after]) for caption in captions],
        "title",
    )
    sheet = np.asarray(Image.open(tmp_path / "s.png").convert("RGB"))
    side = (1660 - 2 * MARGIN - 24) // 8 - 2
    assert sheet.shape[1] == 1660
    first, last = (sheet[:, MARGIN + place * (side + 2) + 5] for place in (0, 7))
    black = (0, 0, 0)
    green = (0, 200, 0)
    assert (first == black).all(1).sum() == 2 * len(captions) * side, (
        "the first frames are black"
    )
    filled = [
        colour for colour in map(tuple, last.tolist()) if colour in (black, green)
    ]
    assert filled == ([black] * side + [green] * side) * len(captions), (
        "after is below before"
    )


@pytest.mark.parametrize(("count", "columns"), [(4, 2), (26, 6)])
def test_a_grid_has_every_prompt_before_above_after_and_its_ticks(
    tmp_path, count, columns
):
    before = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
    after = before.clone()
    after[:, 2] = 200
    marks = [[], *([[False, True]] * (count - 1))]
    cells = [
        Cell(caption=f"prompt {i}", videos=[before, after], marks=marks[i])
        for i in range(count)
    ]
    contact_sheet(tmp_path / "g.png", cells, "title", grid=True)
    picture = np.asarray(Image.open(tmp_path / "g.png").convert("RGB")).astype(int)
    side = ((1660 - 2 * MARGIN + 24) // columns - 48) // 3 - 2
    frames = count * 3 * side * side
    blue = (picture == (0, 0, 200)).all(2)
    assert (picture == 0).all(2).sum() == frames and blue.sum() == frames
    assert blue[:, MARGIN + 3].sum() == side * math.ceil(count / columns)
    coloured = (np.ptp(picture, 2) > 60) & ~blue
    for channel in (0, 1):  # red crosses and green ticks
        assert (coloured & (picture.argmax(2) == channel)).sum() > 20


GREYS = np.linspace(0, 255, 40 * 60).reshape(40, 60)
"""A ramp from black to white, as people see each of the pictures below; 60 wide and 40
high.
"""


def ramp(folder: Path, kind: str) -> Path:
    """The ramp in a file of a kind."""
    grey = Image.fromarray(GREYS.round().astype(np.uint8))
    inverted = Image.fromarray(255 - np.asarray(grey))
    clear = Image.new("L", grey.size)
    file = folder / (kind if "." in kind else f"{kind}.png")
    match kind:
        case "grey16":
            Image.fromarray((GREYS * 257).astype(np.uint16)).save(file)
        case "cut-out":  # below transparent white something else is stored
            Image.merge("RGBA", [clear, clear, clear, inverted]).save(file)
        case "grey-cut-out":
            Image.merge("LA", [clear, inverted]).save(file)
        case "palette":
            palette = Image.fromarray(np.asarray(grey), "P")
            palette.putpalette(
                bytes(
                    [
                        0,
                        0,
                        255,
                        *(level for index in range(1, 256) for level in 3 * [index]),
                    ]
                )
            )
            palette.save(file, transparency=bytes([0]) + bytes([255]) * 255)
        case "cmyk.jpg":
            Image.merge("CMYK", [clear, clear, clear, inverted]).save(file, quality=95)
        case "turned.jpg":
            exif = Image.Exif()
            exif[0x0112] = 6
            grey.transpose(Image.Transpose.ROTATE_90).save(file, exif=exif, quality=95)
        case "camera.jpg":
            grey.save(file, "MPO", save_all=True, append_images=[inverted], quality=95)
    return file


KINDS = (
    "grey16",
    "cut-out",
    "grey-cut-out",
    "palette",
    "cmyk.jpg",
    "turned.jpg",
    "camera.jpg",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_what_people_see(tmp_path, kind):
    file = str(ramp(tmp_path, kind))
    picture = read_picture(file)
    assert picture.mode == "RGB"
    expected = np.where((kind == "palette") & (GREYS.round() == 0), 255, GREYS)[
        :, :, None
    ]
    assert abs(np.asarray(picture).astype(float) - expected).max() <= (
        6 if kind.endswith("jpg") else 1
    )


def damaged(folder: Path, kind: str) -> Path:
    """A file that cannot be read, or not as people see it."""
    grey = Image.fromarray(GREYS.astype(np.uint8))
    file = folder / kind
    match kind:
        case "float.tif":
            Image.fromarray((GREYS / 255).astype(np.float32)).save(file)
        case "dot.png":
            Image.new("RGB", (1, 1)).save(file)
        case "line.png":
            Image.new("RGB", (400, 15)).save(file)
        case "moving.gif":
            grey.save(
                file,
                save_all=True,
                append_images=[grey.transpose(Image.Transpose.ROTATE_180)],
            )
        case "cut.jpg":
            grey.save(file)
            file.write_bytes(file.read_bytes()[:-300])
        case "broken.png":
            grey.save(file)
            file.write_bytes(file.read_bytes().replace(b"IDAT", b"IDxT"))
        case "huge.png":  # 400 megapixels in some kB
            file.write_bytes(png_header(20_000, 20_000))
        case "text.png":
            file.write_text("no picture")
    return file


def png_header(width: int, height: int) -> bytes:
    size = (
        b"IHDR"
        + width.to_bytes(4, "big")
        + height.to_bytes(4, "big")
        + bytes([8, 2, 0, 0, 0])
    )
    start = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big")
    return (
        start
        + size
        + zlib.crc32(size).to_bytes(4, "big")
        + bytes([0, 0, 0, 0])
        + b"IDAT"
        + bytes(4)
    )


NO_PICTURES = {
    "float.tif": "32 bits",
    "dot.png": "it has 1x1 pixels",
    "line.png": "400x15 pixels, and 16 a side",
    "moving.gif": "it holds 2 pictures",
    "cut.jpg": "runcated",
    "broken.png": "",
    "huge.png": "400000000 pixels",
    "text.png": "cannot identify",
    "gone.png": "No such file",
}


@pytest.mark.parametrize("kind", NO_PICTURES)
def test_what_is_no_picture_is_one_line_with_a_remedy(tmp_path, kind):
    file = damaged(tmp_path, kind)
    with pytest.raises(ValueError) as error:
        read_picture(str(file))
    said = str(error.value)
    assert said.startswith(f"{file} cannot be read as a picture: ") and "\n" not in said
    assert NO_PICTURES[kind] in said
    assert said.endswith("Save it again as one PNG or JPEG of 8 bits a colour.")


def test_a_video_that_shows_little_of_a_picture_is_warned_of(tmp_path, caplog):
    files = {
        size: tmp_path / f"{size[0]}.png"
        for size in [(480, 832), (500, 500), (640, 480), (850, 480)]
    }
    for size, file in files.items():
        Image.new("RGB", size).save(file)
    asked = {size: Pictured("a", str(file), 480, 832) for size, file in files.items()}
    check_pictures(["a", asked[640, 480], asked[850, 480]])
    assert not caplog.text
    check_pictures(asked.values())
    (record,) = caplog.records
    assert (
        f"Of the picture {files[480, 832]} a video 832 wide and 480 high shows 33 %"
        in record.message
    )
    check_pictures([asked[500, 500], asked[850, 480]._replace(height=832, width=480)])
    assert [
        record.message.partition(" shows ")[2][:2] for record in caplog.records
    ] == ["33", "33"]
    check_pictures([asked[500, 500]])
    assert "shows 58 %" in caplog.text


def test_an_unwritable_directory_and_a_file_that_is_no_video_are_named(tmp_path):
    (tmp_path / "file.mp4").write_text("x")
    with pytest.raises(OSError, match="choose another output directory"):
        write_video(tmp_path / "file.mp4" / "v.mp4", colour_blocks(2, 16, 16), fps=8)
    with pytest.raises(OSError, match="choose another output directory"):
        contact_sheet(
            tmp_path / "file.mp4" / "s.png",
            [Cell(caption="a", videos=[colour_blocks(2, 16, 16)])],
        )
    with pytest.raises(OSError, match="Delete it"):
        read_video(tmp_path / "file.mp4")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.mp4"]
