"""A small random VideoAlign checkpoint in the public layout, with the parameter names
of the public files.

Weights come from NumPy's legacy generator, whose numbers never change, and are a
function of each parameter's name.
"""

import json
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from sage_fast.rewards.videoalign import QUESTIONS, SPECIAL_TOKENS

HIDDEN = 64
HEADS = 4
KV_HEADS = 2
INTERMEDIATE = 96
LAYERS = 2
VISION_WIDTH = 32
VISION_HEADS = 2
VISION_BLOCKS = 2
LORA_RANK = 4
LORA_ALPHA = 8

# The added tokens of Qwen2-VL that a conversation about a video can hold.
BASE_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NUM_TEXT_TOKENS = 600
# Qwen2-VL's embedding has more rows than its tokenizer has tokens; VideoAlign's has
# exactly as many.
UNUSED_ROWS = 21

NORMALISATION = {
    "VQ_mean": 0.3,
    "VQ_std": 2.0,
    "MQ_mean": -0.2,
    "MQ_std": 0.5,
    "TA_mean": 0.1,
    "TA_std": 1.5,
}


def build_tiny_videoalign(
    folder: Path, head_outputs: Literal[1, 3] = 3
) -> tuple[Path, Path]:
    """Write a checkpoint folder and a base model folder; takes about a second.

    Args:
        folder: where both go; made when missing.
        head_outputs: outputs of the reward head: 3, of which each token's own counts,
            or 1, shared by the tokens.

    Returns:
        (checkpoint, base model), for the options `path` and `base_model` of the reward.
    """
    checkpoint = folder / f"videoalign_{head_outputs}"
    base = folder / "qwen2_vl"
    # Beside it what must not be taken: an older step (as text, 900 comes after 1200),
    # and a folder of another kind.
    step = checkpoint / "checkpoint-1200"
    older = checkpoint / "checkpoint-900"
    for path in (base, step, older, checkpoint / "checkpoint-best"):
        path.mkdir(parents=True, exist_ok=True)
    _write_base_model(base)
    (checkpoint / "model_config.json").write_text(
        json.dumps(MODEL_CONFIG), encoding="utf-8"
    )

    weights = _language_weights() | _visual_weights()
    weights["rm_head.weight"] = _random(
        f"rm_head{head_outputs}", (head_outputs, HIDDEN)
    )
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    adapters = _lora_weights()
    state = {
        f"base_model.model.{name}.default.weight": tensor
        for name, tensor in adapters.items()
    }
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        adapted = f"{module}.lora_A" in adapters
        state[f"base_model.model.{module}.{'base_layer.' if adapted else ''}{kind}"] = (
            tensor
        )
    torch.save(state, step / "model.pth")
    torch.save(
        {name: torch.zeros_like(tensor) for name, tensor in state.items()},
        older / "model.pth",
    )
    return checkpoint, base


MODEL_CONFIG = {
    "data_config": {
        "max_frame_pixels": 200704,
        "num_frames": None,
        "fps": 2.0,
        "prompt_template_type": "detailed_special",
        "sample_type": "uniform",
    },
    "model_config": {"use_special_tokens": True},
    "peft_lora_config": {
        "lora_enable": True,
        "vision_lora": False,
        "lora_r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "use_rslora": False,
    },
    "inference_config": NORMALISATION,
}
"""The entries of the public model_config.json that inference depends on."""


def _write_base_model(folder: Path) -> None:
    """Config and tokenizer, with the file names of Qwen2-VL-2B-Instruct."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Without a progress bar, and from the longest text that the model will read, so
    # that sequences stay short.
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([QUESTIONS], trainer)
    tokenizer.add_special_tokens(list(BASE_TOKENS))
    assert tokenizer.get_vocab_size() == NUM_TEXT_TOKENS + len(BASE_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config), encoding="utf-8"
    )

    config = {
        "model_type": "qwen2_vl",
        "vocab_size": NUM_TEXT_TOKENS + len(BASE_TOKENS) + UNUSED_ROWS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "bos_token_id": None,
        "eos_token_id": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "video_token_id": NUM_TEXT_TOKENS + BASE_TOKENS.index("<|video_pad|>"),
        "vision_config": {
            "depth": VISION_BLOCKS,
            "embed_dim": VISION_WIDTH,
            "hidden_size": HIDDEN,
            "num_heads": VISION_HEADS,
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _random(
    seed: str, shape: tuple[int, ...], scale: float | None = None, mean: float = 0.0
) -> Tensor:
    """Normal numbers; without a scale, one that keeps a product with a vector of unit
    entries at unit size.
    """
    if scale is None:
        scale = float(np.prod(shape[1:])) ** -0.5
    generator = np.random.RandomState(zlib.crc32(seed.encode()))
    return torch.from_numpy(generator.standard_normal(shape) * scale + mean).float()


def _linear(
    name: str, outputs: int, inputs: int, bias: bool, seed: str = ""
) -> dict[str, Tensor]:
    weights = {f"{name}.weight": _random(f"{seed}{name}.weight", (outputs, inputs))}
    return weights | (
        {f"{name}.bias": _random(f"{seed}{name}.bias", (outputs,), 0.1)} if bias else {}
    )


def _norm(name: str, width: int, bias: bool, seed: str = "") -> dict[str, Tensor]:
    weights = {
        f"{name}.weight": _random(f"{seed}{name}.weight", (width,), 0.1, mean=1.0)
    }
    return weights | (
        {f"{name}.bias": _random(f"{seed}{name}.bias", (width,), 0.1)} if bias else {}
    )


def _adapted_linears() -> dict[str, tuple[int, int, bool]]:
    """Linears of the language model that LoRA adapts: name -> (outputs, inputs, has a
    bias).
    """
    kv_width = KV_HEADS * (HIDDEN // HEADS)
    of_a_layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN, True),
        "self_attn.k_proj": (kv_width, HIDDEN, True),
        "self_attn.v_proj": (kv_width, HIDDEN, True),
        "self_attn.o_proj": (HIDDEN, HIDDEN, False),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN, False),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN, False),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE, False),
    }
    return {
        f"model.layers.{layer}.{name}": sizes
        for layer in range(LAYERS)
        for name, sizes in of_a_layer.items()
    }


def _lora_weights() -> dict[str, Tensor]:
    weights = {}
    for name, (outputs, inputs, _) in _adapted_linears().items():
        weights[f"{name}.lora_A"] = _random(f"{name}.lora_A", (LORA_RANK, inputs))
        weights[f"{name}.lora_B"] = _random(f"{name}.lora_B", (outputs, LORA_RANK), 0.2)
    return weights


def _language_weights() -> dict[str, Tensor]:
    # The last rows are the new tokens'.
    rows = NUM_TEXT_TOKENS + len(BASE_TOKENS) + len(SPECIAL_TOKENS)
    weights = {
        "model.embed_tokens.weight": _random("embed_tokens", (rows, HIDDEN), 1.0)
    }
    for name, (outputs, inputs, bias) in _adapted_linears().items():
        weights |= _linear(name, outputs, inputs, bias)
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights |= _norm(f"model.layers.{layer}.{norm}", HIDDEN, bias=False)
    return weights | _norm("model.norm", HIDDEN, bias=False)


def _visual_weights() -> dict[str, Tensor]:
    width = VISION_WIDTH
    merged = 4 * VISION_WIDTH
    seed = "tuned"
    weights = {
        "visual.patch_embed.proj.weight": _random(
            f"{seed}visual.patch_embed", (width, 3, 2, 14, 14)
        )
    }
    for index in range(VISION_BLOCKS):
        block = f"visual.blocks.{index}"
        weights |= _norm(f"{block}.norm1", width, True, seed) | _norm(
            f"{block}.norm2", width, True, seed
        )
        weights |= _linear(f"{block}.attn.qkv", 3 * width, width, True, seed)
        weights |= _linear(f"{block}.attn.proj", width, width, True, seed)
        weights |= _linear(f"{block}.mlp.fc1", 4 * width, width, True, seed)
        weights |= _linear(f"{block}.mlp.fc2", width, 4 * width, True, seed)
    weights |= _norm("visual.merger.ln_q", width, True, seed)
    weights |= _linear("visual.merger.mlp.0", merged, merged, True, seed)
    return weights | _linear("visual.merger.mlp.2", HIDDEN, merged, True, seed)
