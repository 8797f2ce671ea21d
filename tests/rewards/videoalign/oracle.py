"""VideoAlign computed the plain way in float64, from the files alone: no transformers, no code of the reward's.

LoRA stays beside the weights it adapts, patches are cut out one by one, and resizing is a matrix per axis.
"""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from sage_fast.rewards.videoalign.reward import QUESTIONS, VideoAlignReward

TOKENS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
PIXEL_MEAN, PIXEL_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def blocks(batch, num_frames, height, width, seed=0):
    """Coloured blocks that drift, (B, F, 3, H, W) uint8; the same numbers with every version of every library."""
    coarse = np.random.RandomState(seed).randint(0, 256, (batch, 1, 3, 4, 5))
    picture = coarse.repeat(-(-height // 4), 3).repeat(-(-width // 5), 4)[..., :height, :width]
    frames = [np.roll(picture, (2 * i, 3 * i), (3, 4)) for i in range(num_frames)]
    return torch.from_numpy(np.concatenate(frames, 1)).to(torch.uint8)


FPS = 6
VIDEOS = blocks(2, 12, 41, 62)
PROMPTS = ["a red fox", "a long prompt about a castle on a hill in {braces}"]
# By the oracle beside this file, and by transformers 4.45.2, the training code's version: its own Qwen2-VL, loaded with
# the checkpoint's own names and given no position ids, and its own image processor. (head outputs -> score -> videos)
GOLDEN = {
    3: {"VQ": [-0.126707, -0.157012], "MQ": [2.346834, 1.347432], "TA": [0.909462, 0.817102]},
    1: {"VQ": [0.071986, 0.510313], "MQ": [1.448600, 0.278778], "TA": [1.132418, 1.064647]},
}


def make(paths, **options):
    checkpoint, base = paths
    return VideoAlignReward(str(checkpoint), **{"fps": FPS, "base_model": str(base), "device": "cpu"} | options)


def assert_scores(scores, expected, atol=5e-4):
    assert list(scores) == ["VQ", "MQ", "TA"]
    for name, values in expected.items():
        torch.testing.assert_close(scores[name], torch.as_tensor(values, dtype=torch.float32), rtol=0, atol=atol)


class Oracle:
    """Scores of a checkpoint in the layout of one model.pth."""

    def __init__(self, checkpoint: Path, base: Path) -> None:
        weights = torch.load(next(checkpoint.glob("checkpoint-1200")) / "model.pth")
        self.weights = {name.removeprefix("base_model.model."): tensor.double() for name, tensor in weights.items()}
        self.config = json.loads((base / "config.json").read_text())
        self.settings = json.loads((checkpoint / "model_config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        self.tokenizer.add_special_tokens(TOKENS)

    def scores(self, video: torch.Tensor, prompt: str, indices: list[int], size: tuple[int, int]) -> list[float]:
        """[VQ, MQ, TA] of one video (F, 3, H, W), of which the frames `indices` are resized to `size`."""
        frames = [resize(video[i].double().numpy(), *size) for i in indices]
        features = torch.cat([self.look(a, b) for a, b in zip(frames[::2], frames[1::2], strict=True)])
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            + "<|video_pad|>" * len(features)
            + "<|vision_end|>"
            + QUESTIONS.format(text_prompt=prompt)
            + "<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        hidden = self.read(ids, iter(features))
        statistics = self.settings["inference_config"]
        result = []
        for number, token in enumerate(TOKENS):
            outputs = self.weights["rm_head.weight"] @ hidden[ids.index(self.tokenizer.token_to_id(token))]
            name = token[2:4]
            own = outputs[number] if len(outputs) == 3 else outputs[0]
            result.append(float((own - statistics[f"{name}_mean"]) / statistics[f"{name}_std"]))
        return result

    def look(self, first: np.ndarray, second: np.ndarray) -> torch.Tensor:
        """The vision tower on two frames (3, H, W): features (tokens, hidden)."""
        rows, places = cut_patches(first, second)
        kernel = self.weights["visual.patch_embed.proj.weight"]
        x = torch.tensor(rows) @ kernel.flatten(1).T
        heads = self.config["vision_config"]["num_heads"]
        width = x.shape[1] // heads
        frequencies = 1 / 10000.0 ** (torch.arange(0, width // 2, 2).double() / (width // 2))
        angles = torch.tensor(places).double()[:, :, None] * frequencies
        angles = angles.flatten(1).repeat(1, 2)
        for index in range(self.config["vision_config"]["depth"]):
            block = f"visual.blocks.{index}"
            qkv = self.linear(f"{block}.attn.qkv", self.layer_norm(f"{block}.norm1", x))
            q, k, v = (part.view(len(x), heads, width).transpose(0, 1) for part in qkv.chunk(3, dim=1))
            attended = attend(rotate(q, angles), rotate(k, angles), v)
            x = x + self.linear(f"{block}.attn.proj", attended.transpose(0, 1).reshape(len(x), -1))
            inner = self.linear(f"{block}.mlp.fc1", self.layer_norm(f"{block}.norm2", x))
            x = x + self.linear(f"{block}.mlp.fc2", inner * torch.sigmoid(1.702 * inner))
        merged = self.layer_norm("visual.merger.ln_q", x).view(len(x) // 4, -1)
        inner = torch.nn.functional.gelu(self.linear("visual.merger.mlp.0", merged))
        return self.linear("visual.merger.mlp.2", inner)

    def read(self, ids: list[int], features) -> torch.Tensor:
        """The language model on one conversation: hidden states (tokens, hidden)."""
        table = self.weights["model.embed_tokens.weight"]
        x = torch.stack([next(features) if i == self.config["video_token_id"] else table[i] for i in ids])
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        width = x.shape[1] // heads
        frequencies = 1 / self.config["rope_theta"] ** (torch.arange(0, width, 2).double() / width)
        angles = (torch.arange(len(ids))[:, None] * frequencies).repeat(1, 2)
        causal = torch.full((len(ids), len(ids)), -torch.inf).double().triu(1)
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            y = self.rms_norm(f"{layer}.input_layernorm", x)
            q = self.linear(f"{layer}.self_attn.q_proj", y).view(-1, heads, width).transpose(0, 1)
            k, v = (
                self.linear(f"{layer}.self_attn.{name}_proj", y).view(-1, kv_heads, width).transpose(0, 1)
                for name in "kv"
            )
            k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (rotate(k, angles), v))
            attended = attend(rotate(q, angles), k, v, causal)
            x = x + self.linear(f"{layer}.self_attn.o_proj", attended.transpose(0, 1).reshape(len(x), -1))
            y = self.rms_norm(f"{layer}.post_attention_layernorm", x)
            gate = self.linear(f"{layer}.mlp.gate_proj", y)
            inner = gate * torch.sigmoid(gate) * self.linear(f"{layer}.mlp.up_proj", y)
            x = x + self.linear(f"{layer}.mlp.down_proj", inner)
        return self.rms_norm("model.norm", x)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        lora = self.settings["peft_lora_config"]
        down = self.weights.get(f"{name}.lora_A.default.weight")
        stored = name if down is None else f"{name}.base_layer"
        y = x @ self.weights[f"{stored}.weight"].T
        if f"{stored}.bias" in self.weights:
            y = y + self.weights[f"{stored}.bias"]
        if down is not None:
            up = self.weights[f"{name}.lora_B.default.weight"]
            y = y + lora["lora_alpha"] / lora["lora_r"] * (x @ down.T @ up.T)
        return y

    def layer_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(1, keepdim=True)
        unit = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
        return unit * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def rms_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
    return ((q @ k.transpose(1, 2)) / q.shape[2] ** 0.5 + bias).softmax(2) @ v


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (heads, tokens, width): the two halves of the width are the two coordinates."""
    a, b = x.chunk(2, dim=2)
    return x * angles.cos() + torch.cat([-b, a], dim=2) * angles.sin()


def cut_patches(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Patches of two frames, 0 to 255, in the order of Qwen2-VL, and the row and column of each."""
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    first, second = ((frame / 255 - mean) / std for frame in (first, second))
    patches, places = [], []
    for top in range(0, first.shape[1] // 14, 2):
        for left in range(0, first.shape[2] // 14, 2):
            for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
                window = np.s_[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
                patch = [frame[colour][window].ravel() for colour in range(3) for frame in (first, second)]
                patches.append(np.concatenate(patch))
                places.append((row, column))
    return np.stack(patches), places


def resize(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bicubic (a = -1/2) with antialiasing of (3, H, W), to whole levels."""
    rows, columns = (_bicubic_matrix(old, new) for old, new in zip(frame.shape[1:], (height, width), strict=True))
    return np.clip(np.round(rows @ frame @ columns.T), 0, 255)


def _bicubic_matrix(old: int, new: int) -> np.ndarray:
    stretch = max(old / new, 1.0)
    matrix = np.zeros((new, old))
    for target in range(new):
        centre = (target + 0.5) * old / new
        for source in range(old):
            t = abs(source + 0.5 - centre) / stretch
            if t < 1:
                matrix[target, source] = 1.5 * t**3 - 2.5 * t**2 + 1
            elif t < 2:
                matrix[target, source] = -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2
    return matrix / matrix.sum(1, keepdims=True)
