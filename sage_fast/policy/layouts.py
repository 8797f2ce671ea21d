"""Files of LoRA adapters: how the layouts of all programs are read, how they name the
layers of a model, and how they are written.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig as PeftLoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from torch import Tensor

from sage_fast.config.files import loads, replacing, write_text
from sage_fast.models.family import ModelFamily
from sage_fast.models.stored import open_weights
from sage_fast.policy.lora import ADAPTER_FILE, described

Layout = Literal["diffusers", "official", "comfyui", "musubi", "peft"]
"""Programs that an adapter is exported for, each with its names for the same weights.
"""

Family = ModelFamily | type[ModelFamily]

PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"

KEY = re.compile(
    r"(base_model\.model\.)?"
    r"(transformer\.|(model\.)?diffusion_model\.|lora_unet__?|lora_transformer_"
    r"|unet\.|pipe\.dit\.)?"
    r"(?P<layer>.+?)"
    r"\.(lora[_.](?P<half>A|B|down|up)(\.default)?\.weight|(?P<alpha>alpha))"
)
"""A tensor of any layout: prefixes of peft and of the program, layer, matrix or alpha.
"""

HALVES = {"A": "A", "down": "A", "B": "B", "up": "B", None: "alpha"}

MERGE = (
    "Merge it into the transformer with the program that trained it, and give that by "
    "model.path."
)
BESIDE = r"\.(lora_B|lora_up)(\.\w+)?\.bias|\.diff(_[bm])?$"
"""In keys of what is added beside the matrices; files that save steps have many of
zeros.
"""
LARGEST = 65504.0
"""Of float16. No training comes near it."""

NEUTRAL_FIELDS = {
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "inference_mode",
    "lora_dropout",
    "eva_config",
}
"""peft's fields that are read, or do not change the product, whatever they hold."""

NEUTRAL_STARTS = ("gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights`; the others change the base weights."""


class Pair(NamedTuple):
    """The adapter of a linear layer, which adds scale * b @ a to its weight.

    Attributes:
        a: (rank, in) float32.
        b: (out, rank) float32.
        scale: alpha / rank, as the file defines it.

    Example: `Pair(torch.zeros(2, 24), torch.zeros(24, 2), 1.0)`
    """

    a: Tensor
    b: Tensor
    scale: float


# --------------------------------------------------------------------------------------
# names


def layers_named(family: Family, name: str) -> list[str]:
    """The linear layers by diffusers' names that a layer of any layout stands for, in
    the order of its rows.

    Its name comes without a prefix, and with `.` or `_` between its parts. One that no
    layout has stands for itself.

    Example: `double_blocks.0.img_attn.qkv` of ComfyUI is
    `transformer_blocks.0.attn.to_q`, `to_k` and `to_v`.
    """
    flat = _flat(name)
    for own, official in family.outer_names.items():
        if flat in (_flat(own), _flat(official)):
            return [own]
    blocks = f"{family.blocks}|{family.official_blocks}"
    if match := re.fullmatch(rf"({blocks})_(\d+)_(.+)", flat):
        _, number, part = match.groups()
        layers = [
            f"{family.blocks}.{number}.{own}"
            for own, others in family.names.items()
            if part in map(_flat, (own, *others))
        ]
        if layers:
            return layers
    return [name]


def _flat(name: str) -> str:
    return name.replace(".", "_")


def renamed(
    family: Family, pairs: Mapping[str, Pair], layout: Layout
) -> dict[str, Tensor]:
    """A LoRA adapter by the names of a layout, with its scale in lora_B.

    diffusers' has every tensor twice, for `load_lora_adapter` with its default prefix
    and with prefix=None.
    """
    adapter: dict[str, Tensor] = {}
    for module, pair in pairs.items():
        down = pair.a
        up = pair.b * pair.scale
        if layout == "diffusers":
            adapter |= _halves(module, down, up)
            adapter |= _halves(f"transformer.{module}", down.clone(), up.clone())
            continue
        if layout == "peft":
            adapter |= _halves(f"base_model.model.{module}", down, up)
            continue
        _, number, layer = module.split(".", 2)
        official, comfyui = family.names[layer]
        block = f"{family.official_blocks}.{number}"
        if layout == "official":
            adapter |= _halves(f"{block}.{official}", down, up)
        elif layout == "musubi":
            name = f"lora_unet_{_flat(f'{block}.{official}')}"
            adapter[f"{name}.lora_down.weight"] = down
            adapter[f"{name}.lora_up.weight"] = up
            # alpha = rank is a scale of 1.
            adapter[f"{name}.alpha"] = torch.tensor(float(len(down)))
        else:
            name = f"diffusion_model.{block}.{comfyui}"
            joined = [
                own for own, others in family.names.items() if others[1] == comfyui
            ]
            # The joined layer's rank is the sum of its parts' ranks: each has its own
            # rows and columns of lora_B.
            rows = up.new_zeros(len(joined), *up.shape)
            rows[joined.index(layer)] = up
            up = rows.flatten(0, 1)
            if f"{name}.lora_A.weight" in adapter:
                down = torch.cat([adapter[f"{name}.lora_A.weight"], down])
                up = torch.cat([adapter[f"{name}.lora_B.weight"], up], dim=1)
            adapter |= _halves(name, down, up)
    return adapter


def _halves(name: str, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}


# --------------------------------------------------------------------------------------
# write


def write_adapter(
    folder: Path,
    family: Family,
    pairs: Mapping[str, Pair],
    layout: Layout,
    rank: int,
    base: str,
) -> None:
    """Write an adapter for the programs of a layout, that of each expert to a file, with
    peft's description where they need one.

    Args:
        base: the base model's name in its metadata.
    """
    # The scale is in lora_B, so alpha is the rank: alpha / rank, which other programs
    # multiply by, is 1.
    # Without diffusers' own key: it reads the tensors by either prefix, and would take
    # the key's fields by one alone.
    about = {"format": "pt", "rank": str(rank), "alpha": str(rank), "base_model": base}
    for expert, file in zip(family.experts, file_names(layout, family), strict=True):
        own = {n.removeprefix(expert): pairs[n] for n in pairs if n.startswith(expert)}
        with replacing(folder / file) as partial:
            save_file(renamed(family, own, layout), partial, metadata=about)
    if layout == "peft":
        config = PeftLoraConfig(
            r=rank,
            lora_alpha=rank,
            target_modules=sorted(pairs),
            inference_mode=True,
            base_model_name_or_path=base,
        )
        write_text(folder / PEFT_CONFIG, described(config) + "\n")


def file_names(layout: Layout, family: Family) -> list[str]:
    """Name of an adapter's file, as the programs of its layout look for it; or the names
    of each expert's.
    """
    usual = PEFT_FILE if layout == "peft" else ADAPTER_FILE
    return [f"{e}safetensors" if e else usual for e in family.experts]


# --------------------------------------------------------------------------------------
# read


def adapter_files(path: Path) -> list[Path]:
    """The .safetensors file of an adapter, and peft's configuration with its scale
    where that lies beside it; or two files with `high` and `low` in their names.

    ValueError when there is none. path: the adapter's folder, or the file itself.
    """
    file = path
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
        usual = [file for file in files if file.name in (ADAPTER_FILE, PEFT_FILE)]
        if len(usual) == 1:
            files = usual
        if len(files) == 2 and "high" in files[0].name and "low" in files[1].name:
            return files
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(
                f"{path} holds {len(files)} files of adapters ({names}). Give the "
                "path of one of them."
            )
        file = files[0] if files else path / ADAPTER_FILE
    if not file.is_file():
        raise ValueError(
            f"There is no adapter {file}. Give a .safetensors file, a folder that "
            "`sage-fast export` or peft wrote, or the lora/ folder of a checkpoint."
        )
    if file.suffix != ".safetensors":
        raise ValueError(
            f"{file} ends in {file.suffix!r}, and adapters are read from .safetensors "
            "alone: loading a pickle can run code. Convert it where you trust it: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
            "'adapter.safetensors')."
        )
    beside = file.with_name(PEFT_CONFIG)
    # diffusers' own file has peft's description in its metadata.
    return [file, beside] if file.name != ADAPTER_FILE and beside.is_file() else [file]


def read_adapter(path: Path, family: Family) -> dict[str, Pair]:
    """The pairs of a LoRA adapter by the layers' names in diffusers, from a file or
    folder of any layout; for two experts from a folder with both files.

    A file that states no scale has alpha = rank, as all programs take it.

    Raises:
        ValueError: not a LoRA adapter; one of another model, of a layout that is not
            read, or that says of itself what is not understood; a layer without one of
            its matrices; numbers that no training gives. The message names the file
            and the key.
    """
    files = [file for file in adapter_files(path) if file.name != PEFT_CONFIG]
    # A checkpoint has both experts in one file, by names that begin with the expert's.
    experts = family.experts if len(files) == len(family.experts) else [""] * len(files)
    pairs = {
        f"{expert}{name}": pair
        for expert, file in zip(experts, files, strict=True)
        for name, pair in _read(file, family).items()
    }
    own = [any(name.startswith(expert) for name in pairs) for expert in family.experts]
    if len(files) > len(own) or not all(own):
        raise ValueError(
            f"{path} is for {len(files)} transformer(s), and this model is {len(own)}. "
            "Give a file, or for two a folder with files named high... and low..."
        )
    return pairs


def _read(path: Path, family: Family) -> dict[str, Pair]:
    """The pairs of a file, see `read_adapter`."""
    file, *beside = adapter_files(path)
    opened = open_weights(file)
    metadata = opened.metadata() or {}
    values = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  no mapping
    try:
        for key in ("modelspec.architecture", "ss_base_model_version"):
            name = metadata.get(key, "")
            plain = re.sub(r"[^a-z0-9]", "", name.lower())
            if name and not re.fullmatch(family.architectures, plain):
                raise ValueError(
                    f"its metadata has {key} = {name!r}, which is another model. Give "
                    "an adapter of this one."
                )
        layers = _by_layer(values)
        text = metadata.get(LORA_ADAPTER_METADATA_KEY)
        if text is None and beside:
            text = beside[0].read_text(encoding="utf-8")
        fields = _peft_fields(text or "{}")
        of_peft = any(key.startswith("base_model.model.") for key in values)
        if of_peft and not fields and "alpha" not in metadata:
            raise ValueError(
                f"peft writes its scale into {PEFT_CONFIG}, which is not beside it. "
                "Put it there."
            )
        pairs: dict[str, Pair] = {}
        for layer, parts in layers.items():
            for name, pair in _split(family, layer, parts, fields, metadata).items():
                if name in pairs:
                    raise ValueError(
                        f"it has two adapters of {name}. Keep one of them."
                    )
                pairs[name] = pair
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
    return pairs


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
        if key.startswith(("lora_te", "text_encoder")):
            raise ValueError(
                f"{key!r} is of a text encoder, which is not trained here. Delete "
                "these keys from the file."
            )
        match = KEY.fullmatch(key)
        if match is None:
            raise ValueError(
                f"{key!r} is not a part of a LoRA adapter, whose keys end in "
                f"lora_A.weight or lora_down.weight. {MERGE}"
            )
        part = HALVES[match["half"]]
        # diffusers' layout of an export has every tensor under two names.
        known = found.setdefault(match["layer"], {}).setdefault(part, value)
        if known is not value and not torch.equal(known, value):
            raise ValueError(
                f"it has two different {part} of {match['layer']!r}. Keep one of them."
            )
    if not found:
        raise ValueError("it is empty.")
    return found


def _peft_fields(text: str) -> dict[str, Any]:
    """peft's description of an adapter, with its defaults; empty where it is empty.

    ValueError for a field that changes the model in a way that is not computed here, or
    that is not known.
    """
    stored = loads(text)
    if not isinstance(stored, dict):
        raise ValueError(f"its description is {type(stored).__name__}, not an object.")
    if not stored:
        return {}
    fields = PeftLoraConfig().to_dict()
    for key, value in stored.items():
        # diffusers puts the part that an adapter is for before every field.
        name = key.removeprefix("transformer.")
        neutral = [None, [], {}, fields.get(name)]
        if name == "init_lora_weights":
            neutral += NEUTRAL_STARTS
        if name not in NEUTRAL_FIELDS and value is not False and value not in neutral:
            raise ValueError(
                f"its description has {name} = {value!r}, which is not understood. "
                f"{MERGE}"
            )
        fields[name] = value
    return fields


def _split(
    family: Family,
    layer: str,
    parts: Mapping[str, Tensor],
    fields: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> dict[str, Pair]:
    """The pairs of a layer of the file by the layers' names in diffusers; it may stand
    for several of them.
    """
    if missing := {"A", "B"} - parts.keys():
        raise ValueError(
            f"{layer!r} has no lora_{min(missing)}. The file was not written whole; "
            "get it again."
        )
    a = parts["A"].float()
    b = parts["B"].float()
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not len(a):
        raise ValueError(
            f"{layer!r} has lora_A of shape {tuple(a.shape)} and lora_B of shape "
            f"{tuple(b.shape)}, which are not (rank, in) and (out, rank)."
        )
    try:
        scale = _scale(layer, len(a), parts.get("alpha"), fields, metadata)
    except (TypeError, AttributeError, OverflowError, re.error) as error:
        raise ValueError(f"the scale of {layer!r} is not a number: {error}.") from error
    if not 0 < abs(scale) <= LARGEST:
        raise ValueError(
            f"the scale of {layer!r}, alpha / rank, is {scale:g}. Get the file again."
        )
    names = layers_named(family, layer)
    if len(b) % len(names):
        raise ValueError(
            f"{layer!r} has lora_B of {len(b)} rows, which are not those of "
            f"{len(names)} layers."
        )
    joined = len(names) > 1 and b.any()
    pairs = {}
    for name, rows in zip(names, b.chunk(len(names)), strict=True):
        # A joined layer may have other columns for every part; one without any has no
        # adapter.
        used = rows.any(0)
        if not joined:
            pairs[name] = Pair(a, rows, scale)
        elif used.any():
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
    stated = None if alpha is None else float(alpha) / rank
    if fields:
        ranks = fields["rank_pattern"] or {}
        alphas = fields["alpha_pattern"] or {}
        said = ranks.get(get_pattern_key(ranks, layer), fields["r"])
        if int(said) != rank:
            raise ValueError(
                f"its description says rank {said} for {layer!r}, whose lora_A has "
                f"{rank} rows."
            )
        top = float(alphas.get(get_pattern_key(alphas, layer), fields["lora_alpha"]))
        # rsLoRA divides by the root of the rank.
        scale = top / (rank**0.5 if fields["use_rslora"] else rank)
        if stated is not None and stated != scale:
            raise ValueError(
                f"it says two scales of {layer!r}: {stated:g} by its alpha, "
                f"{scale:g} by peft."
            )
        return scale
    if stated is not None:
        return stated
    for name in ("alpha", "lora_alpha"):
        total = metadata.get("rank", rank)
        if name in metadata and float(metadata[name]) != float(total):
            raise ValueError(
                f"its metadata has {name} = {metadata[name]} for rank {total}, where "
                f"no program reads it. Give each layer a key such as '{layer}.alpha' "
                "with that number."
            )
    return 1.0
