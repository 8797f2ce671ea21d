"""VideoAlign: its scores against recorded ones, and what it refuses."""

import hashlib
import json

import pytest
import torch

from sage_fast.config.errors import RewardError
from sage_fast.rewards.videoalign import QUESTIONS
from tests.rewards.videoalign.golden import (
    GOLDEN,
    PROMPTS,
    SIZES,
    VIDEOS,
    assert_scores,
    blocks,
    make,
)
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
    assert all(
        s.dtype == torch.float32 and s.device.type == "cpu" and not s.requires_grad
        for s in scores.values()
    )


@pytest.mark.parametrize(
    "size", SIZES, ids=["reference-size", "odd", "two-frames", "three-frames"]
)
def test_golden_scores_of_other_sizes(reward, size):
    scores = reward.score(blocks(1, *size, seed=2), ["a boat"])
    assert_scores(
        scores, {name: [value] for name, value in zip(scores, SIZES[size], strict=True)}
    )


def test_without_normalisation_the_models_own_scores(paths, reward):
    raw = make(paths, normalise=False).score(VIDEOS, PROMPTS)
    settings = json.loads((paths[0] / "model_config.json").read_text())
    statistics = settings["inference_config"]
    expected = {}
    for name, values in GOLDEN[3].items():
        std = statistics[f"{name}_std"]
        expected[name] = torch.tensor(values) * std + statistics[f"{name}_mean"]
    assert_scores(raw, expected, atol=1e-3)


def test_a_batch_scores_as_its_videos_one_by_one(paths):
    videos = blocks(4, 4, 28, 28, seed=1)
    # Of very different lengths, so that most rows are padded.
    prompts = ["fox", "a castle " * 40, "", "红狐狸"]
    reward = make(paths, batch_size=3)
    together = reward.score(videos, prompts)
    for row, prompt in enumerate(prompts):
        one = slice(row, row + 1)
        expected = {name: values[one] for name, values in together.items()}
        assert_scores(reward.score(videos[one], [prompt]), expected, atol=1e-4)


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
    with pytest.raises(
        RewardError, match="a cat .* on a mat.*control token"
    ) as failure:
        reward.score(VIDEOS, [PROMPTS[0], bad])
    assert token in str(failure.value)
    with pytest.raises(RewardError, match="control token"):
        reward.check_prompts([bad])
    reward.check_prompts([*PROMPTS, "", "a | <b> |> VQ_reward"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": None}, "fps is None"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dtype": "float16"}, "dtype is 'float16'.*bfloat16 or float32"),
    ],
)
def test_options_out_of_range(paths, options, message):
    with pytest.raises(ValueError, match=message):
        make(paths, **options)
