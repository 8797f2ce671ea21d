"""Qwen2-VL's video preprocessing against transformers, PIL and counting by hand."""

import numpy as np
import pytest
import torch

from sage_fast.rewards import videoalign
from tests.rewards.videoalign.golden import blocks


@pytest.mark.parametrize(
    ("num_frames", "fps", "expected"),
    [
        (17, 24, [0, 5, 11, 16]),
        (81, 24, [0, 16, 32, 48, 64, 80]),
        (121, 24, [0, 13, 27, 40, 53, 67, 80, 93, 107, 120]),
        (81, 16, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (5, 1, [0, 1, 3, 4]),
        (3, 24, [0, 2]),
    ],
)
def test_frame_indices(num_frames, fps, expected):
    assert videoalign.frame_indices(num_frames, fps, 2.0) == expected


def test_frame_indices_have_limits():
    assert len(videoalign.frame_indices(5000, 2, 2.0)) == 768
    with pytest.raises(ValueError, match="1 frame.*at least 2"):
        videoalign.frame_indices(1, 24, 2.0)


def transformers_image_processor():
    """Qwen2-VL's processor on NumPy and PIL; transformers 4 has it under another name."""
    try:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as module

        return module.Qwen2VLImageProcessorPil, module.smart_resize
    except ImportError:
        from transformers.models.qwen2_vl import image_processing_qwen2_vl as older

        return older.Qwen2VLImageProcessor, older.smart_resize


def test_frame_sizes_are_those_of_transformers():
    _, smart_resize = transformers_image_processor()
    for height in (28, 57, 240, 336, 352, 480, 481, 720, 1088):
        for width in (28, 99, 320, 588, 624, 848, 1280, 1920):
            expected = smart_resize(
                height, width, 28, min_pixels=100352, max_pixels=200704
            )
            assert videoalign.frame_size(height, width, 200704) == expected
    assert videoalign.frame_size(9, 1600, 200704)[0] % 28 == 0


@pytest.mark.parametrize(
    ("height", "width"), [(280, 392), (56, 84), (97, 131)], ids=["up", "down", "same"]
)
def test_resize_is_that_of_pil(height, width):
    from PIL import Image

    # Of low contrast: PIL clips and rounds between the two axes.
    frames = 64 + blocks(1, 2, 97, 131)[0] // 2
    for frame, result in zip(
        frames, videoalign.resize_frames(frames, height, width), strict=True
    ):
        image = Image.fromarray(frame.permute(1, 2, 0).numpy()).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        difference = (torch.from_numpy(np.array(image)).permute(2, 0, 1) - result).abs()
        assert difference.max() <= 1 and difference.mean() < 0.02


def test_patches_are_those_of_transformers():
    processor, _ = transformers_image_processor()
    frames = blocks(2, 1, 336, 392, seed=3)
    expected = processor(min_pixels=1, max_pixels=10**9)(
        list(frames[:, 0].numpy()), return_tensors="np"
    )
    # An image is a pair of equal frames.
    patches = videoalign.pixel_patches(frames.expand(-1, 2, -1, -1, -1).float())
    assert expected["image_grid_thw"].tolist() == [[1, 24, 28]] * 2
    np.testing.assert_allclose(patches.numpy(), expected["pixel_values"], atol=2e-6)
