"""The official `ckpts/` folder of HunyuanVideo-1.5, converted once to what diffusers loads.

    ckpts/transformer/480p_t2v/{config.json, diffusion_pytorch_model*.safetensors}    and 720p_t2v, ...
    ckpts/vae/{config.json, diffusion_pytorch_model.safetensors}
    ckpts/text_encoder/llm/                 Qwen/Qwen2.5-VL-7B-Instruct, used as it is
    ckpts/text_encoder/byt5-small/          configuration and tokenizer of google/byt5-small
    ckpts/text_encoder/Glyph-SDXL-v2/       weights of the glyph encoder and the annotations that are its special tokens

Facts: the official repository's pipeline and `load_glyph_byT5_v2`; diffusers' convert_hunyuan_video1_5_to_diffusers.py.
Weights are renamed (`layouts.py`), the refiner's fused projection is taken apart, and the final modulation's halves
change places; no value is altered and no data type changes.

A conversion writes whole files only, shards naming the source they came from, and the marker `conversion.json` last. An
interrupted one goes on with the first file that is missing. Nodes that share the cache may convert at the same time,
also where files cannot be locked.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from sage_fast.config.files import exclusive, fingerprint, replacing, write_text
from sage_fast.models.hunyuan15.layouts import TARGET_SIZE, Recipe, transformer_recipes

logger = logging.getLogger(__name__)

MARKER = "conversion.json"
VERSION = 1
"""Part of every fingerprint; raised when the conversion changes."""

_SHARD_BYTES = 4 * 2**30
_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


_VAE_RULES: Sequence[tuple[str, str]] = (
    (r"(encoder|decoder)\.(conv_in\.conv|conv_out\.conv|norm_out)", r"\1.\2"),
    (r"(encoder|decoder)\.mid\.attn_1\.([qkv])", r"\1.mid_block.attentions.0.to_\2"),
    (r"(encoder|decoder)\.mid\.attn_1\.(norm|proj_out)", r"\1.mid_block.attentions.0.\2"),
    (r"(encoder|decoder)\.mid\.block_1\.(.+)", r"\1.mid_block.resnets.0.\2"),
    (r"(encoder|decoder)\.mid\.block_2\.(.+)", r"\1.mid_block.resnets.1.\2"),
    (r"encoder\.down\.(\d+)\.block\.(\d+)\.(.+)", r"encoder.down_blocks.\1.resnets.\2.\3"),
    (r"encoder\.down\.(\d+)\.downsample\.conv\.conv", r"encoder.down_blocks.\1.downsamplers.0.conv.conv"),
    (r"decoder\.up\.(\d+)\.block\.(\d+)\.(.+)", r"decoder.up_blocks.\1.resnets.\2.\3"),
    (r"decoder\.up\.(\d+)\.upsample\.conv\.conv", r"decoder.up_blocks.\1.upsamplers.0.conv.conv"),
)


def vae_recipes(names: Sequence[str]) -> dict[str, Recipe]:
    """Recipes by diffusers' name for the official names of a VAE. ValueError for a name it does not know."""
    recipes = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        rules = [(p, r) for p, r in _VAE_RULES if re.fullmatch(p, module)]
        if not rules:
            raise ValueError(f"{name} is no tensor of HunyuanVideo-1.5")
        recipes[f"{re.sub(*rules[0], module)}.{kind}"] = Recipe(name)
    return recipes


def transformer_config(official: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """diffusers' configuration of an official transformer.

    Args:
        official: its config.json.
        shapes: its tensors' shapes by official name, for what the configuration does not say.
    """
    refiners = {n.split(".")[3] for n in shapes if n.startswith("txt_in.individual_token_refiner.blocks.")}
    channels = int(official["in_channels"])
    patch = list(official["patch_size"])
    return {
        # Latents, condition latents and a mask are concatenated.
        "in_channels": 2 * channels + 1 if official.get("concat_condition", True) else channels,
        "out_channels": int(official["out_channels"]),
        "num_attention_heads": int(official["heads_num"]),
        "attention_head_dim": int(official["hidden_size"]) // int(official["heads_num"]),
        "num_layers": int(official["mm_double_blocks_depth"]),
        "num_refiner_layers": len(refiners),
        "mlp_ratio": float(official["mlp_width_ratio"]),
        "patch_size": patch[1],
        "patch_size_t": patch[0],
        "qk_norm": "rms_norm",
        "text_embed_dim": int(official["text_states_dim"]),
        "text_embed_2_dim": int(shapes["byt5_in.layernorm.weight"][0]),
        "image_embed_dim": int(official["vision_states_dim"]),
        "rope_theta": float(official["rope_theta"]),
        "rope_axes_dim": list(official["rope_dim_list"]),
        "target_size": TARGET_SIZE[str(official["ideal_resolution"])],
        "task_type": "t2v",
        "use_meanflow": False,
    }


def vae_config(official: Mapping[str, Any]) -> dict[str, Any]:
    """diffusers' configuration of the official VAE. ValueError for one that shifts its latents."""
    if official.get("shift_factor"):
        raise ValueError(f"the VAE has a shift_factor of {official['shift_factor']}, which HunyuanVideo-1.5's has not")
    return {
        "in_channels": int(official["in_channels"]),
        "out_channels": int(official["out_channels"]),
        "latent_channels": int(official["latent_channels"]),
        "block_out_channels": list(official["block_out_channels"]),
        "layers_per_block": int(official["layers_per_block"]),
        "spatial_compression_ratio": int(official["ffactor_spatial"]),
        "temporal_compression_ratio": int(official["ffactor_temporal"]),
        "downsample_match_channel": bool(official["downsample_match_channel"]),
        "upsample_match_channel": bool(official["upsample_match_channel"]),
        "scaling_factor": float(official["scaling_factor"]),
    }


def convert_transformer(source: Path, target: Path, shard_bytes: int = _SHARD_BYTES) -> Path:
    """The folder `target` with diffusers' form of the official transformer in `source`; ready when it is there already.

    ValueError when the files are not a HunyuanVideo-1.5 transformer, or do not fit on the disk.
    """
    shapes = _shapes(source)
    with _naming_missing_keys(source / "config.json"):
        config = transformer_config(read_json(source / "config.json"), shapes)
    return _convert(
        source, target, HunyuanVideo15Transformer3DModel, config, transformer_recipes, list(shapes), shard_bytes
    )


def convert_vae(source: Path, target: Path, shard_bytes: int = _SHARD_BYTES) -> Path:
    """As `convert_transformer`, for the VAE."""
    with _naming_missing_keys(source / "config.json"):
        config = vae_config(read_json(source / "config.json"))
    return _convert(
        source, target, AutoencoderKLHunyuanVideo15, config, vae_recipes, list(_shapes(source)), shard_bytes
    )


def convert_glyph_encoder(source: Path, target: Path) -> Path:
    """The folder `target` with ByT5's encoder and tokenizer, from the official `text_encoder` folder.

    The encoder is byt5-small's, with one token for each colour and font of the annotations, in the files' order, and
    the weights of Glyph-SDXL-v2.
    """
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    small, glyph = source / "byt5-small", source / "Glyph-SDXL-v2"
    weights_file = glyph / "checkpoints" / "byt5_model.pt"
    annotations = [glyph / "assets" / name for name in ("color_idx.json", "multilingual_10-lang_idx.json")]
    identity = (
        f"{VERSION}-{fingerprint([small / 'config.json', small / 'tokenizer_config.json', *annotations, weights_file])}"
    )
    with exclusive(target.parent) as alone:
        if _is_current(target, identity):
            return target
        logger.info("Converting the glyph encoder in %s, once, to %s.", source, target)
        tokenizer = ByT5Tokenizer.from_pretrained(small)
        colors, fonts = (read_json(path) for path in annotations)
        tokens = [f"<color-{index}>" for index in range(len(colors))]
        tokens += [f"<{code[:2]}-font-{index}>" for code, index in fonts.items()]
        tokenizer.add_tokens(tokens, special_tokens=True)
        config = T5Config.from_pretrained(small)
        config.vocab_size = len(tokenizer)
        # Its random initial weights are replaced; they must not move the run's random numbers.
        with torch.random.fork_rng(devices=[]):
            encoder = T5EncoderModel(config)
        state = torch.load(weights_file, map_location="cpu", weights_only=True)
        if "state_dict" in state:
            prefix = "module.text_tower.encoder."
            state = {n.removeprefix(prefix): v for n, v in state["state_dict"].items() if n.startswith(prefix)}
        try:
            encoder.encoder.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(
                f"{weights_file} does not fit {small / 'config.json'} and {annotations}: {error}"
            ) from error
        prefix, suffix = f".{target.name}.", ".partial"
        if alone:
            # What a killed process left behind.
            for folder in target.parent.glob(f"{prefix}*{suffix}"):
                shutil.rmtree(folder)
        target.mkdir(exist_ok=True)
        with TemporaryDirectory(prefix=prefix, suffix=suffix, dir=target.parent) as partial:
            encoder.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            for path in Path(partial).iterdir():
                path.replace(target / path.name)
        _mark(target, identity)
    return target


# ---------------------------------------------------------------------------------------------- the conversion itself


def _convert(
    source: Path,
    target: Path,
    model_class: Any,
    config: Mapping[str, Any],
    recipes_of: Callable[[Sequence[str]], dict[str, Recipe]],
    names: Sequence[str],
    shard_bytes: int,
) -> Path:
    identity = f"{VERSION}-{shard_bytes}-{fingerprint([source / 'config.json', *_weight_files(source)])}"
    with exclusive(target.parent) as alone:
        if _is_current(target, identity):
            return target
        try:
            recipes = recipes_of(names)
            with torch.device("meta"):
                expected = model_class(**config).state_dict()
        except ValueError as error:
            raise ValueError(f"{source} cannot be converted: {error}.") from error
        missing, unknown = expected.keys() - recipes.keys(), recipes.keys() - expected.keys()
        if missing or unknown:
            raise ValueError(
                f"{source} cannot be converted: its weights do not fit its config.json; missing {sorted(missing)[:3]}, "
                f"unexpected {sorted(unknown)[:3]}."
            )
        _write_shards(source, target, recipes, expected, identity, shard_bytes, alone)
        settings = {"_class_name": model_class.__name__, "_diffusers_version": "0.36.0", **config}
        _write_json(target / "config.json", settings)
        _mark(target, identity)
    return target


def _write_shards(
    source: Path,
    target: Path,
    recipes: Mapping[str, Recipe],
    expected: Mapping[str, Tensor],
    identity: str,
    shard_bytes: int,
    alone: bool,
) -> None:
    """Write the weights and their index; shards of the same source that are there already are kept.

    Args:
        alone: whether no other process may be writing the same.
    """
    files: dict[str, Any] = {}
    for path in _weight_files(source):
        opened = safe_open(path, framework="pt")
        files |= dict.fromkeys(opened.keys(), opened)
    shards: list[list[str]] = [[]]
    total = filled = 0
    for name in expected:
        size = (
            expected[name].numel()
            * _ITEM_BYTES[files[recipes[name].source].get_slice(recipes[name].source).get_dtype()]
        )
        if filled and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
        total += size
    paths = [
        target / f"diffusion_pytorch_model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    todo = [(path, names) for path, names in zip(paths, shards, strict=True) if _source_of(path) != identity]
    target.mkdir(parents=True, exist_ok=True)
    # Of another source, or half-written by a process that was killed.
    for path in target.iterdir():
        if path not in paths and (alone or path.suffix == ".safetensors"):
            path.unlink()
    free, needed = shutil.disk_usage(target).free, total * len(todo) // len(shards)
    if free < needed:
        raise ValueError(
            f"Converting {source} needs {needed / 2**30:.1f} GiB in {target}, where {free / 2**30:.1f} GiB are free. "
            "Make room, or set model.cache_dir to a folder on another disk."
        )
    logger.info("Converting %s (%.1f GiB), once, to %s.", source, total / 2**30, target)
    for path, names in tqdm(todo, desc="converting", unit="file", disable=None):
        tensors = {}
        for name in names:
            recipe = recipes[name]
            tensor = files[recipe.source].get_tensor(recipe.source)
            tensors[name] = (recipe.change(tensor) if recipe.change else tensor).contiguous()
            if tensors[name].shape != expected[name].shape:
                raise ValueError(
                    f"{source} cannot be converted: {recipe.source} has shape {tuple(tensor.shape)}, and {name} needs "
                    f"{tuple(expected[name].shape)}. Its config.json belongs to other weights."
                )
        with replacing(path) as partial:
            save_file(tensors, partial, metadata={"format": "pt", "source": identity})
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: path.name for path, names in zip(paths, shards, strict=True) for name in names},
    }
    _write_json(target / "diffusion_pytorch_model.safetensors.index.json", index)


def _source_of(shard: Path) -> str | None:
    """Which source a converted file came from; None when it is missing or damaged."""
    if not shard.is_file():
        return None
    try:
        with safe_open(shard, framework="pt") as file:
            return (file.metadata() or {}).get("source")
    except SafetensorError:
        return None


def _is_current(target: Path, identity: str) -> bool:
    """Whether a finished conversion of this source is in the folder."""
    marker = target / MARKER
    if not marker.is_file():
        return False
    tree = read_json(marker)
    return tree.get("source") == identity and all(
        (target / name).is_file() and (target / name).stat().st_size == size for name, size in tree["files"].items()
    )


def _mark(target: Path, identity: str) -> None:
    # Temporary files belong to another process, which may be converting the same model.
    finished = [path for path in sorted(target.iterdir()) if path.name != MARKER and path.suffix != ".partial"]
    files = {path.name: path.stat().st_size for path in finished}
    _write_json(target / MARKER, {"source": identity, "files": files})


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of the tensors of a folder's files, by name."""
    shapes: dict[str, list[int]] = {}
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes


@contextmanager
def _naming_missing_keys(file: Path) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{file} has no entry {error}: it does not describe a part of HunyuanVideo-1.5.") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint. ValueError names one that is damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Download it again.") from error


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(tree, indent=1))
