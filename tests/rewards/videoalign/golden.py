"""Scores of the tiny checkpoint that were computed without this project, and the videos
that they are of.
"""

import numpy as np
import torch

from sage_fast.rewards.videoalign import VideoAlignReward


def blocks(batch, num_frames, height, width, seed=0):
    """Coloured blocks that drift, (B, F, 3, H, W) uint8; the same numbers with every
    version of every library.
    """
    coarse = np.random.RandomState(seed).randint(0, 256, (batch, 1, 3, 4, 5))
    picture = coarse.repeat(-(-height // 4), 3).repeat(-(-width // 5), 4)
    picture = picture[..., :height, :width]
    frames = [np.roll(picture, (2 * i, 3 * i), (3, 4)) for i in range(num_frames)]
    return torch.from_numpy(np.concatenate(frames, 1)).to(torch.uint8)


FPS = 6
VIDEOS = blocks(2, 12, 41, 62)
PROMPTS = ["a red fox", "a long prompt about a castle on a hill in {braces}"]
# By transformers 4.45.2, the training code's version: its own Qwen2-VL, loaded with the
# checkpoint's own names and given no position ids, and its own image processor. And by
# a forward in float64 from the files alone, with LoRA beside the weights, patches cut
# out one by one and resizing by a matrix per axis, which `git show
# 83248d2:tests/rewards/videoalign/oracle.py` has. (head outputs -> score -> videos)
GOLDEN = {
    3: {
        "VQ": [-0.126707, -0.157012],
        "MQ": [2.346834, 1.347432],
        "TA": [0.909462, 0.817102],
    },
    1: {
        "VQ": [0.071986, 0.510313],
        "MQ": [1.448600, 0.278778],
        "TA": [1.132418, 1.064647],
    },
}
# By the forward in float64, of `blocks(1, *size, seed=2)` and "a boat": VQ, MQ and TA
# by (frames, height, width).
SIZES = {
    (5, 352, 624): (-0.355934, 0.992661, 0.774188),
    (6, 97, 131): (-0.394103, 1.666829, 0.836905),
    (2, 40, 40): (-0.194749, 1.886243, 0.862705),
    (3, 28, 300): (0.010596, 1.727376, 0.917946),
}


def make(paths, **options):
    checkpoint, base = paths
    options = {"fps": FPS, "base_model": str(base), "device": "cpu"} | options
    return VideoAlignReward(str(checkpoint), **options)


def assert_scores(scores, expected, atol=5e-4):
    assert list(scores) == ["VQ", "MQ", "TA"]
    for name, values in expected.items():
        values = torch.as_tensor(values, dtype=torch.float32)
        torch.testing.assert_close(scores[name], values, rtol=0, atol=atol)
