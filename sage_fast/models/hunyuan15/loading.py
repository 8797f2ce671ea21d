"""HunyuanVideo-1.5 from the public checkpoints: the model family `hunyuan15`.

`model.path` is one of

* a folder as diffusers saves a `HunyuanVideo15Pipeline`: transformer/, vae/, text_encoder/, tokenizer/, ...;
* the id of such a repository on the Hugging Face hub, downloaded into its cache, or taken from there when offline.
"""

import os
import re
from pathlib import Path
from tempfile import TemporaryFile

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from safetensors import SafetensorError, safe_open

from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Components, WeightFacts
from sage_fast.models.hub import fetch_command
from sage_fast.models.hunyuan15 import DEFAULT_REPOSITORY
from sage_fast.models.hunyuan15.text_encoders import HunyuanPromptEncoder
from sage_fast.models.hunyuan15.video_vae import VAEDecoder
from sage_fast.models.stored import StoredWeights, check_fit, read_json, weight_files, without_memory

SUPPORTED = "480p_t2v, 720p_t2v or 480p_t2v_distilled"

DISTILLED_STEPS = 50
"""Steps that weights with distilled guidance must use, by the README of Tencent-Hunyuan/HunyuanVideo-1.5."""

_PARTS = {
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
    "text_encoder_2": "model",
}
"""Folders with weights in diffusers' layout, and the stem of their files."""


def load_components(model: ModelConfig) -> Components:
    """Open the transformer, load the VAE, and prepare the prompt encoders, which load themselves when they are needed.

    The transformer is in `model.dtype`, without its weights (`Components.weights`). Everything is on the CPU.

    Raises:
        ValueError: files are missing or damaged (the message names the file and the command that gets it), or the
            weights are of a variant that cannot be trained from text alone.
        OSError: a folder cannot be written to.
    """
    cache = cache_folder(model)
    root, facts = find_model(model)
    dtype = getattr(torch, model.dtype)
    on_gpu = model.device.startswith("cuda") or (model.device == "auto" and torch.cuda.is_available())
    transformer, weights = open_transformer(root / "transformer")
    without_memory(transformer, dtype)
    return Components(
        transformer=transformer,
        weights=weights,
        prompt_encoder=HunyuanPromptEncoder(
            text_encoder=root / "text_encoder",
            tokenizer=root / "tokenizer",
            glyph_encoder=root / "text_encoder_2",
            glyph_tokenizer=root / "tokenizer_2",
            cache=cache / "prompts",
            device=("cuda" if on_gpu else "cpu") if model.device == "auto" else model.device,
        ),
        video_decoder=VAEDecoder(
            load_vae(root / "vae", getattr(torch, model.decode_dtype(on_gpu))),
            memory_gib=model.decode_limit_gib,
        ),
        guidance_distilled=facts.guidance_distilled,
        shift=facts.shift,
        least_steps=facts.least_steps,
    )


def cache_folder(model: ModelConfig) -> Path:
    """Folder of a model's encoded prompts (see `ModelConfig.cache_dir`).

    ValueError when `model.cache_dir` cannot be written to.
    """
    if model.cache_dir is not None:
        folder = Path(model.cache_dir).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(
                f"model.cache_dir is {model.cache_dir!r}, which cannot be written to: {error}. Choose another folder."
            ) from error
        return folder
    root = Path(model.path).expanduser() if model.path is not None else None
    if root is not None and root.is_dir() and os.access(root, os.W_OK):
        return root / ".sage_fast"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "sage_fast"


def find_model(model: ModelConfig, *, download: bool = True) -> tuple[Path, WeightFacts]:
    """The folder that `model.path` names, and its facts: checked as far as it can be without loading anything.

    Args:
        download: whether a hub repository may be downloaded; otherwise it has to be in the local cache.

    Raises as `load_components`.
    """
    path = model.path if model.path is not None else DEFAULT_REPOSITORY
    folder, repository = Path(path).expanduser(), None
    if not folder.is_dir():
        folder, repository = _download(path, download), path
    if not any((folder / name).is_file() for name in ("model_index.json", "transformer/config.json")):
        raise ValueError(
            f"model.path {path!r} has neither model_index.json nor transformer/config.json: it is not in diffusers' "
            f"layout. Get the weights with: {fetch_command(DEFAULT_REPOSITORY, folder=folder)}    Weights in the "
            "official layout are converted by diffusers' scripts/convert_hunyuan_video1_5_to_diffusers.py."
        )
    return folder, _check(folder, repository)


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


def _check(root: Path, repository: str | None) -> WeightFacts:
    """Facts of a folder in diffusers' layout. ValueError for missing files, and for a model that cannot be trained."""
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
    return WeightFacts(
        guidance_distilled=str(guider) if distilled else None,
        shift=None if shift is None else float(shift),
        least_steps=DISTILLED_STEPS if distilled else None,
    )


def likely_repository(root: Path) -> str:
    """The repository that a damaged or incomplete local folder most likely came from."""
    config = root / "transformer" / "config.json"
    large = config.is_file() and read_json(config).get("target_size") == 960
    return DEFAULT_REPOSITORY.replace("480p", "720p") if large else DEFAULT_REPOSITORY


def _refuse(where: Path, why: str) -> None:
    raise ValueError(
        f"These weights cannot be trained: {where} {why}. Use {SUPPORTED}, for example: "
        + fetch_command(DEFAULT_REPOSITORY)
    )


def _require(file: Path, command: str) -> None:
    if not file.is_file():
        raise ValueError(f"{file} is missing. Get it with: {command}")


def _require_weights(folder: Path, stem: str, command: str) -> None:
    """ValueError unless the safetensors of a folder are all there and none was cut off."""
    for file in weight_files(folder, stem):
        _require(file, command)
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{file} is damaged or was not downloaded to its end ({error}). Delete it and run: {command}"
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
    check_fit(
        folder,
        missing=shapes.keys() - weights.keys(),
        unexpected=weights.keys() - shapes.keys(),
        mismatched={name for name in shapes.keys() & weights.keys() if weights.shape(name) != shapes[name]},
    )
    return transformer.eval(), weights


def load_vae(folder: Path, dtype: torch.dtype) -> AutoencoderKLHunyuanVideo15:
    """The VAE of a folder in diffusers' layout, in evaluation mode. ValueError as `open_transformer`."""
    vae, info = AutoencoderKLHunyuanVideo15.from_pretrained(
        folder, torch_dtype=dtype, local_files_only=True, output_loading_info=True, use_safetensors=True
    )
    check_fit(folder, missing=info["missing_keys"], unexpected=info["unexpected_keys"])
    return vae.eval()
