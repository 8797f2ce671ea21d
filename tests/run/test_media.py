"""Videos decode back to what was written; sheets and plots hold what they were given."""

import io
import math

import av
import numpy as np
import pytest
import torch
from PIL import Image

from sage_fast.models.video_files import read_video, video_file_name, write_video
from sage_fast.run.media import MARGIN, Cell, contact_sheet
from sage_fast.run.plots import reward_figure, to_png


def colour_blocks(num_frames: int, height: int, width: int) -> torch.Tensor:
    """Four saturated quarters that trade places from frame to frame: (F, 3, H, W) uint8."""
    colours = torch.tensor([[220, 30, 30], [30, 200, 40], [40, 50, 230], [240, 240, 240]], dtype=torch.uint8)
    video = torch.empty(num_frames, 3, height, width, dtype=torch.uint8)
    for frame in range(num_frames):
        turned = colours.roll(frame, 0)
        for quarter in range(4):
            rows = slice(None, height // 2) if quarter < 2 else slice(height // 2, None)
            columns = slice(None, width // 2) if quarter % 2 == 0 else slice(width // 2, None)
            video[frame, :, rows, columns] = turned[quarter][:, None, None]
    return video


def decode(path) -> tuple[np.ndarray, av.VideoStream]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [
            frame.reformat(format="rgb24", src_colorspace="ITU709").to_ndarray() for frame in container.decode(stream)
        ]
        return np.stack(frames), stream


@pytest.mark.parametrize(
    ("height", "width", "factor"),
    [(16, 24, 8), (120, 200, 2), (131, 135, 1)],
    ids=["tiny", "below-128", "odd"],
)
def test_video_decodes_back_in_order_and_colour(tmp_path, height, width, factor):
    video = colour_blocks(6, height, width)
    path = tmp_path / "new" / "video.mp4"
    write_video(path, video, fps=8)
    decoded, stream = decode(path)
    assert stream.codec_context.name == "h264" and stream.codec_context.pix_fmt == "yuv420p"
    assert stream.average_rate == 8
    tall, wide = height * factor, width * factor
    assert decoded.shape == (6, tall + tall % 2, wide + wide % 2, 3)
    expected = video.permute(0, 2, 3, 1).numpy().repeat(factor, 1).repeat(factor, 2)
    error = np.abs(decoded[:, :tall, :wide].astype(int) - expected)
    # Chroma has half the resolution, so the error sits at the edges between colours.
    assert error.mean() < 4 and np.median(error) <= 2
    padded = np.pad(decoded[:, :tall, :wide], ((0, 0), (0, tall % 2), (0, wide % 2), (0, 0)), mode="edge")
    assert np.abs(decoded.astype(int) - padded).max() <= 8
    assert [entry.name for entry in path.parent.iterdir()] == ["video.mp4"]


def test_video_frame_rates_that_are_no_integers(tmp_path):
    write_video(tmp_path / "v.mp4", colour_blocks(3, 16, 16), fps=23.976)
    assert float(decode(tmp_path / "v.mp4")[1].average_rate) == pytest.approx(23.976, abs=1e-3)


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
    write_video(tmp_path / name, colour_blocks(1, 16, 16), fps=4)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


BAD_VIDEOS = {
    "batch": (torch.zeros(1, 2, 3, 8, 8, dtype=torch.uint8), r"\(F, 3, H, W\).*\(1, 2, 3, 8, 8\)"),
    "channels-last": (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), r"not \(2, 8, 8, 3\)"),
    "float": (torch.zeros(2, 3, 8, 8), "must be uint8.*float32"),
}


def test_what_is_written_is_read(tmp_path):
    video = colour_blocks(5, 128, 160)
    write_video(tmp_path / "a.mp4", video, 4)
    read = read_video(tmp_path / "a.mp4")
    assert read.shape == video.shape and read.dtype == torch.uint8
    # Inside the blocks, where chroma subsampling mixes nothing.
    inner = (slice(None), slice(None), slice(8, 56), slice(8, 72))
    assert (read[inner].int() - video[inner].int()).abs().max() <= 6


@pytest.mark.slow
def test_the_same_video_is_the_same_file(tmp_path):
    video = torch.randint(0, 256, (8, 3, 66, 98), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    files = set()
    for number in range(100):
        write_video(tmp_path / "a.mp4", video[:, :, : 66 - number % 2].contiguous(), 8)
        files.add((number % 2, (tmp_path / "a.mp4").read_bytes()))
    assert len(files) == 2


def test_a_file_that_is_no_video_is_an_error(tmp_path):
    (tmp_path / "a.mp4").write_text("not a video")
    with pytest.raises(OSError, match="Delete it"):
        read_video(tmp_path / "a.mp4")
    with pytest.raises(OSError):
        read_video(tmp_path / "gone.mp4")


@pytest.mark.parametrize(("video", "message"), BAD_VIDEOS.values(), ids=BAD_VIDEOS.keys())
def test_wrong_videos_are_refused(tmp_path, video, message):
    good = colour_blocks(2, 8, 8)
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / "v.mp4", video, fps=8)
    with pytest.raises(ValueError, match=rf"'a fox'.*{message}"):
        contact_sheet(tmp_path / "s.png", [Cell(caption="a fox", videos=[good, video])])
    with pytest.raises(ValueError, match="fps must be a positive number"):
        write_video(tmp_path / "v.mp4", good, fps=float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_a_sheet_has_a_row_of_frames_for_every_video_and_takes_captions_of_any_script(tmp_path):
    before = torch.zeros(9, 3, 16, 16, dtype=torch.uint8)
    after = before.clone()
    after[-1, 1] = 200
    captions = [
        "word " * 200,
        "x" * 500,
        "一只猫在雪地里奔跑" * 20,
        'a "sign"\nin two $lines$',
        "\U0001f600 \ue000",
        "",
    ]
    contact_sheet(tmp_path / "s.png", [Cell(caption=caption, videos=[before, after]) for caption in captions], "title")
    sheet = np.asarray(Image.open(tmp_path / "s.png").convert("RGB"))
    side = (1660 - 2 * MARGIN - 24) // 8 - 2
    assert sheet.shape[1] == 1660
    first, last = (sheet[:, MARGIN + place * (side + 2) + 5] for place in (0, 7))
    black, green = ((0, 0, 0), (0, 200, 0))
    assert (first == black).all(1).sum() == 2 * len(captions) * side, "the first frames are black"
    filled = [colour for colour in map(tuple, last.tolist()) if colour in (black, green)]
    assert filled == ([black] * side + [green] * side) * len(captions), "after is below before"


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (4, 2), (60, 6)])
def test_a_grid_has_every_prompt_before_above_after_and_its_ticks(tmp_path, count, columns):
    before = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
    after = before.clone()
    after[:, 2] = 200
    cells = [
        Cell(caption=f"prompt {i}", videos=[before, after], marks=[False, True] if i else []) for i in range(count)
    ]
    contact_sheet(tmp_path / "g.png", cells, "title", grid=True)
    picture = np.asarray(Image.open(tmp_path / "g.png").convert("RGB")).astype(int)
    assert picture.shape[1] == 1660
    side = ((1660 - 2 * MARGIN + 24) // columns - 48) // 3 - 2
    frames = count * 3 * side * side
    blue = (picture == (0, 0, 200)).all(2)
    assert (picture == 0).all(2).sum() == frames and blue.sum() == frames
    assert blue[:, MARGIN + 3].sum() == side * math.ceil(count / columns)
    red, green = (
        ((picture - picture.min(2, keepdims=True)).argmax(2) == channel) & (np.ptp(picture, 2) > 60) & ~blue
        for channel in (0, 1)
    )
    assert (red.sum() > 20, green.sum() > 20) == (count > 1, count > 1)
    with pytest.raises(ValueError, match="at least one prompt"):
        contact_sheet(tmp_path / "g.png", [])


def test_an_unwritable_directory_is_named_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="choose another output directory"):
        write_video(tmp_path / "file" / "v.mp4", colour_blocks(2, 16, 16), fps=8)
    with pytest.raises(OSError, match="choose another output directory"):
        contact_sheet(tmp_path / "file" / "s.png", [Cell(caption="a", videos=[colour_blocks(2, 16, 16)])])
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_reward_of_a_run_as_a_picture():
    evaluated = [{"update": u, "eval/reward_mean": u / 9, "eval/reward_stderr": 0.1} for u in range(3)]
    gaps = [{"update": 0, "reward/mean": 0.1}, {"update": 1, "time/rollout": 2.0}, {"update": 2, "reward/mean": None}]
    for metrics in (evaluated, gaps, evaluated[:1]):
        image = np.asarray(Image.open(io.BytesIO(to_png(reward_figure(metrics)))).convert("RGB"))
        assert image.shape[1] == 1350 and (image != 255).any(axis=2).mean() > 0.01
