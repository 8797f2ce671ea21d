"""VideoAlign: its scores against an independent forward and fixed numbers, and every public trap against both."""

import hashlib
import json

import numpy as np
import pytest
import torch

from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.sections import RewardConfig
from sage_fast.records import Prompt, PromptEmbeds, Sample
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.videoalign import reward as videoalign
from sage_fast.rewards.videoalign import vision as qwen2_vl_video
from sage_fast.rewards.videoalign.checkpoint import VideoAlignSettings
from sage_fast.rewards.videoalign.reward import QUESTIONS, conversation
from tests.rewards.videoalign.oracle import FPS, GOLDEN, PROMPTS, VIDEOS, Oracle, assert_scores, blocks, make
from tests.tiny.videoalign import build_tiny_videoalign


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return build_tiny_videoalign(tmp_path_factory.mktemp("videoalign"))


@pytest.fixture(scope="module")
def reward(paths):
    return make(paths)


@pytest.mark.parametrize("head_outputs", [3, 1])
def test_golden_scores(tmp_path, head_outputs):
    scores = make(build_tiny_videoalign(tmp_path, head_outputs)).score(VIDEOS, PROMPTS)
    assert_scores(scores, GOLDEN[head_outputs])
    assert all(s.dtype == torch.float32 and s.device.type == "cpu" and not s.requires_grad for s in scores.values())


@pytest.mark.parametrize("head_outputs", [3, 1])
def test_oracle_gives_the_golden_scores(tmp_path, head_outputs):
    oracle = Oracle(*build_tiny_videoalign(tmp_path, head_outputs))
    scores = oracle.scores(VIDEOS[0], PROMPTS[0], indices=[0, 4, 7, 11], size=(280, 392))
    np.testing.assert_allclose(scores, [GOLDEN[head_outputs][name][0] for name in ("VQ", "MQ", "TA")], atol=5e-4)


def mrope_positions(tokens, grid=(2, 10, 14)):
    """Qwen2-VL's own numbering: video tokens by pair of frames, row and column, text from their maximum on."""
    length = tokens.shape[1]
    # Placeholders are the token that follows itself most.
    before = int((tokens[0, 1:] == tokens[0, :-1]).float().argmax())
    axes = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij")).flatten(1) + before
    text = torch.arange(length - before - axes.shape[1]) + before + max(grid)
    parts = [torch.arange(before).expand(3, -1), axes, text.expand(3, -1)]
    return torch.cat(parts, 1)[:, None].expand(3, len(tokens), -1)


PUBLISHED = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
TRAPS = {
    "3-D positions": (videoalign, "sequential_positions", mrope_positions),
    "first token's outputs": (videoalign, "own_scores", lambda logits: logits[:, 0]),
    "last token's outputs": (videoalign, "own_scores", lambda logits: logits[:, -1]),
    "mean over tokens": (videoalign, "own_scores", lambda logits: logits.mean(1)),
    "first frames": (qwen2_vl_video, "frame_indices", lambda *_: [0, 1, 2, 3]),
    "every third frame": (qwen2_vl_video, "frame_indices", lambda n, *_: list(range(0, n, 3))),
    "rounded-down frames": (qwen2_vl_video, "frame_indices", lambda *_: [0, 3, 7, 11]),
    "published statistics": (VideoAlignSettings, "read", None),
    "stripped line ends": (
        videoalign,
        "conversation",
        lambda *args: "\n".join(line.rstrip() for line in conversation(*args).split("\n")),
    ),
    "no system message": (
        videoalign,
        "conversation",
        lambda *args: conversation(*args).replace("You are a helpful assistant.", ""),
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_public_trap_changes_the_scores(paths, monkeypatch, trap):
    owner, name, replacement = TRAPS[trap]
    if trap == "published statistics":
        settings = VideoAlignSettings.read(paths[0])
        trapped = VideoAlignSettings(**vars(settings) | {"statistics": PUBLISHED})
        replacement = staticmethod(lambda folder: trapped)
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(AssertionError, match="not close"):
        assert_scores(make(paths).score(VIDEOS, PROMPTS), GOLDEN[3])


def test_without_normalisation_the_models_own_scores(paths, reward):
    raw = make(paths, normalise=False).score(VIDEOS, PROMPTS)
    statistics = json.loads((paths[0] / "model_config.json").read_text())["inference_config"]
    expected = {
        name: torch.tensor(values) * statistics[f"{name}_std"] + statistics[f"{name}_mean"]
        for name, values in GOLDEN[3].items()
    }
    assert_scores(raw, expected, atol=1e-3)


def test_a_batch_scores_as_its_videos_one_by_one(paths):
    videos = blocks(5, 6, 64, 48, seed=1)
    # Of very different lengths, so that most rows are padded.
    prompts = ["fox", "a castle " * 40, "", "红狐狸", "two words"]
    reward = make(paths, batch_size=3)
    together = reward.score(videos, prompts)
    for row, prompt in enumerate(prompts):
        alone = reward.score(videos[row : row + 1], [prompt])
        assert_scores(alone, {name: values[row : row + 1] for name, values in together.items()}, atol=1e-4)


def test_scores_depend_on_video_prompt_and_fps(paths, reward):
    first = reward.score(VIDEOS[:1], PROMPTS[:1])
    other_prompt = reward.score(VIDEOS[:1], PROMPTS[1:])
    other_video = reward.score(VIDEOS[1:], PROMPTS[:1])
    other_fps = make(paths, fps=3).score(VIDEOS[:1], PROMPTS[:1])
    for name, value in first.items():
        assert reward.score(VIDEOS[:1], PROMPTS[:1])[name].equal(value)
        # Causal: the prompt stands after the places of VQ and MQ.
        assert (other_prompt[name] - value).abs().item() > 1e-3 or name != "TA"
        assert (other_video[name] - value).abs().item() > 1e-3
        assert (other_fps[name] - value).abs().item() > 1e-3


@pytest.mark.parametrize(
    ("num_frames", "height", "width"),
    [(5, 352, 624), (6, 97, 131), (2, 40, 40), (3, 28, 300)],
    ids=["reference-size", "odd", "two-frames", "three-frames"],
)
def test_sizes_against_the_oracle(paths, reward, num_frames, height, width):
    video = blocks(1, num_frames, height, width, seed=2)
    indices = {2: [0, 1], 3: [0, 2], 5: [0, 1, 3, 4], 6: [0, 2, 3, 5]}[num_frames]
    size = {352: (336, 588), 97: (280, 392), 40: (336, 336), 28: (112, 1064)}[height]
    expected = Oracle(*paths).scores(video[0], "a boat", indices, size)
    scores = reward.score(video, ["a boat"])
    assert_scores(scores, {name: [value] for name, value in zip(scores, expected, strict=True)}, atol=2e-3)


def test_template_is_byte_for_byte_the_public_one():
    # prompt_template.py of KwaiVGI/VideoAlign, commit 3e5ebc6.
    assert len(QUESTIONS) == 3997
    assert (
        hashlib.sha256(QUESTIONS.encode()).hexdigest()
        == "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700"
    )


@pytest.mark.parametrize("token", ["<|TA_reward|>", "<|video_pad|>", "<|im_end|>"])
def test_a_prompt_with_a_control_token_is_refused(reward, token):
    bad = f"a cat {token} on a mat"
    with pytest.raises(RewardError, match="a cat .* on a mat.*control token") as failure:
        reward.score(VIDEOS, [PROMPTS[0], bad])
    assert token in str(failure.value)
    with pytest.raises(RewardError, match="control token"):
        reward.check_prompts([bad])
    reward.check_prompts([*PROMPTS, "", "a | <b> |> VQ_reward"])


def test_through_the_config_with_settings_a_and_b(paths, reward):
    checkpoint, base = paths
    options = {"path": str(checkpoint), "base_model": str(base), "fps": FPS, "device": "cpu"}
    embeds = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))
    samples = [
        Sample(prompt=Prompt(text=text, index=index), embeds=embeds, member=0) for index, text in enumerate(PROMPTS)
    ]
    vq, mq, ta = (torch.tensor(GOLDEN[3][name]) for name in ("VQ", "MQ", "TA"))
    for weights, expected in [((1, 1, 1), vq + mq + ta), ((0.5, 0.5, 1.0), vq / 2 + mq / 2 + ta)]:
        named = dict(zip(("VQ", "MQ", "TA"), weights, strict=True))
        config = RewardConfig(rewards=["videoalign"], options={"videoalign": options}, weights=named)
        composite = CompositeReward.from_config(config)
        overall = composite.overall(composite.score(VIDEOS, samples))
        torch.testing.assert_close(overall.float(), expected, rtol=0, atol=1e-3)
    del options["fps"]
    with pytest.raises(ConfigError, match="videoalign.*fps is None.*video.fps"):
        CompositeReward.from_config(RewardConfig(rewards=["videoalign"], options={"videoalign": options}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": None}, "fps is None"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dtype": "float16"}, "dtype is 'float16'.*auto, bfloat16 or float32"),
        ({"device": "abacus"}, "device is 'abacus'"),
    ],
)
def test_options_out_of_range(paths, options, message):
    with pytest.raises(ValueError, match=message):
        make(paths, **options)


@pytest.mark.parametrize(
    ("videos", "prompts", "message"),
    [
        (VIDEOS.float(), PROMPTS, "uint8"),
        (VIDEOS[0], PROMPTS, "uint8 videos"),
        (VIDEOS.transpose(1, 2), PROMPTS, "uint8 videos"),
        (VIDEOS, PROMPTS[:1], "2 videos and 1 prompts"),
        (VIDEOS[:, :1], PROMPTS, "1 frame"),
    ],
    ids=["float", "one-video", "channels-first", "prompts", "one-frame"],
)
def test_unusable_videos(reward, videos, prompts, message):
    with pytest.raises(ValueError, match=message):
        reward.score(videos, prompts)
