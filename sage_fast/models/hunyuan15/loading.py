"""HunyuanVideo-1.5 from the public checkpoints: the model family `hunyuan15`.

`model.path` is one of

* a folder as diffusers saves a `HunyuanVideo15Pipeline`: transformer/, vae/, text_encoder/, tokenizer/, ...;
* the id of such a repository on the Hugging Face hub, downloaded into its cache, or taken from there when offline;
* the official `ckpts/` folder, whose transformer, VAE and glyph encoder are converted once (`official_layout.py`).
"""

import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from safetensors import SafetensorError, safe_open

from sage_fast.config.model_sections import ModelConfig
from sage_fast.models.family import Components, WeightFacts
from sage_fast.models.hub import fetch_command
from sage_fast.models.hunyuan15.official_layout import (
    convert_glyph_encoder,
    convert_transformer,
    convert_vae,
    read_json,
)
from sage_fast.models.hunyuan15.requirements import (
    DEFAULT_REPOSITORY,
    OFFICIAL_REPOSITORY,
    checkpoint_root,
    official_encoders,
)
from sage_fast.models.hunyuan15.text_encoders import HunyuanPromptEncoder
from sage_fast.models.hunyuan15.video_vae import VAEDecoder
from sage_fast.models.stored import StoredWeights, without_memory

logger = logging.getLogger(__name__)

SUPPORTED = "480p_t2v, 720p_t2v, 480p_t2v_distilled or 720p_t2v_distilled"

SHIFTS = {"480p": 5.0, "720p": 9.0}
"""Timestep shift of the text-to-video models by resolution; https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5."""

_PARTS = {
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
    "text_encoder_2": "model",
}
"""Folders with weights in diffusers' layout, and the stem of their files."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel(WeightFacts):
    """A model that is whole and can be trained.

    root: folder of its parts. variant: the transformer of the official layout, such as 480p_t2v; None in diffusers'.

    Example: `PublishedModel(root=Path("ckpts"), variant="480p_t2v", guidance_distilled=None, shift=5.0)`
    """

    root: Path


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Folders of a model's parts, each readable by `from_pretrained`.

    Example: in diffusers' layout `transformer` is `<model.path>/transformer`.
    """

    transformer: Path
    vae: Path
    text_encoder: Path
    tokenizer: Path
    glyph_encoder: Path
    glyph_tokenizer: Path


def load_components(model: ModelConfig) -> Components:
    """Open the transformer, load the VAE, and prepare the prompt encoders, which load themselves when they are needed.

    The transformer is in `model.dtype`, without its weights (`Components.weights`). Everything is on the CPU.

    Raises:
        ValueError: files are missing or damaged (the message names the file and the command that gets it), or the
            weights are of a variant that cannot be trained from text alone.
        OSError: a folder cannot be written to.
    """
    cache = cache_folder(model)
    found = find_model(model)
    files = model_files(found, cache)
    dtype = getattr(torch, model.dtype)
    on_gpu = model.device.startswith("cuda") or (model.device == "auto" and torch.cuda.is_available())
    transformer, weights = open_transformer(files.transformer)
    without_memory(transformer, dtype)
    return Components(
        transformer=transformer,
        weights=weights,
        prompt_encoder=HunyuanPromptEncoder(
            text_encoder=files.text_encoder,
            tokenizer=files.tokenizer,
            glyph_encoder=files.glyph_encoder,
            glyph_tokenizer=files.glyph_tokenizer,
            cache=cache / "prompts",
            dtype=model.text_encoder_dtype,
            device=("cuda" if on_gpu else "cpu") if model.device == "auto" else model.device,
        ),
        video_decoder=VAEDecoder(
            _load(AutoencoderKLHunyuanVideo15, files.vae, getattr(torch, model.decode_dtype(on_gpu))),
            memory_gib=model.decode_limit_gib,
        ),
        guidance_distilled=found.guidance_distilled,
        shift=found.shift,
    )


def cache_folder(model: ModelConfig) -> Path:
    """Where prompt embeddings and converted weights of a model are kept (see `ModelConfig.cache_dir`).

    ValueError when `model.cache_dir` cannot be written to.
    """
    if model.cache_dir is not None:
        folder = Path(model.cache_dir).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"model.cache_dir is {model.cache_dir!r}, which cannot be created: {error}.") from error
        if not os.access(folder, os.W_OK):
            raise ValueError(
                f"model.cache_dir is {model.cache_dir!r}, which cannot be written to. Choose another folder."
            )
        return folder
    root = checkpoint_root(Path(model.path)) if model.path is not None else None
    if root is not None and root.is_dir() and os.access(root, os.W_OK):
        return root / ".sage_fast"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "sage_fast"


def find_model(model: ModelConfig, *, download: bool = True) -> PublishedModel:
    """The model that `model.path` names, checked as far as it can be without loading or converting anything.

    Args:
        download: whether a hub repository may be downloaded; otherwise it has to be in the local cache.

    Raises as `load_components`.
    """
    path = model.path if model.path is not None else DEFAULT_REPOSITORY
    folder, repository = Path(path).expanduser(), None
    if not folder.is_dir():
        folder, repository = _download(path, download), path
    root = checkpoint_root(folder)
    if (root / "model_index.json").is_file() or (root / "transformer" / "config.json").is_file():
        if model.variant is not None:
            raise ValueError(
                f"model.variant is {model.variant!r}, but {root} is in diffusers' layout and holds one transformer. "
                "Leave model.variant out."
            )
        return _check_diffusers(root, repository)
    variants = sorted(p.parent.name for p in root.glob("transformer/*/config.json"))
    if variants:
        wanted = folder.name if root != folder else model.variant
        return _check_official(root, _choose_variant(root, variants, wanted))
    raise ValueError(
        f"model.path {path!r} has neither model_index.json (diffusers' layout) nor transformer/<variant>/config.json "
        f"(the official ckpts folder). Get the weights with: {fetch_command(DEFAULT_REPOSITORY, folder=folder)}"
    )


def model_files(found: PublishedModel, cache: Path) -> ModelFiles:
    """The parts of a model; what has to be converted is converted into `cache`, once.

    ValueError for weights that do not fit their configuration, OSError where `cache` cannot be written to.
    """
    root = found.root
    if found.variant is None:
        return ModelFiles(
            transformer=root / "transformer",
            vae=root / "vae",
            text_encoder=root / "text_encoder",
            tokenizer=root / "tokenizer",
            glyph_encoder=root / "text_encoder_2",
            glyph_tokenizer=root / "tokenizer_2",
        )
    converted = cache / "converted"
    glyph_encoder = convert_glyph_encoder(root / "text_encoder", converted / "glyph_encoder")
    return ModelFiles(
        transformer=convert_transformer(root / "transformer" / found.variant, converted / found.variant),
        vae=convert_vae(root / "vae", converted / "vae"),
        text_encoder=root / "text_encoder" / "llm",
        tokenizer=root / "text_encoder" / "llm",
        glyph_encoder=glyph_encoder,
        glyph_tokenizer=glyph_encoder,
    )


def _download(repository: str, download: bool) -> Path:
    """The local snapshot of a hub repository. ValueError when there is none and it is not or cannot be downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(
            f"model.path is {repository!r}, which is no folder here and no repository of the form owner/name. Get the "
            f"weights with: {fetch_command(DEFAULT_REPOSITORY, folder=repository)}"
        )
    patterns = [f"{part}/*" for part in (*_PARTS, "tokenizer", "tokenizer_2", "scheduler", "guider")]
    try:
        return Path(
            snapshot_download(repository, allow_patterns=["model_index.json", *patterns], local_files_only=not download)
        )
    except (LocalEntryNotFoundError, RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"model.path is {repository!r}, which is no folder here; as a repository of the Hugging Face hub it is "
            f"neither in the local cache nor can it be downloaded ({type(error).__name__}). With a network, run: "
            f"{fetch_command(repository)}    Without one, set model.path to a folder that holds the weights."
        ) from error


# ---------------------------------------------------------------------------------------------- diffusers' layout


def _check_diffusers(root: Path, repository: str | None) -> PublishedModel:
    index = read_json(root / "model_index.json") if (root / "model_index.json").is_file() else {}
    kind = index.get("_class_name", "HunyuanVideo15Pipeline")
    if kind != "HunyuanVideo15Pipeline":
        _refuse(root / "model_index.json", f"is of a {kind}, not of a HunyuanVideo15Pipeline")
    source = repository or likely_repository(root)
    for name in ("transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"):
        # A snapshot in the hub's cache is completed in place; a folder is filled from where it most likely came.
        command = fetch_command(source) if repository else fetch_command(source, f"{name}/*", folder=root)
        _require(root / name / ("tokenizer_config.json" if "tokenizer" in name else "config.json"), command)
        if name in _PARTS:
            _require_weights(root / name, _PARTS[name], command)
    config_file = root / "transformer" / "config.json"
    config = read_json(config_file)
    if config.get("_class_name") != HunyuanVideo15Transformer3DModel.__name__:
        _refuse(config_file, f"describes a {config.get('_class_name')}")
    if config.get("use_meanflow"):
        _refuse(config_file, "says use_meanflow: the model is step-distilled, so its velocity is not that of a flow")
    # Published text-to-video pipelines carry task_type i2v in this file, so it counts only where nothing else speaks.
    if not index and config.get("task_type") == "i2v":
        _refuse(config_file, "says task_type i2v: the model animates an image")
    guider = root / "guider" / "guider_config.json"
    distilled = guider.is_file() and read_json(guider).get("guidance_scale") == 1.0
    scheduler = root / "scheduler" / "scheduler_config.json"
    shift = read_json(scheduler).get("shift") if scheduler.is_file() else None
    return PublishedModel(
        root=root,
        variant=None,
        guidance_distilled=str(guider) if distilled else None,
        shift=None if shift is None else float(shift),
    )


def likely_repository(root: Path) -> str:
    """The repository that a damaged or incomplete local folder most likely came from."""
    config = root / "transformer" / "config.json"
    large = config.is_file() and read_json(config).get("target_size") == 960
    return DEFAULT_REPOSITORY.replace("480p", "720p") if large else DEFAULT_REPOSITORY


# ---------------------------------------------------------------------------------------------- the official layout


def _choose_variant(root: Path, variants: list[str], wanted: str | None) -> str:
    """The transformer folder to use; `_check_official` says whether it can be used."""
    if wanted is not None:
        if wanted not in variants:
            raise ValueError(
                f"model.variant is {wanted!r}, but {root / 'transformer'} holds {', '.join(variants)}. Choose one of "
                f"them, or run: {fetch_command(OFFICIAL_REPOSITORY, f'transformer/{wanted}/*', folder=root)}"
            )
        return wanted
    usable = [v for v in variants if re.fullmatch(r"\d+p_t2v(_distilled)?", v)]
    if len(usable) > 1:
        raise ValueError(
            f"{root / 'transformer'} holds several transformers. Set model.variant to one of {', '.join(usable)}."
        )
    return usable[0] if usable else variants[0]


def _check_official(root: Path, variant: str) -> PublishedModel:
    transformer = root / "transformer" / variant
    config = read_json(transformer / "config.json")
    _refuse_official(transformer, config)
    stem, vae = "diffusion_pytorch_model", fetch_command(OFFICIAL_REPOSITORY, "vae/*", folder=root)
    _require_weights(transformer, stem, fetch_command(OFFICIAL_REPOSITORY, f"transformer/{variant}/*", folder=root))
    _require(root / "vae" / "config.json", vae)
    _require_weights(root / "vae", stem, vae)
    for _, _, folder, files, command in official_encoders(root):
        for file in files:
            if file == "*.safetensors":
                _require_weights(folder, "model", command)
            else:
                _require(folder / file, command)
    return PublishedModel(
        root=root,
        variant=variant,
        guidance_distilled=str(transformer) if variant.endswith("_distilled") else None,
        shift=SHIFTS[config["ideal_resolution"]],
    )


def _refuse_official(transformer: Path, config: dict[str, Any]) -> None:
    """ValueError for a transformer that is not a plain text-to-video flow."""
    file = transformer / "config.json"
    if config.get("use_meanflow"):
        _refuse(file, "says use_meanflow: the model is step-distilled, so its velocity is not that of a flow")
    if "sparse" in transformer.name:
        _refuse(transformer, "is named so: the model needs sparse attention, which diffusers does not have")
    if config.get("attn_param"):
        _refuse(file, "has an attn_param: the model needs sparse attention, which diffusers does not have")
    if "_sr_" in transformer.name:
        _refuse(transformer, "is named so: the model enlarges videos")
    if config.get("ideal_task") != "t2v":
        _refuse(file, f"says ideal_task {config.get('ideal_task')}: only text-to-video can be trained from prompts")
    if config.get("ideal_resolution") not in ("480p", "720p"):
        _refuse(file, f"says ideal_resolution {config.get('ideal_resolution')}")
    if config.get("guidance_embed") or config.get("mm_single_blocks_depth"):
        _refuse(file, "describes another architecture (guidance_embed or single-stream blocks)")


def _refuse(where: Path, why: str) -> None:
    raise ValueError(
        f"These weights cannot be trained: {where} {why}. Use {SUPPORTED}, for example: "
        + fetch_command(DEFAULT_REPOSITORY)
    )


# ---------------------------------------------------------------------------------------------- files


def _require(file: Path, command: str) -> None:
    if not file.is_file():
        raise ValueError(f"{file} is missing. Get it with: {command}")


def _require_weights(folder: Path, stem: str, command: str) -> None:
    """ValueError unless the safetensors of a folder are all there and none was cut off."""
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index)["weight_map"].values()))
    else:
        names = [f"{stem}.safetensors"]
    for name in names:
        _require(folder / name, command)
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{folder / name} is damaged or was not downloaded to its end ({error}). Delete it and run: {command}"
            ) from error


def open_transformer(folder: Path) -> tuple[HunyuanVideo15Transformer3DModel, StoredWeights]:
    """The transformer of a folder in diffusers' layout on the meta device, in evaluation mode, and its weights.

    ValueError: they do not fit each other, or a file is damaged.
    """
    with torch.device("meta"):
        transformer = HunyuanVideo15Transformer3DModel.from_config(
            HunyuanVideo15Transformer3DModel.load_config(folder, local_files_only=True)
        )
    weights, shapes = StoredWeights(folder), {name: p.shape for name, p in transformer.state_dict().items()}
    _check_fit(
        folder,
        {
            "missing_keys": shapes.keys() - weights.keys(),
            "unexpected_keys": weights.keys() - shapes.keys(),
            "mismatched_keys": {n for n in shapes.keys() & weights.keys() if weights.shape(n) != shapes[n]},
        },
    )
    return transformer.eval(), weights


def _load(model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    """A diffusers model in evaluation mode. ValueError unless the weights and the configuration fit each other."""
    model, info = model_class.from_pretrained(
        folder, torch_dtype=dtype, local_files_only=True, output_loading_info=True, use_safetensors=True
    )
    _check_fit(folder, {kind: info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")})
    return model.eval()


def _check_fit(folder: Path, wrong: Mapping[str, Collection[Any]]) -> None:
    """ValueError unless the weights of a folder are those that its configuration describes; `wrong`: names by kind."""
    for kind, names in wrong.items():
        if names:
            raise ValueError(
                f"The weights in {folder} do not fit its config.json: {len(names)} {kind.replace('_', ' ')}, among "
                f"them {sorted(map(str, names))[0]}. Download the folder again."
            )
