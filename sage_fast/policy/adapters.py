"""LoRA adapters from files: one reader of every layout that people have, with the scale
that each layer has in it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig as PeftLoraConfig
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from sage_fast.config.files import loads
from sage_fast.config.sections import LoraConfig, ModelConfig
from sage_fast.distributed.engine import check_same_shapes, shapes_of
from sage_fast.models.family import Components, ModelFamily, family_of, open_components
from sage_fast.models.stored import open_weights
from sage_fast.models.transformer import is_dead
from sage_fast.policy.lora import (
    ADAPTER_FILE,
    has_adapter,
    make_trainable,
    trainable_parameters,
)

PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"

LAYOUTS = {
    "peft": r"base_model\.model\.",
    "musubi-tuner": r"lora_unet_",
    "comfyui": r"((model\.)?diffusion_model\.)?double_blocks\.\d+\.\w+_(attn\.|mod\.lin\.|mlp\.\d)",
    "official": r"(\w+\.)*double_blocks\.",
    "diffusers": r"(\w+\.)*transformer_blocks\.",
}
"""Layouts that are read -> how their keys begin; the first that fits."""

MERGE = (
    "Merge it into the transformer with the program that trained it, and give that by "
    "model.path."
)
BESIDE = r"\.(lora_B|lora_up)(\.\w+)?\.bias|\.diff(_[bm])?$"
"""In keys of what is added beside the matrices; files that save steps have many of
zeros.
"""
FOREIGN = {
    r"\.hada_": ("LoHa (LyCORIS), products of two low-rank matrices", MERGE),
    r"\.lokr_": ("LoKr (LyCORIS), Kronecker products", MERGE),
    r"\.dora_scale|\.lora_magnitude_vector": (
        "DoRA, which also scales whole columns",
        MERGE,
    ),
    r"\.lora_mid": ("LoCon with a Tucker core (LyCORIS)", MERGE),
    r"\.oft_|\.boft_": ("OFT, a rotation of the weights", MERGE),
    BESIDE: ("LoRA with whole weights or biases beside it, which are not zero", MERGE),
    r"^(lora_te|text_encoder)": (
        "of a text encoder, which is not trained here",
        "Delete these keys from the file.",
    ),
}
"""Pattern in a key -> the layout that it tells of, and how to come to one that is read.
"""

LARGEST = 65504.0
"""Of float16. No training comes near it."""

KEY = re.compile(
    r"(base_model\.model\.)?(transformer\.|(model\.)?diffusion_model\.|lora_unet__?|lora_transformer_|unet\.|pipe\.dit\.)?"
    r"(?P<layer>.+?)\.(lora[_.](?P<half>A|B|down|up)(\.default)?\.weight|(?P<alpha>alpha))"
)

NEUTRAL_FIELDS = re.compile(
    "r|lora_alpha|use_rslora|rank_pattern|alpha_pattern|task_type|auto_mapping|peft_version|base_model_name_or_path|"
    "revision|inference_mode|target_modules|exclude_modules|layers_to_transform|layers_pattern|lora_dropout|"
    "fan_in_fan_out|megatron_config|megatron_core|qalora_group_size|runtime_config|ensure_weight_tying|loftq_config|"
    "eva_config|corda_config|lora_ga_config"
)
"""peft's fields that are read, or leave the computed product as it is, whatever they
hold.
"""
REPETITION = re.compile(r"(?<!\\)[*+{]")
REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
"""Of a pattern of layers."""

NEUTRAL_VALUES = {
    "peft_type": '"LORA"',
    "bias": '"none"',
    # the others change the base weights
    "init_lora_weights": 'true|false|"(gaussian|orthogonal|eva)"',
}
"""Of other fields, the JSON that leaves it so; of all the rest, what stands for
nothing.
"""


class Pair(NamedTuple):
    """The adapter of a linear layer, which adds scale * b @ a to its weight.

    a: (rank, in) float32. b: (out, rank) float32. scale: alpha / rank, as the file
    defines it.

    Example: `Pair(torch.zeros(2, 24), torch.zeros(24, 2), 1.0)`
    """

    a: Tensor
    b: Tensor
    scale: float


def adapter_files(path: Path) -> list[Path]:
    """The .safetensors file of an adapter, and peft's configuration with its scale
    where that lies beside it.

    ValueError when there is none. path: the adapter's folder, or the file itself.
    """
    file = path
    if path.is_dir():
        files = (
            sorted(path.glob("*.safetensors"))
            or sorted(path.glob("*.bin"))
            or sorted(path.glob("*.pt"))
        )
        usual = [file for file in files if file.name in (ADAPTER_FILE, PEFT_FILE)]
        if len(files) > 1 and len(usual) != 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(
                f"{path} holds {len(files)} .safetensors files ({names}). Give the "
                "path of one of them."
            )
        file = [*usual, *files, path / ADAPTER_FILE][0]
    if not file.is_file():
        raise ValueError(
            f"There is no adapter {file}. Give a folder that `sage-fast export` or "
            "peft wrote, the lora/ folder of a "
            "checkpoint, or a .safetensors file."
        )
    if file.suffix != ".safetensors":
        raise ValueError(
            f"{file} is in the format {file.suffix or 'of no extension'!r}, and "
            "adapters are read from .safetensors "
            "alone, because loading a pickle can run code. Convert it where you trust "
            "it: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
            "'adapter.safetensors')."
        )
    beside = file.with_name(PEFT_CONFIG)
    # diffusers' own file has peft's description in its metadata.
    return [file, beside] if file.name != ADAPTER_FILE and beside.is_file() else [file]


def read_adapter(
    path: Path, family: ModelFamily | type[ModelFamily] = ModelFamily
) -> dict[str, Pair]:
    """The pairs of a LoRA adapter by the layers' names in diffusers, from a file or
    folder of any layout in `LAYOUTS`.

    A file that states no scale has alpha = rank, as all programs take it.

    Args:
        family: of the model; without it layers keep the names of the file.

    Raises:
        ValueError: not a LoRA adapter; one of another model, of a layout that is not
            read, or that says of itself what is not understood; a layer without one of
            its matrices; numbers that no training gives. The message names the file,
            the layout and the key.
    """
    file, *beside = adapter_files(path)
    opened = open_weights(file)
    metadata = opened.metadata() or {}
    values = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  no mapping
    layouts = [
        name
        for name, keys in LAYOUTS.items()
        if any(re.match(keys, key) for key in values)
    ]
    try:
        _check_model(metadata, family)
        layers = _by_layer(values)
        fields = _peft_fields(beside, metadata)
        if "peft" in layouts and not fields and "alpha" not in metadata:
            raise ValueError(
                f"peft writes its scale into {PEFT_CONFIG}, which is not beside it. "
                "Put it there."
            )
        return _pairs(layers, fields, metadata, family.layers_named)
    except ValueError as error:
        named = f" (layout: {layouts[0]})" if layouts else ""
        raise ValueError(f"{file}{named} cannot be used: {error}") from error


def _check_model(
    metadata: Mapping[str, str], family: ModelFamily | type[ModelFamily]
) -> None:
    """ValueError where trainers' metadata names another model than the family's."""
    for key in ("modelspec.architecture", "ss_base_model_version"):
        name = metadata.get(key, "")
        if name and not re.fullmatch(
            family.architectures, re.sub(r"[^a-z0-9]", "", name.lower())
        ):
            raise ValueError(
                f"its metadata has {key} = {name!r}, which is another model. Give an "
                "adapter of this one."
            )


def _by_layer(values: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Layer's name in the file, without a prefix -> its tensors `A`, `B` and `alpha`.
    ValueError for other keys.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in values.items():
        # Written so that NaN is among them.
        wrong = value[~(value.abs() <= LARGEST)]
        if wrong.numel():
            raise ValueError(
                f"{key!r} holds {wrong[0]:g}, as after a training that diverged. Take "
                "an earlier file."
            )
        if re.search(BESIDE, key) and not value.any():
            continue
        for pattern, (layout, advice) in FOREIGN.items():
            if re.search(pattern, key):
                raise ValueError(f"it is {layout}: {key!r}. {advice}")
        if (match := KEY.fullmatch(key)) is None:
            kind = (
                "whole weights"
                if key.endswith((".weight", ".bias"))
                else "no part of a LoRA adapter"
            )
            raise ValueError(
                f"{key!r} is {kind}. The keys of an adapter end in lora_A.weight or "
                "lora_down.weight."
            )
        part = (
            "alpha"
            if match["alpha"]
            else {"down": "A", "up": "B"}.get(match["half"], match["half"])
        )
        # diffusers' layout of an export has every tensor under two names.
        known = found.setdefault(match["layer"], {}).setdefault(part, value)
        if known is not value and not torch.equal(known, value):
            raise ValueError(
                f"it has two different {part} of {match['layer']!r}. Keep one of them."
            )
    if not found:
        raise ValueError("it is empty.")
    return found


def _peft_fields(beside: Sequence[Path], metadata: Mapping[str, str]) -> dict[str, Any]:
    """peft's description of the adapter, from diffusers' metadata or the file beside;
    empty where there is none.

    ValueError for a field that changes the model in a way that is not computed here, or
    that is not known.
    """
    text = metadata.get(LORA_ADAPTER_METADATA_KEY)
    place = LORA_ADAPTER_METADATA_KEY
    if text is None and beside:
        text = beside[0].read_text(encoding="utf-8")
        place = PEFT_CONFIG
    fields = loads(text or "{}")
    if not isinstance(fields, dict):
        raise ValueError(f"its {place} is {type(fields).__name__}, and not an object.")
    # diffusers puts the part that an adapter is for before every field.
    fields = {
        name.removeprefix("transformer."): value for name, value in fields.items()
    }
    for name, value in fields.items():
        usual = NEUTRAL_VALUES.get(name, r"null|false|\[\]|\{\}")
        if not NEUTRAL_FIELDS.fullmatch(name) and not re.fullmatch(
            usual, json.dumps(value)
        ):
            raise ValueError(
                f"its {place} has {name} = {value!r}, which is not understood. {MERGE}"
            )
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = fields.get(name)
        for pattern in patterns if isinstance(patterns, dict) else ():
            # Matched with the name of every layer: a repeated group, or many
            # repetitions, would take for ever.
            if (
                len(pattern) > 200
                or REPEATED_GROUP.search(pattern)
                or len(REPETITION.findall(pattern)) > 3
            ):
                raise ValueError(
                    f"its {place} has {name} for {pattern[:60]!r}. Name the layers "
                    "there."
                )
    return fields


def _pairs(
    layers: Mapping[str, Mapping[str, Tensor]],
    fields: Mapping[str, Any],
    metadata: Mapping[str, str],
    layers_named: Callable[[str], Sequence[str]],
) -> dict[str, Pair]:
    """Whole pairs by the layers' names in diffusers; one layer of the file may stand
    for several of them.
    """
    pairs: dict[str, Pair] = {}
    for layer, parts in layers.items():
        if missing := {"A", "B"} - parts.keys():
            raise ValueError(
                f"{layer!r} has no lora_{min(missing)}. The file was not written "
                "whole; get it again."
            )
        a = parts["A"].float()
        b = parts["B"].float()
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not len(a):
            raise ValueError(
                f"{layer!r} has lora_A of shape {tuple(a.shape)} and lora_B of shape "
                f"{tuple(b.shape)}, which are not "
                "(rank, in) and (out, rank)."
            )
        scale = _scale(layer, len(a), parts.get("alpha"), fields, metadata)
        if not 0 < abs(scale) <= LARGEST:
            raise ValueError(
                f"the scale of {layer!r}, alpha / rank, is {scale:g}. Get the file "
                "again."
            )
        names = layers_named(layer)
        if len(b) % len(names):
            raise ValueError(
                f"{layer!r} has lora_B of {len(b)} rows, which are not those of "
                f"{len(names)} layers."
            )
        for name, rows in zip(names, b.chunk(len(names)), strict=True):
            if name in pairs:
                raise ValueError(f"it has two adapters of {name}. Keep one of them.")
            # A joined layer may have other columns for every part; one without any has
            # no adapter.
            used = (
                rows.any(0)
                if len(names) > 1 and b.any()
                else torch.ones(len(a), dtype=torch.bool)
            )
            if used.any():
                pairs[name] = Pair(a[used], rows[:, used], scale)
    return pairs


def _scale(
    layer: str,
    rank: int,
    alpha: Tensor | None,
    fields: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> float:
    """alpha / rank of one layer, by the rules of who stated it."""
    try:
        stated = None if alpha is None else float(alpha) / rank
        if fields:
            fields = {"r": 8, "lora_alpha": 8, **fields}  # peft's
            ranks = fields.get("rank_pattern") or {}
            alphas = fields.get("alpha_pattern") or {}
            said = ranks.get(get_pattern_key(ranks, layer), fields["r"])
            if int(said) != rank:
                raise ValueError(
                    f"its description says rank {said} for {layer!r}, whose lora_A "
                    f"has {rank} rows."
                )
            top = float(
                alphas.get(get_pattern_key(alphas, layer), fields["lora_alpha"])
            )
            # rsLoRA divides by the root of the rank.
            scale = top / (rank**0.5 if fields.get("use_rslora") else rank)
            if stated is not None and stated != scale:
                raise ValueError(
                    f"it says two scales of {layer!r}: {stated:g} by its alpha, "
                    f"{scale:g} by peft."
                )
            return scale
        for name in {"alpha", "lora_alpha"} & metadata.keys() if stated is None else ():
            if float(metadata[name]) != float(metadata.get("rank", rank)):
                raise ValueError(
                    f"its metadata has {name} = {metadata[name]} for rank "
                    f"{metadata.get('rank', rank)}, where no "
                    "program reads it. Give each layer a key such as "
                    f"{layer + '.alpha'!r} with that number."
                )
    except (TypeError, AttributeError, OverflowError, re.error) as error:
        raise ValueError(f"the scale of {layer!r} is not a number: {error}.") from error
    return 1.0 if stated is None else stated


# ------------------------------------------------------------------------------------------
# into a transformer


@torch.no_grad()
def use_adapter(transformer: Any, path: Path) -> None:
    """Take over a LoRA adapter in float32, as it was trained, instead of the one that
    is there. Nothing is trainable.

    Args:
        path: its folder or its file, see `read_adapter`.

    Raises:
        ValueError: there is no such file, it cannot be read, or it is for another
            transformer.
    """
    pairs = read_adapter(path, family_of(transformer))
    if has_adapter(transformer):
        transformer.unload_lora()
    modules = {
        name: m for name, m in transformer.named_modules() if isinstance(m, nn.Linear)
    }
    for name, pair in pairs.items():
        if (layer := modules.get(name)) is None:
            raise ValueError(
                f"{path} adapts {name!r}, and this model has no linear layer of that "
                f"name. {MERGE}"
            )
        if (len(pair.b), pair.a.shape[1]) != layer.weight.shape:
            raise ValueError(
                f"{path} does not fit this model: its {name} has {pair.a.shape[1]} "
                f"inputs and {len(pair.b)} outputs, "
                f"and the model's has {layer.in_features} and {layer.out_features}."
            )
    most = max(len(pair.a) for pair in pairs.values())
    # peft compares a key with the end of a layer's name; `^` makes it the whole. With
    # alpha = rank everywhere the scale is 1: the pair's own is multiplied into lora_B.
    ranks: dict[str, Any] = {
        f"^{re.escape(n)}": len(pair.a)
        for n, pair in pairs.items()
        if len(pair.a) < most
    }
    transformer.add_adapter(
        PeftLoraConfig(
            r=most,
            lora_alpha=most,
            target_modules=[*pairs],
            rank_pattern=ranks,
            alpha_pattern=ranks,
        )
    )
    for name, parameter in transformer.named_parameters():
        if (match := re.fullmatch(r"(.+)\.lora_([AB])\.\w+\.weight", name)) is not None:
            pair = pairs[match[1]]
            parameter.data = (
                (pair.a if match[2] == "A" else pair.b * pair.scale)
                .contiguous()
                .to(parameter.device)
            )
    transformer.requires_grad_(False)


@torch.no_grad()
def load_adapter(transformer: Any, path: Path) -> None:
    """Start training from an adapter: copy it into the freshly added, trainable one, in
    float32.

    lora_B is divided by this run's scale (alpha / rank), so that the model is the one
    that the adapter made.

    Args:
        path: its folder or its file, see `read_adapter`.

    Raises:
        ValueError: there is no such file, it cannot be read, or its layers or rank are
            not those of this run.
    """
    own = {
        re.sub(r"\.lora_([AB])\.[^.]+\.weight$", r".lora_\1.weight", name): parameter
        for name, parameter in trainable_parameters(transformer).items()
    }
    ((_, config),) = transformer.peft_config.items()
    family = family_of(transformer)
    scale = config.lora_alpha / config.r
    values = dict[str, Tensor]()
    try:
        pairs = read_adapter(path, family)
    except ValueError as error:
        raise ValueError(f"model.adapter: {error}") from error
    # An adapter from elsewhere may have pairs that change nothing here; this run's has
    # none for these layers.
    dead = family.dead_modules(transformer)
    for name, pair in (
        (name, pair) for name, pair in pairs.items() if not is_dead(name, dead)
    ):
        if not name.startswith(f"{family.blocks}."):
            raise ValueError(
                f"model.adapter: {path} adapts {name!r}, which is outside the trained "
                f"blocks. {MERGE}"
            )
        values |= {
            f"{name}.lora_A.weight": pair.a,
            f"{name}.lora_B.weight": pair.b * (pair.scale / scale),
        }
    try:
        check_same_shapes(shapes_of(own), shapes_of(values), "adapter")
    except ValueError as error:
        raise ValueError(
            f"model.adapter: {path} does not fit this run's adapter: {error} Set "
            "lora.rank and lora.target_modules to "
            "those of the run that trained it."
        ) from error
    for name, parameter in own.items():
        parameter.copy_(values[name])


# ------------------------------------------------------------------------------------------
# the start of a run


def load_model(
    model: ModelConfig, lora: LoraConfig, *, read: bool = True
) -> Components:
    """The model that a run starts from: the weights of `model.path` in `model.dtype`,
    and `model.adapter`, trainable.

    Whatever uses a run's model loads it here, so that all of them mean the same one.

    Args:
        read: False may leave the transformer's weights on disk (`Components.weights`),
            for who puts them elsewhere than into CPU memory, or wants a digest alone.

    Raises:
        As `open_components`, `make_trainable` and `load_adapter`.
    """
    components = open_components(model)
    transformer = components.transformer
    # Before the adapter is added, whose weights stay float32.
    family_of(transformer).cast(transformer, getattr(torch, model.dtype))
    if model.adapter is not None:
        make_trainable(transformer, "lora", lora, seed=0)  # every value is replaced
        load_adapter(transformer, Path(model.adapter))
    if read and components.weights is not None:
        components.weights.read_into(transformer)
    return components
