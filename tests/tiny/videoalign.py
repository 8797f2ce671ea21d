"""A small random VideoAlign checkpoint in the public layout, with the parameter names of the public files.

Weights come from NumPy's legacy generator, whose numbers never change, and are a function of each parameter's name.
"""

import json
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from sage_fast.rewards.videoalign.checkpoint import SPECIAL_TOKENS
from sage_fast.rewards.videoalign.reward import QUESTIONS

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS = 64, 4, 2, 96, 2
VISION_WIDTH, VISION_HEADS, VISION_BLOCKS = 32, 2, 2
PATCH_ELEMENTS = (3, 2, 14, 14)
LORA_RANK, LORA_ALPHA = 4, 8

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
# Qwen2-VL's embedding has more rows than its tokenizer has tokens; VideoAlign's has exactly as many.
UNUSED_ROWS = 21

NORMALISATION = {"VQ_mean": 0.3, "VQ_std": 2.0, "MQ_mean": -0.2, "MQ_std": 0.5, "TA_mean": 0.1, "TA_std": 1.5}


def build_tiny_videoalign(folder: Path, head_outputs: Literal[1, 3] = 3) -> tuple[Path, Path]:
    """Write a checkpoint folder and a base model folder; takes about a second.

    Args:
        folder: where both go; made when missing.
        head_outputs: outputs of the reward head: 3, of which each token's own counts, or 1, shared by the tokens.

    Returns:
        (checkpoint, base model), for the options `path` and `base_model` of the reward.
    """
    checkpoint, base = folder / f"videoalign_{head_outputs}", folder / "qwen2_vl"
    # An older step beside it, that must not be taken: as text, 900 comes after 1200.
    step, older = checkpoint / "checkpoint-1200", checkpoint / "checkpoint-900"
    for path in (base, step, older):
        path.mkdir(parents=True, exist_ok=True)
    _write_base_model(base)
    (checkpoint / "model_config.json").write_text(json.dumps(_model_config(head_outputs)), encoding="utf-8")

    language, visual = _language_weights(), _visual_weights("tuned")
    rows = NUM_TEXT_TOKENS + len(BASE_TOKENS) + len(SPECIAL_TOKENS)
    # The last rows are the new tokens'.
    language["model.embed_tokens.weight"] = language["model.embed_tokens.weight"][:rows].clone()
    tuned = visual | {"rm_head.weight": _random(f"rm_head{head_outputs}", (head_outputs, HIDDEN))}
    adapters = _lora_weights()
    state = {}
    for name, tensor in (language | tuned).items():
        module, _, kind = name.rpartition(".")
        adapted = f"{module}.lora_A" in adapters
        state[f"base_model.model.{module}.base_layer.{kind}" if adapted else f"base_model.model.{name}"] = tensor
    for name, tensor in adapters.items():
        state[f"base_model.model.{name}.default.weight"] = tensor
    state["base_model.model.lm_head.weight"] = language["model.embed_tokens.weight"]
    torch.save(state, step / "model.pth")
    torch.save({name: torch.zeros_like(tensor) for name, tensor in state.items()}, older / "model.pth")
    return checkpoint, base


def _model_config(head_outputs: int) -> dict[str, object]:
    """The keys of the public model_config.json that say something about inference."""
    return {
        "data_config": {
            "meta_data": "train.csv",
            "data_dir": "videos",
            "max_frame_pixels": 200704,
            "num_frames": None,
            "fps": 2.0,
            "eval_dim": ["VQ", "MQ", "TA"],
            "prompt_template_type": "detailed_special",
            "sample_type": "uniform",
        },
        "training_args": {"learning_rate": 2e-6},
        "model_config": {
            "model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct",
            "output_dim": head_outputs,
            "use_special_tokens": True,
            "freeze_vision_tower": False,
            "reward_token": "special",
        },
        "peft_lora_config": {
            "lora_enable": True,
            "vision_lora": False,
            "lora_r": LORA_RANK,
            "lora_alpha": LORA_ALPHA,
            "lora_dropout": 0.05,
            "lora_namespan_exclude": ["lm_head", "rm_head", "embed_tokens", "visual"],
            "use_rslora": False,
        },
        "inference_config": NORMALISATION,
    }


def _write_base_model(folder: Path) -> None:
    """Config and tokenizer, with the file names of Qwen2-VL-2B-Instruct."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Without a progress bar, and from the longest text that the model will read, so that sequences stay short.
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
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
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")

    token_id = {token: NUM_TEXT_TOKENS + i for i, token in enumerate(BASE_TOKENS)}
    language = _language_weights()
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": language["model.embed_tokens.weight"].shape[0],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": True,
        "bos_token_id": token_id["<|endoftext|>"],
        "eos_token_id": token_id["<|im_end|>"],
        "vision_start_token_id": token_id["<|vision_start|>"],
        "vision_end_token_id": token_id["<|vision_end|>"],
        "image_token_id": token_id["<|image_pad|>"],
        "video_token_id": token_id["<|video_pad|>"],
        "vision_config": {
            "depth": VISION_BLOCKS,
            "embed_dim": VISION_WIDTH,
            "hidden_size": HIDDEN,
            "mlp_ratio": 4,
            "num_heads": VISION_HEADS,
            "in_chans": 3,
            "spatial_patch_size": 14,
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _random(seed: str, shape: tuple[int, ...], scale: float | None = None, mean: float = 0.0) -> Tensor:
    """Normal numbers; without a scale, one that keeps a product with a vector of unit entries at unit size."""
    if scale is None:
        scale = float(np.prod(shape[1:])) ** -0.5
    generator = np.random.RandomState(zlib.crc32(seed.encode()))
    return torch.from_numpy(generator.standard_normal(shape) * scale + mean).float()


def _linear(name: str, outputs: int, inputs: int, bias: bool, seed: str = "") -> dict[str, Tensor]:
    weights = {f"{name}.weight": _random(f"{seed}{name}.weight", (outputs, inputs))}
    return weights | ({f"{name}.bias": _random(f"{seed}{name}.bias", (outputs,), 0.1)} if bias else {})


def _norm(name: str, width: int, bias: bool, seed: str = "") -> dict[str, Tensor]:
    weights = {f"{name}.weight": _random(f"{seed}{name}.weight", (width,), 0.1, mean=1.0)}
    return weights | ({f"{name}.bias": _random(f"{seed}{name}.bias", (width,), 0.1)} if bias else {})


def _adapted_linears() -> dict[str, tuple[int, int, bool]]:
    """Linears of the language model that LoRA adapts: name -> (outputs, inputs, has a bias)."""
    kv_width = KV_HEADS * (HIDDEN // HEADS)
    linears = {}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        linears[f"{attention}.q_proj"] = (HIDDEN, HIDDEN, True)
        linears[f"{attention}.k_proj"] = (kv_width, HIDDEN, True)
        linears[f"{attention}.v_proj"] = (kv_width, HIDDEN, True)
        linears[f"{attention}.o_proj"] = (HIDDEN, HIDDEN, False)
        linears[f"{mlp}.gate_proj"] = (INTERMEDIATE, HIDDEN, False)
        linears[f"{mlp}.up_proj"] = (INTERMEDIATE, HIDDEN, False)
        linears[f"{mlp}.down_proj"] = (HIDDEN, INTERMEDIATE, False)
    return linears


def _lora_weights() -> dict[str, Tensor]:
    weights = {}
    for name, (outputs, inputs, _) in _adapted_linears().items():
        weights[f"{name}.lora_A"] = _random(f"{name}.lora_A", (LORA_RANK, inputs))
        weights[f"{name}.lora_B"] = _random(f"{name}.lora_B", (outputs, LORA_RANK), 0.2)
    return weights


def _language_weights() -> dict[str, Tensor]:
    rows = NUM_TEXT_TOKENS + len(BASE_TOKENS) + UNUSED_ROWS
    weights = {"model.embed_tokens.weight": _random("embed_tokens", (rows, HIDDEN), 1.0)}
    for name, (outputs, inputs, bias) in _adapted_linears().items():
        weights |= _linear(name, outputs, inputs, bias)
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights |= _norm(f"model.layers.{layer}.{norm}", HIDDEN, bias=False)
    return weights | _norm("model.norm", HIDDEN, bias=False)


def _visual_weights(seed: str) -> dict[str, Tensor]:
    """`seed` tells the tuned tower of the checkpoint from the base model's."""
    width, merged = VISION_WIDTH, 4 * VISION_WIDTH
    patches = _random(f"{seed}visual.patch_embed", (width, *PATCH_ELEMENTS))
    weights = {"visual.patch_embed.proj.weight": patches}
    for index in range(VISION_BLOCKS):
        block = f"visual.blocks.{index}"
        weights |= _norm(f"{block}.norm1", width, True, seed) | _norm(f"{block}.norm2", width, True, seed)
        weights |= _linear(f"{block}.attn.qkv", 3 * width, width, True, seed)
        weights |= _linear(f"{block}.attn.proj", width, width, True, seed)
        weights |= _linear(f"{block}.mlp.fc1", 4 * width, width, True, seed)
        weights |= _linear(f"{block}.mlp.fc2", width, 4 * width, True, seed)
    weights |= _norm("visual.merger.ln_q", width, True, seed)
    weights |= _linear("visual.merger.mlp.0", merged, merged, True, seed)
    return weights | _linear("visual.merger.mlp.2", HIDDEN, merged, True, seed)
