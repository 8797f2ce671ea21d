"""CLIPScore and PickScore against an independent computation with PIL and CLIPModel."""

import json
import logging
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from sage_fast.rewards.clip import CLIPScore, PickScore
from tests.tiny.clip import MEAN, STD, build_tiny_clip

# "a red dog" and "dog" in the tiny tokenizer, spelled out: start, words, end.
VOCABULARY_IDS = {
    "a red dog": ["a</w>", "red</w>", "d", "o", "g</w>"],
    "dog": ["d", "o", "g</w>"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_clip(tmp_path_factory.mktemp("clip"))


def soft_videos(
    batch: int, frames: int, height: int, width: int, seed: int = 0
) -> Tensor:
    noise = torch.rand(
        batch * frames, 3, 20, 20, generator=torch.Generator().manual_seed(seed)
    )
    pixels = torch.nn.functional.interpolate(noise, (height, width), mode="bilinear")
    return (pixels * 255).to(torch.uint8).view(batch, frames, 3, height, width)


def by_hand(checkpoint: Path, video: Tensor, prompt: str, rows: list[int]) -> float:
    """Mean cosine of the frames `rows`: PIL resizes, numpy crops, CLIPModel.forward
    compares.
    """
    from transformers import CLIPModel

    vocabulary = json.loads((checkpoint / "vocab.json").read_text(encoding="utf-8"))
    words = ["<|startoftext|>", *VOCABULARY_IDS[prompt], "<|endoftext|>"]
    model = CLIPModel.from_pretrained(checkpoint).eval()
    images = []
    for row in rows:
        image = Image.fromarray(video[row].permute(1, 2, 0).numpy())
        scale = 24 / min(image.size)
        size = (int(image.width * scale), int(image.height * scale))
        image = image.resize(size, Image.Resampling.BICUBIC)
        left = (image.width - 24) // 2
        top = (image.height - 24) // 2
        crop = np.asarray(image.crop((left, top, left + 24, top + 24)), np.float64)
        images.append(((crop / 255 - MEAN) / STD).transpose(2, 0, 1))
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([[vocabulary[word] for word in words]]),
            pixel_values=torch.tensor(np.stack(images), dtype=torch.float32),
        )
        return float((output.logits_per_image / model.logit_scale.exp()).mean())


@pytest.mark.parametrize("size", [(40, 56), (17, 14)], ids=["wide", "small and tall"])
def test_against_pil_and_clip(checkpoint: Path, size: tuple[int, int]) -> None:
    videos = soft_videos(3, 5, *size)
    prompts = ["a red dog", "dog", "a red dog"]
    scores = CLIPScore(str(checkpoint), num_frames=2, device="cpu", batch_size=4).score(
        videos, prompts
    )
    assert list(scores) == ["CLIPScore"] and scores["CLIPScore"].dtype == torch.float32
    expected = [
        100 * by_hand(checkpoint, v, p, [1, 3])
        for v, p in zip(videos, prompts, strict=True)
    ]
    # a wrong filter or a missing crop costs 0.1 and more
    assert max(expected) - min(expected) > 1
    assert scores["CLIPScore"].tolist() == pytest.approx(expected, abs=1e-3)


def test_a_long_prompt_is_truncated_and_that_is_said_at_the_start(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    videos = soft_videos(1, 2, 24, 24)
    reward = CLIPScore(str(checkpoint), device="cpu")
    exact = "x " * 75  # with start and end, 77 tokens
    longer = exact + "y y"
    score = reward.score(videos, [exact])["CLIPScore"]
    assert torch.equal(score, reward.score(videos, [longer])["CLIPScore"])
    with caplog.at_level(logging.WARNING, logger="sage_fast"):
        reward.check_prompts([exact, "dog"])
        assert not caplog.records
        reward.check_prompts([exact, longer, exact + "z"])
    assert "the first 77 tokens of a prompt, and 2 prompts have more" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (None, r"1 missing keys, among them visual_projection\.weight"),
        (
            torch.float8_e5m2,
            r"quantised: visual_projection\.weight is stored as F8_E5M2",
        ),
    ],
    ids=["missing", "of 8 bits"],
)
def test_weights_that_are_not_there_are_not_made_up(
    dtype: torch.dtype | None, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "clip"))
    file = folder / "model.safetensors"
    # Published files hold whole numbers beside the weights.
    weights = load_file(file) | {"text_model.embeddings.position_ids": torch.arange(77)}
    save_file(weights, file, metadata={"format": "pt"})
    CLIPScore(str(folder), device="cpu")
    projection = weights.pop("visual_projection.weight")
    if dtype is not None:
        weights["visual_projection.weight"] = projection.to(dtype)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        CLIPScore(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_frames", 0), ("dtype", "int8"), ("device", "nowhere")],
)
def test_options_out_of_range(option: str, value: object, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value!r}"):
        CLIPScore(str(checkpoint), **{option: value})  # type: ignore[arg-type]


def test_pick_score_is_the_formula_of_the_model_card(
    checkpoint: Path, tmp_path: Path
) -> None:
    """exp(logit_scale) times the cosine, with the checkpoint's own temperature; the
    processor may lie elsewhere.
    """
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(checkpoint)
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    model.save_pretrained(tmp_path)
    videos = soft_videos(2, 3, 30, 40)
    prompts = ["a red dog", "dog"]
    reward = PickScore(str(tmp_path), str(checkpoint), device="cpu", num_frames=None)
    score = reward.score(videos, prompts)
    expected = [
        math.exp(3.0) * by_hand(checkpoint, v, p, [0, 1, 2])
        for v, p in zip(videos, prompts, strict=True)
    ]
    assert score["PickScore"].tolist() == pytest.approx(expected, abs=1e-3)
