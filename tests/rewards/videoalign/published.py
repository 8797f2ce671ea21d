"""A tiny checkpoint whose attention sees positions, and its scores by the code that
VideoAlign was published with: transformers 4.45.2, all in bfloat16.

The scores are by `git show eb1035fc:tests/rewards/videoalign/published.py`. The model
is transformers' own Qwen2-VL of that release, with LoRA beside the weights it adapts as
PEFT computes it. `model.to(torch.bfloat16)` is what the public training and inference
call; it rounds the rotary frequencies of the language model and of the vision tower
too, which are buffers. Source: create_model_and_processor in train_reward.py and
Qwen2VLRewardModelBT.forward in trainer.py of https://github.com/KwaiVGI/VideoAlign,
commit 219ab9d.
"""

from pathlib import Path

import torch

from tests.rewards.videoalign.golden import blocks
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
    file = checkpoint / "checkpoint-1200/model.pth"
    state = torch.load(file)
    for name, tensor in state.items():
        if "q_proj.base_layer." in name:
            tensor.mul_(sharpness)
        elif "visual.blocks" in name and ".attn.qkv." in name:
            tensor[: len(tensor) // 3].mul_(sharpness)
    torch.save(state, file)
    return checkpoint, base
