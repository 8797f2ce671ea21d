"""Tiny random HunyuanVideo-1.5 models in the two public layouts, so that the code that loads real weights is run.

`save_diffusers_layout` writes what `HunyuanVideo15Pipeline.save_pretrained` writes: every component of the published
repositories with its real class, a tokenizer with the chat template and special tokens of Qwen2.5-VL, and a system
prompt of 108 tokens. `save_official_layout` writes the same weights the way the official `ckpts/` folder holds them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

LATENT_CHANNELS = 4
TEXT_DIM = 32
GLYPH_DIM = 24
PREFIX_TOKENS = 108
"""Tokens of the system prompt and the start of the user's turn, which the pipeline crops."""

TRANSFORMER: dict[str, Any] = {
    "in_channels": 2 * LATENT_CHANNELS + 1,
    "out_channels": LATENT_CHANNELS,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_refiner_layers": 2,
    # The text refiner's width is the class's own 4, whatever this says.
    "mlp_ratio": 2.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": TEXT_DIM,
    "text_embed_2_dim": GLYPH_DIM,
    "image_embed_dim": 16,
    "rope_theta": 256.0,
    "rope_axes_dim": [4, 4, 4],
    "target_size": 640,
    "task_type": "t2v",
    "use_meanflow": False,
}
VAE: dict[str, Any] = {
    "latent_channels": LATENT_CHANNELS,
    "block_out_channels": [8, 8, 16, 16, 16],
    "layers_per_block": 1,
}
LANGUAGE_MODEL: dict[str, Any] = {
    "hidden_size": TEXT_DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [1, 1, 2]},
}
VISION_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": TEXT_DIM,
    "fullatt_block_indexes": [0],
}
BYT5: dict[str, Any] = {
    "d_model": GLYPH_DIM,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "dropout_rate": 0.0,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
COLORS = {"white": 0, "black": 1, "red": 2}
FONTS = {"en-Arial": 0, "cn-SimSun": 1}
"""Annotations of the glyph encoder: each becomes a special token of its tokenizer."""


def build_pipeline(*, seed: int = 0, shift: float = 5.0, guidance_scale: float = 6.0) -> HunyuanVideo15Pipeline:
    """A whole stock text-to-video pipeline, float32, on the CPU, its weights a function of `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = _chat_tokenizer()
        glyph_tokenizer = ByT5Tokenizer()
        glyph_tokenizer.add_tokens(_glyph_tokens(), special_tokens=True)
        pipeline = HunyuanVideo15Pipeline(
            text_encoder=Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(vocab_size=len(tokenizer), **LANGUAGE_MODEL)),
            tokenizer=tokenizer,
            transformer=HunyuanVideo15Transformer3DModel(**TRANSFORMER),
            vae=AutoencoderKLHunyuanVideo15(**VAE),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            text_encoder_2=T5EncoderModel(T5Config(vocab_size=len(glyph_tokenizer), **BYT5)),
            tokenizer_2=glyph_tokenizer,
            guider=ClassifierFreeGuidance(guidance_scale=guidance_scale),
        )
        for name in ("text_encoder", "transformer", "vae", "text_encoder_2"):
            _make_distinct(getattr(pipeline, name).eval())
        # Random decoders stay close to grey; this one covers the range of pixels, and goes beyond it here and there.
        pipeline.vae.decoder.conv_out.conv.weight.data *= 1.5
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_diffusers_layout(folder: Path, **options: Any) -> HunyuanVideo15Pipeline:
    """Write the layout of hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v, and return the pipeline in it.

    `options` are those of `build_pipeline`.
    """
    pipeline = build_pipeline(**options)
    pipeline.save_pretrained(folder)
    return pipeline


def save_official_layout(
    folder: Path, pipeline: HunyuanVideo15Pipeline, variant: str = "480p_t2v", **config: Any
) -> None:
    """Write a pipeline's weights as the official `ckpts/` folder holds them.

    Args:
        folder: becomes `ckpts/`; a second call with another variant adds its transformer.
        variant: name of the transformer's folder.
        config: entries of the transformer's config.json that replace the usual ones.
    """
    transformer = folder / "transformer" / variant
    transformer.mkdir(parents=True)
    save_file(official_transformer(pipeline.transformer), transformer / "diffusion_pytorch_model.safetensors")
    _write_json(transformer / "config.json", _official_transformer_config(variant) | config)
    if (folder / "vae").is_dir():
        return
    (folder / "vae").mkdir()
    save_file(official_vae(pipeline.vae), folder / "vae" / "diffusion_pytorch_model.safetensors")
    _write_json(
        folder / "vae" / "config.json",
        {
            "_class_name": "AutoencoderKLConv3D",
            "in_channels": 3,
            "out_channels": 3,
            **VAE,
            "ffactor_spatial": 16,
            "ffactor_temporal": 4,
            "sample_size": 256,
            "sample_tsize": 64,
            "scaling_factor": 1.03682,
            "shift_factor": None,
            "downsample_match_channel": True,
            "upsample_match_channel": True,
        },
    )
    _write_json(folder / "scheduler" / "scheduler_config.json", {"_class_name": "FlowMatchDiscreteScheduler"})
    _save_full_language_model(folder / "text_encoder" / "llm", pipeline)
    _save_glyph_encoder(folder / "text_encoder", pipeline.text_encoder_2)


def official_transformer(transformer: HunyuanVideo15Transformer3DModel) -> dict[str, Tensor]:
    """The weights of a transformer under the names, and in the fusions, of the official code."""
    renamed = {official_name(name): value for name, value in transformer.state_dict().items()}
    for block in range(TRANSFORMER["num_refiner_layers"]):
        prefix = f"txt_in.individual_token_refiner.blocks.{block}."
        for kind in ("weight", "bias"):
            parts = [renamed.pop(f"{prefix}attn.to_{part}.{kind}") for part in "qkv"]
            renamed[f"{prefix}self_attn_qkv.{kind}"] = torch.cat(parts)
    for kind in ("weight", "bias"):
        # diffusers' final modulation is (scale, shift), the official one (shift, scale).
        scale, shift = renamed.pop(f"norm_out.linear.{kind}").chunk(2)
        renamed[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat([shift, scale])
    return renamed


TRANSFORMER_NAMES = [
    ("context_embedder_2.linear_", "byt5_in.fc"),
    ("context_embedder_2.norm", "byt5_in.layernorm"),
    ("context_embedder.time_text_embed.timestep_embedder.linear_1", "txt_in.t_embedder.mlp.0"),
    ("context_embedder.time_text_embed.timestep_embedder.linear_2", "txt_in.t_embedder.mlp.2"),
    ("context_embedder.time_text_embed.text_embedder", "txt_in.c_embedder"),
    ("context_embedder.proj_in", "txt_in.input_embedder"),
    ("context_embedder.token_refiner.refiner_blocks.", "txt_in.individual_token_refiner.blocks."),
    ("time_embed.timestep_embedder.linear_1", "time_in.mlp.0"),
    ("time_embed.timestep_embedder.linear_2", "time_in.mlp.2"),
    ("image_embedder.norm_in", "vision_in.proj.0"),
    ("image_embedder.linear_1", "vision_in.proj.1"),
    ("image_embedder.linear_2", "vision_in.proj.3"),
    ("image_embedder.norm_out", "vision_in.proj.4"),
    ("x_embedder.proj", "img_in.proj"),
    ("cond_type_embed.", "cond_type_embedding."),
    ("proj_out.", "final_layer.linear."),
    ("transformer_blocks.", "double_blocks."),
    ("norm1_context.linear", "txt_mod.linear"),
    ("norm1.linear", "img_mod.linear"),
    ("attn.norm_added_q", "txt_attn_q_norm"),
    ("attn.norm_added_k", "txt_attn_k_norm"),
    ("attn.add_q_proj", "txt_attn_q"),
    ("attn.add_k_proj", "txt_attn_k"),
    ("attn.add_v_proj", "txt_attn_v"),
    ("attn.to_add_out", "txt_attn_proj"),
    ("ff_context.net.0.proj", "txt_mlp.fc1"),
    ("ff_context.net.2", "txt_mlp.fc2"),
]
"""(diffusers, official) parts of parameter names; what remains depends on the block it is in."""


def official_name(name: str) -> str:
    """Official name of a module or weight, apart from fusions."""
    for ours, theirs in TRANSFORMER_NAMES:
        name = name.replace(ours, theirs)
    # Names that both kinds of block use with different meanings.
    pairs: list[tuple[str, str]] = []
    if name.startswith("double_blocks."):
        pairs = [
            (".attn.norm_q", ".img_attn_q_norm"),
            (".attn.norm_k", ".img_attn_k_norm"),
            (".attn.to_q", ".img_attn_q"),
            (".attn.to_k", ".img_attn_k"),
            (".attn.to_v", ".img_attn_v"),
            (".attn.to_out.0", ".img_attn_proj"),
            (".ff.net.0.proj", ".img_mlp.fc1"),
            (".ff.net.2", ".img_mlp.fc2"),
        ]
    elif name.startswith("txt_in."):
        pairs = [
            (".attn.to_out.0", ".self_attn_proj"),
            (".ff.net.0.proj", ".mlp.fc1"),
            (".ff.net.2", ".mlp.fc2"),
            (".norm_out.linear", ".adaLN_modulation.1"),
        ]
    for ours, theirs in pairs:
        name = name.replace(ours, theirs)
    return name


def official_vae(vae: AutoencoderKLHunyuanVideo15) -> dict[str, Tensor]:
    """The weights of a VAE under the official names."""
    result = {}
    for name, value in vae.state_dict().items():
        for ours, theirs in (
            ("mid_block.resnets.0", "mid.block_1"),
            ("mid_block.resnets.1", "mid.block_2"),
            ("mid_block.attentions.0.to_", "mid.attn_1."),
            ("mid_block.attentions.0", "mid.attn_1"),
            ("down_blocks", "down"),
            ("up_blocks", "up"),
            ("downsamplers.0", "downsample"),
            ("upsamplers.0", "upsample"),
            ("resnets", "block"),
        ):
            name = name.replace(ours, theirs)
        result[name] = value
    return result


def _official_transformer_config(variant: str) -> dict[str, Any]:
    resolution, task, *_ = variant.split("_")
    return {
        "_class_name": "HunyuanVideo_1_5_DiffusionTransformer",
        "attn_mode": "flash",
        "attn_param": None,
        "concat_condition": True,
        "glyph_byT5_v2": True,
        "guidance_embed": False,
        "heads_num": TRANSFORMER["num_attention_heads"],
        "hidden_size": TRANSFORMER["num_attention_heads"] * TRANSFORMER["attention_head_dim"],
        "ideal_resolution": resolution,
        "ideal_task": task,
        "in_channels": LATENT_CHANNELS,
        "is_reshape_temporal_channels": False,
        "mlp_act_type": "gelu_tanh",
        "mlp_width_ratio": TRANSFORMER["mlp_ratio"],
        "mm_double_blocks_depth": TRANSFORMER["num_layers"],
        "mm_single_blocks_depth": 0,
        "out_channels": LATENT_CHANNELS,
        "patch_size": [1, 1, 1],
        "qk_norm": True,
        "qk_norm_type": "rms",
        "qkv_bias": True,
        "rope_dim_list": TRANSFORMER["rope_axes_dim"],
        "rope_theta": 256,
        "text_pool_type": None,
        "text_projection": "single_refiner",
        "text_states_dim": TEXT_DIM,
        "text_states_dim_2": None,
        "use_attention_mask": True,
        "use_cond_type_embedding": True,
        "use_meanflow": False,
        "vision_projection": "linear",
        "vision_states_dim": TRANSFORMER["image_embed_dim"],
    }


def _save_full_language_model(folder: Path, pipeline: HunyuanVideo15Pipeline) -> None:
    """Qwen2.5-VL as published: the language model with its vision tower and head, and the tokenizer beside it."""
    text = pipeline.text_encoder
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": text.config.vocab_size, **LANGUAGE_MODEL}, vision_config=VISION_TOWER
    )
    full = Qwen2_5_VLForConditionalGeneration(config)
    full.model.language_model.load_state_dict(text.state_dict())
    full.save_pretrained(folder)
    # The published config.json has the language model's settings beside the others, not in a section of their own.
    nested = json.loads((folder / "config.json").read_text())
    flat = {k: v for k, v in nested.pop("text_config").items() if k not in ("rope_parameters", "layer_types")}
    rope = LANGUAGE_MODEL["rope_parameters"]
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    _write_json(folder / "config.json", flat | nested | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling})
    # The published tokenizer pads on the left.
    pipeline.tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    _write_json(folder / "tokenizer_config.json", settings | {"padding_side": "left"})


def _save_glyph_encoder(folder: Path, encoder: T5EncoderModel) -> None:
    """byt5-small's configuration and tokenizer, and Glyph-SDXL-v2's annotations and weights."""
    plain = ByT5Tokenizer()
    plain.save_pretrained(folder / "byt5-small")
    _write_json(folder / "byt5-small" / "config.json", encoder.config.to_dict() | {"vocab_size": len(plain)})
    _write_json(folder / "Glyph-SDXL-v2" / "assets" / "color_idx.json", COLORS)
    _write_json(folder / "Glyph-SDXL-v2" / "assets" / "multilingual_10-lang_idx.json", FONTS)
    checkpoints = folder / "Glyph-SDXL-v2" / "checkpoints"
    checkpoints.mkdir()
    weights = {f"module.text_tower.encoder.{n}": v for n, v in encoder.encoder.state_dict().items()}
    torch.save(
        {"epoch": 1, "state_dict": weights | {"module.visual.proj": torch.zeros(2)}}, checkpoints / "byt5_model.pt"
    )


def _glyph_tokens() -> list[str]:
    colors = [f"<color-{index}>" for index in range(len(COLORS))]
    return colors + [f"<{font[:2]}-font-{index}>" for font, index in FONTS.items()]


def _chat_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE of Qwen's kind that knows the words of the system prompt, so that it is as long as the real one.

    Other words are spelled in bytes and short pieces.
    """
    system = HunyuanVideo15Pipeline._get_mllm_prompt_embeds.__defaults__[2]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator([system, "system\nuser\nassistant\n"], trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    words = dict.fromkeys([*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)])
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)}, merges=merges, padding_side="right"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[1:]})
    tokenizer.chat_template = CHAT_TEMPLATE
    prefix = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    assert len(tokenizer(prefix).input_ids) == PREFIX_TOKENS
    return tokenizer


def _make_distinct(model: nn.Module) -> None:
    """Move norm scales and biases off 1 and 0, so that one mistaken for another shows."""
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=1))


def copy_tree(source: Path, target: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(source, target))
