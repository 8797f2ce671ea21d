"""PickScore: its formula, its temperature, and where it takes its processor from."""

from pathlib import Path

import pytest
import torch

from sage_fast.rewards.clip import PROCESSOR, CLIPScore, PickScore
from tests.tiny.clip import build_tiny_clip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_clip(tmp_path_factory.mktemp("pick"))


def videos(batch: int) -> torch.Tensor:
    return torch.randint(0, 256, (batch, 3, 3, 30, 40), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_the_formula_of_the_model_card(checkpoint: Path) -> None:
    """exp(logit_scale) times the product of unit embeddings, per frame, from the embeddings of CLIPModel."""
    from transformers import CLIPModel

    reward = PickScore(str(checkpoint), device="cpu", num_frames=None)
    prompts = ["a red cat", "dog"]
    score = reward.score(videos(2), prompts)["PickScore"]
    model = CLIPModel.from_pretrained(checkpoint).eval()
    tokens = reward.similarity.tokenizer(prompts, padding=True, truncation=True, max_length=77, return_tensors="pt")
    for row in range(2):
        pixels = reward.similarity.preprocess(videos(2)[row])
        with torch.no_grad():
            logits = model(**tokens, pixel_values=pixels).logits_per_text  # exp(logit_scale) cos
        assert score[row].item() == pytest.approx(logits[row].mean().item(), abs=1e-4)


def test_the_temperature_is_the_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(checkpoint)
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    model.save_pretrained(tmp_path)
    cosine = CLIPScore(str(checkpoint), device="cpu").score(videos(2), ["dog", "dog"])["CLIPScore"] / 100
    score = PickScore(str(tmp_path), str(checkpoint), device="cpu").score(videos(2), ["dog", "dog"])["PickScore"]
    assert score.tolist() == pytest.approx((torch.tensor(3.0).exp() * cosine).tolist(), rel=1e-5)


def test_the_processor_of_a_bare_checkpoint_is_the_model_cards(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match=rf"hf download {PROCESSOR} --include .*json.*options.pick_score.processor"):
        PickScore(str(tmp_path))
    with pytest.raises(OSError, match=r"hf download yuvalkirstain/PickScore_v1`.*reward.options.pick_score.path"):
        PickScore(processor=str(checkpoint))
