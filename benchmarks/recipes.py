"""Published recipes beside presets of ours: the table of docs/real_model.md, which
`report` writes.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_fast.config.documents import read_yaml
from sage_fast.config.load import config_file, load_config
from sage_fast.planning.work import least_gpus

ROOT = Path(__file__).resolve().parents[1]


def shown_rate(rate: float) -> str:
    """1e-4, as code writes it."""
    return f"{rate:.0e}".replace("e-0", "e-")


def published_row(quoted: Mapping[str, Any]) -> list[str]:
    """Cells of a recipe of `published_recipes.yaml`."""
    rate = shown_rate(quoted["learning_rate"])
    if quoted["optimizer"] != "adamw":
        rate += f", {quoted['optimizer'].capitalize()}"
    trains = "all"
    if "rank" in quoted:
        trains = f"LoRA {quoted['rank']}, alpha {quoted['alpha']}"
    file, _, entry = quoted["file"].partition(", ")
    place = f"{quoted['source']}: `{file}`"
    if entry:
        place += f", `{entry}`"
    steps = f"{quoted['steps']}; {quoted['guidance']}"
    cells = [quoted["title"], quoted["video"], quoted["samples"], steps, rate]
    return [*map(str, cells), quoted["clip"], quoted["kl"], trains, place]


OWN = (
    "hv15_352x624_lora_8gpu",
    "hv15_quick_lora_1gpu",
    "hv15_256x384_lora_8gpu_nft",
    "wan_quick_lora_24gb",
    "wan_quick_lora_24gb_nft",
)
"""Presets beside the published recipes."""


def named_recipe(preset: str) -> str:
    """Key in the line `# Recipe: KEY` of a preset's head.

    Raises:
        ValueError: there is not one such line.
    """
    text = config_file(preset).read_text("utf-8")
    found = re.findall(r"^# Recipe(?: of [a-z ]+)?: (\w+)", text, re.M)
    if len(found) != 1:
        raise ValueError(f"{preset} names {len(found)} recipes; it must name one")
    return str(found[0])


def own_row(preset: str) -> list[str]:
    """Cells of a preset."""
    config = load_config(preset)
    video = config.video
    rollout = config.rollout
    gpus = least_gpus(config.distributed, rollout)
    updates = config.training.updates_per_rollout
    samples = rollout.batch_size * gpus // updates
    prompts = rollout.batch_size * gpus // rollout.num_generations
    made = f"{samples} ({prompts} x {rollout.num_generations // updates})"
    if updates > 1:
        made += f", {updates} of a rollout"
    steps = str(rollout.num_steps)
    forward = config.samples_by_ode
    if forward:
        steps += f", {config.forward_process.levels} levels"
    elif rollout.sde_window.size is not None:
        steps += f", {rollout.sde_window.size} trained"
    weight = config.kl_weight
    kl = f"{shown_rate(weight.minimum)} to {shown_rate(weight.maximum)}"
    if weight.minimum == weight.maximum:
        kl = shown_rate(weight.minimum)
    alpha = config.lora.alpha or config.lora.rank
    return [
        f"ours: `{preset}`",
        f"{video.height}x{video.width}x{video.num_frames}",
        made,
        f"{steps}; {config.sampling_guidance:g}",
        shown_rate(config.optimizer.learning_rate),
        "-" if forward else shown_rate(config.objective.clip_range),
        "none" if config.objective.kl_mode == "none" else kl,
        f"LoRA {config.lora.rank}, alpha {alpha:g}",
        f"after `{named_recipe(preset)}`",
    ]


HEAD = (
    "recipe",
    "height x width x frames",
    "samples per update (prompts x group)",
    "steps; guidance",
    "learning rate",
    "ratio clip",
    "KL weight",
    "trains",
    "source",
)


def table() -> str:
    """Published recipes, then presets of ours, in Markdown."""
    file = ROOT / "sage_fast/config/published_recipes.yaml"
    published = read_yaml(file.read_text("utf-8"), str(file))
    rows = [published_row(quoted) for quoted in published.values()]
    rows += [own_row(preset) for preset in OWN]
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
