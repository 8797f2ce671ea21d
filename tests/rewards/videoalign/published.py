"""Scores of the tiny checkpoint by the code that VideoAlign was published with:
transformers 4.45.2, all in bfloat16.

    pip install transformers==4.45.2 && python -m tests.rewards.videoalign.published

prints `PUBLISHED_BFLOAT16` of `test_bfloat16.py`. The model is transformers' own
Qwen2-VL of that release, with LoRA beside the weights it adapts as PEFT computes it.
`model.to(torch.bfloat16)` is what the public training and inference call; it rounds the
rotary frequencies of the language model and of the vision tower too, which are buffers.
Source: create_model_and_processor in train_reward.py and Qwen2VLRewardModelBT.forward
in trainer.py of https://github.com/KwaiVGI/VideoAlign, commit 219ab9d.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sage_fast.rewards.videoalign import vision
from sage_fast.rewards.videoalign.checkpoint import SPECIAL_TOKENS
from sage_fast.rewards.videoalign.reward import conversation
from tests.rewards.videoalign.golden import FPS, blocks
from tests.tiny.videoalign import build_tiny_videoalign

VIDEOS = blocks(6, 12, 112, 168, seed=3)
# Long, so that the scores are read at distances where the angles differ.
PROMPTS = [
    "a red fox " * 40,
    "a castle on a hill, " * 25,
    "waves " * 60,
    "two words",
    "fog over a lake " * 30,
    "smoke",
]


def build_attentive_videoalign(
    folder: Path, sharpness: float = 4.0
) -> tuple[Path, Path]:
    """The tiny checkpoint with queries and keys enlarged: attention that is nearly
    uniform hardly sees positions.
    """
    checkpoint, base = build_tiny_videoalign(folder)
    file = next(checkpoint.glob("checkpoint-1200")) / "model.pth"
    state = torch.load(file)
    for name, tensor in state.items():
        if "q_proj.base_layer." in name:
            tensor.mul_(sharpness)
        elif "visual.blocks" in name and ".attn.qkv." in name:
            tensor[: len(tensor) // 3].mul_(sharpness)
    torch.save(state, file)
    return checkpoint, base


def published_scores(
    checkpoint: Path, base: Path, dtype: torch.dtype
) -> dict[str, list[float]]:
    """VQ, MQ and TA of `VIDEOS`, one video at a time."""
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        Qwen2VLForConditionalGeneration,
        __version__,
    )

    assert __version__ == "4.45.2", f"transformers is {__version__}; install 4.45.2"
    settings = json.loads((checkpoint / "model_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    config = AutoConfig.from_pretrained(base, attn_implementation="sdpa")
    model: Any = Qwen2VLForConditionalGeneration(config)
    model.resize_token_embeddings(len(tokenizer))
    state = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in torch.load(
            next(checkpoint.glob("checkpoint-1200")) / "model.pth"
        ).items()
    }
    head = nn.Linear(config.hidden_size, 3, bias=False)
    head.load_state_dict({"weight": state.pop("rm_head.weight")})
    adapters = {name: state.pop(name) for name in list(state) if ".lora_" in name}
    model.load_state_dict(
        {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}
    )
    _add_lora(
        model,
        adapters,
        settings["peft_lora_config"]["lora_alpha"]
        / settings["peft_lora_config"]["lora_r"],
        dtype,
    )
    model.to(dtype).eval()
    head.to(dtype)

    statistics, places = (
        settings["inference_config"],
        tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)),
    )
    scores: dict[str, list[float]] = {"VQ": [], "MQ": [], "TA": []}
    for video, prompt in zip(VIDEOS, PROMPTS, strict=True):
        frames = video[vision.frame_indices(len(video), FPS, 2.0)]
        height, width = vision.frame_size(*frames.shape[2:], 200704)
        patches = vision.pixel_patches(
            vision.resize_frames(frames, height, width)[None]
        ).to(dtype)
        grid = torch.tensor([[len(frames) // 2, height // 14, width // 14]])
        features = model.visual(patches, grid_thw=grid)
        tokens = torch.tensor(
            tokenizer(conversation(prompt, len(features)), add_special_tokens=False)[
                "input_ids"
            ]
        )[None]
        embeds = model.model.embed_tokens(tokens)
        embeds = embeds.masked_scatter(
            (tokens == config.video_token_id)[..., None], features
        )
        hidden = model.model(
            inputs_embeds=embeds,
            attention_mask=torch.ones_like(tokens),
            use_cache=False,
        )[0]
        logits = head(hidden)[0]
        for index, (name, token) in enumerate(zip(scores, places, strict=True)):
            own = float(logits[(tokens[0] == token).nonzero().item(), index])
            scores[name].append(
                (own - statistics[f"{name}_mean"]) / statistics[f"{name}_std"]
            )
    return scores


def _add_lora(
    model: nn.Module, adapters: dict[str, Tensor], scale: float, dtype: torch.dtype
) -> None:
    """y = W x + scale B (A x), every product in the model's dtype."""
    for name in {key.rpartition(".lora_")[0] for key in adapters}:
        down, up = (
            adapters[f"{name}.lora_{part}.default.weight"].to(dtype) for part in "AB"
        )

        def adapt(
            _: nn.Module,
            inputs: tuple[Tensor],
            output: Tensor,
            pair: tuple[Tensor, Tensor] = (down, up),
        ) -> Tensor:
            return output + linear(linear(inputs[0], pair[0]), pair[1]) * scale

        model.get_submodule(name).register_forward_hook(adapt)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        paths = build_attentive_videoalign(Path(folder))
        for dtype in (torch.bfloat16, torch.float32):
            print(
                dtype,
                {
                    k: [round(x, 4) for x in v]
                    for k, v in published_scores(*paths, dtype).items()
                },
            )
