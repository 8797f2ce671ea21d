"""A random CLIP model of a few thousand weights, in the layout of the public
checkpoints.
"""

import json
from pathlib import Path

import torch

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def build_tiny_clip(folder: Path, *, image_size: int = 24, seed: int = 0) -> Path:
    """Write config, weights, tokenizer and preprocessor_config.json to `folder`, and
    return it.

    The tokenizer is CLIP's byte-level one with 77 tokens at most and a handful of
    merges. Nothing is downloaded.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import (
        CLIPConfig,
        CLIPModel,
        CLIPTextConfig,
        CLIPTokenizer,
        CLIPVisionConfig,
    )

    folder.mkdir(parents=True, exist_ok=True)
    symbols = sorted(ByteLevel.alphabet())
    merges = [("r", "e"), ("re", "d</w>"), ("c", "a"), ("ca", "t</w>")]
    words = [*symbols, *(s + "</w>" for s in symbols), *(a + b for a, b in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer_config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    CLIPTokenizer.from_pretrained(folder).save_pretrained(folder)

    begin = vocabulary["<|startoftext|>"]
    end = vocabulary["<|endoftext|>"]
    layers = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = CLIPTextConfig(
        **layers,
        vocab_size=len(words),
        max_position_embeddings=77,
        bos_token_id=begin,
        eos_token_id=end,
    )
    vision = CLIPVisionConfig(**layers, image_size=image_size, patch_size=8)
    config = CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=12
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPModel(config)
        # CLIP's own initialisation is so narrow that all videos of a test would score
        # alike.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    preprocessing = {
        "crop_size": image_size,
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "image_mean": MEAN,
        "image_std": STD,
        "resample": 3,
        "size": image_size,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    return folder
