"""README.md of an export: a model card as the Hugging Face hub reads it, with the code that loads the weights."""

import json
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard, ModelCardData

from sage_fast import __version__
from sage_fast.config.files import replacing, write_text
from sage_fast.config.load import save_config
from sage_fast.config.schema import RunConfig
from sage_fast.evaluation import direction_label
from sage_fast.models.family import model_family
from sage_fast.models.hub import is_repository
from sage_fast.models.transformer import Layout
from sage_fast.policy.lora import ADAPTER_FILE

Format = Literal["lora", "full"]

PICTURES = {"reward.png": "Reward of the run", "before_after.png": "Same prompts and noise, before and after"}
"""Files of a run that the card shows, where they are."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written.

    averaged: the weights are the moving average that the run evaluated with. dtype: in which the transformer is to be
    loaded, such as bfloat16; of a full export it is also the one that it is stored in. repository: where on the hub it
    was published, such as me/my-adapter.

    Example: `Export(folder=Path("exported"), format="lora", layout="diffusers", update=200, averaged=True, ...)`
    """

    folder: Path
    format: Format
    layout: Layout
    update: int
    averaged: bool
    dtype: str
    repository: str | None = None


def write_card(result: Export, config: RunConfig, run: Path) -> None:
    """Write README.md, config.yaml and the pictures that the card shows into an export.

    Args:
        run: directory of the run, whose pictures and paired evaluation the card takes, where they are.
    """
    save_config(config, result.folder / "config.yaml")
    shown = [name for name in PICTURES if (run / name).is_file()]
    for name in shown:
        with replacing(result.folder / name) as partial:
            shutil.copyfile(run / name, partial)
    sections = [
        *_introduction(result, config),
        f"```{'python' if result.layout == 'diffusers' else 'sh'}\n{loading_code(result, config)}\n```",
        "\n".join(f"* {note}" for note in _notes(result, config)),
        *_results(run / "evaluation" / "result.json"),
        *(f"![{PICTURES[name]}]({name})" for name in shown),
        "## Configuration",
        "[config.yaml](config.yaml) has every setting, [export.json](export.json) what was exported.",
    ]
    card = ModelCard(f"---\n{_metadata(result, config).to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")
    write_text(result.folder / "README.md", str(card))


def _metadata(result: Export, config: RunConfig) -> ModelCardData:
    family = model_family(config.model.family)
    base, licence = family.pipeline_base(config.model), family.licence()
    lora = result.format == "lora"
    return ModelCardData(
        base_model=base if base is not None and is_repository(base) else None,
        base_model_relation="adapter" if lora else "finetune",
        library_name="diffusers" if result.layout == "diffusers" else None,
        license="other" if licence else None,
        license_name=licence[0] if licence else None,
        license_link=licence[1] if licence else None,
        pipeline_tag="text-to-video",
        tags=["grpo", "reinforcement-learning", "sage-fast", *(["lora"] if lora else [])],
    )


def _introduction(result: Export, config: RunConfig) -> list[str]:
    base = model_family(config.model.family).pipeline_base(config.model) or f"the model family {config.model.family}"
    average = ", the moving average of its weights, which is what the run evaluated" if result.averaged else ""
    merged = (
        " The adapter is merged into the weights." if result.format == "full" and config.training.mode == "lora" else ""
    )
    what = "A LoRA adapter" if result.format == "lora" else "A whole transformer"
    weights = " + ".join(f"{w:g} {n}" for n, w in config.reward.weights.items() if w)
    video, own, rollout = config.video, config.evaluation_video, config.rollout
    return [
        f"# {what} in the layout of {result.layout}",
        f"Written by SAGE-Fast {__version__} after {result.update} optimizer updates{average}.{merged}",
        f"* base model: {base}\n"
        f"* prompts: {Path(config.data.prompts).name}\n"
        f"* reward: {weights}, by {', '.join(config.reward.rewards)}\n"
        f"* videos: {video.num_frames} frames of {video.height}x{video.width}, shift {rollout.shift:g}, guidance "
        f"{rollout.guidance_scale:g}, {rollout.num_steps} steps; evaluated at {own.height}x{own.width} with "
        f"{config.evaluation_steps} steps of {config.evaluation.sampler}",
        "## How to load it",
    ]


def _notes(result: Export, config: RunConfig) -> list[str]:
    notes = []
    if result.format == "lora":
        notes.append(
            "The adapter is stored in float32 with alpha = rank: its scale is part of lora_B. A program that computes "
            "in bfloat16 rounds it when it loads it; `sage-fast generate --lora` does not."
        )
    if result.format == "lora" and result.layout == "diffusers":
        notes.append(
            "The file has every tensor under two names, for `prefix=None` too. diffusers then logs the other names as "
            "unexpected, which does no harm."
        )
    if result.layout == "diffusers":
        notes.append(
            f"Written for diffusers {metadata.version('diffusers')}. The type of a pipeline is `torch_dtype` before "
            "0.40, and `dtype` from then on."
        )
    return [*notes, "The base model and its licence are not part of this folder."]


def _results(file: Path) -> list[str]:
    """The paired evaluation of the run as a table, from its result.json; nothing where there is none."""
    if not file.is_file():
        return []
    tree: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rows = [
        f"| {direction_label(name, t.get('lower_is_better', False))} | {t['before']:.4f} | {t['after']:.4f} | "
        f"{t['mean']:+.4f} ± {t['stderr']:.4f} | {t['wins']:.0%} |"
        for name, t in {"reward": tree["reward"], **tree["scores"]}.items()
    ]
    heading = "| score | before | after | difference ± standard error | better on |\n|---|---:|---:|---:|---:|\n"
    return [
        "## Before and after",
        f"{tree['reward']['count']} prompts, one video each from the same noise: update {tree['before']} against "
        f"update {tree['after']} of the run.",
        heading + "\n".join(rows),
    ]


# ------------------------------------------------------------------------------------------------ how to load it


def loading_code(result: Export, config: RunConfig) -> str:
    """What loads an export: Python for diffusers, commands for the other programs.

    The Python leaves `transformer` behind, and `pipeline` where a stock one reads the base model, with the run's
    timestep shift.
    """
    where = result.repository or str(result.folder)
    if result.layout == "official":
        return _official_commands(result, config, where)
    if result.layout == "comfyui":
        return _comfyui_commands(result)
    return _diffusers_code(result, config, where)


def _diffusers_code(result: Export, config: RunConfig, where: str) -> str:
    dtype = f"torch.{config.model.dtype}"
    base = model_family(config.model.family).pipeline_base(config.model)
    lines = ["import torch"]
    if result.format == "full":
        lines += [
            "from diffusers import HunyuanVideo15Transformer3DModel",
            *(["from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline"] if base else []),
            "",
            "transformer = HunyuanVideo15Transformer3DModel.from_pretrained(",
            f"    {where!r}, torch_dtype=torch.{result.dtype}",
            ")",
        ]
        if base:
            lines.append(
                f"pipeline = HunyuanVideo15Pipeline.from_pretrained(\n    {base!r}, transformer=transformer, "
                f"{_pipeline_dtype(dtype)}\n)"
            )
            lines.append(_scheduler_code(config))
        return "\n".join(lines)
    if base:
        lines += [
            "from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline",
            "",
            f"pipeline = HunyuanVideo15Pipeline.from_pretrained({base!r}, {_pipeline_dtype(dtype)})",
            _scheduler_code(config),
            "transformer = pipeline.transformer",
        ]
    else:
        lines += [
            "from sage_fast.config.model_sections import ModelConfig",
            "from sage_fast.models.family import load_components",
            "",
            f"model = ModelConfig(family={config.model.family!r}, path={config.model.path!r})",
            "transformer = load_components(model).transformer",
        ]
    lines.append(f"transformer.load_lora_adapter({where!r}, weight_name={ADAPTER_FILE!r})")
    return "\n".join(lines)


def _pipeline_dtype(dtype: str) -> str:
    """The argument that sets the type of a pipeline, for the diffusers that is installed.

    Pipelines took `torch_dtype` until 0.39, and since 0.40 `dtype`, with a warning for the other; models take
    `torch_dtype` in all of them.
    """
    release = tuple(map(int, metadata.version("diffusers").split(".")[:2]))
    return f"{'dtype' if release >= (0, 40) else 'torch_dtype'}={dtype}"


def _scheduler_code(config: RunConfig) -> str:
    """The line that gives a pipeline the timestep shift of the run: its base model may have another one."""
    return (
        "pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(\n"
        f"    pipeline.scheduler.config, shift={config.rollout.shift!r}\n)"
    )


def _official_commands(result: Export, config: RunConfig, where: str) -> str:
    resolution = "720p" if config.video.height > 600 else "480p"
    call = f"python generate.py --model_path ckpts --resolution {resolution} --sr false --prompt 'a red kite at sea'"
    if result.format == "lora":
        return f"# in the official repository\n{call} --lora_path {where}"
    variant = f"ckpts/transformer/{resolution}_t2v"
    return (
        f"# in the official repository; {variant} is kept as it was\n"
        f"mv {variant} {variant}_base\ncp -r {where} {variant}\n{call}"
    )


def _comfyui_commands(result: Export) -> str:
    if result.format == "lora":
        return (
            "# then load it with the node LoraLoaderModelOnly behind the HunyuanVideo-1.5 model\n"
            f"cp {result.folder / ADAPTER_FILE} ComfyUI/models/loras/"
        )
    return (
        "# then load it with the node UNETLoader (Load Diffusion Model)\n"
        f"cp {result.folder}/diffusion_pytorch_model.safetensors ComfyUI/models/diffusion_models/"
    )
