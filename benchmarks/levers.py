"""What each option is worth, predicted by `sage-fast plan` from counted work, written to results/predicted/levers.json.

    python -m benchmarks levers            on an H100: both LoRA recipes, and every lever on the one at 480p

A lever is two configurations that differ in one option; its factor is predicted transformer seconds of a video without
it over those with it. Nothing here is a measurement.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import harness
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import Plan, make_plan
from sage_fast.run.provenance import git_commit

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "configs/hv15_480p_lora_1gpu.yaml"
RECIPES = ("configs/hv15_352x624_lora_1gpu.yaml", RECIPE)
DEVICE = "h100"
FILE = harness.RESULTS / "predicted" / "levers.json"
TRANSFORMER_PHASES = ("rollout", "anchor", "update")


Kind = Literal["exact", "unbiased", "other"]


@dataclass(frozen=True)
class Lever:
    """An option and what it is compared with.

    name, note: for the reader. option: override with it. without: override in its place; None is the recipe as it is.
    both: overrides on both sides. kind: whether the objective's gradient stays what it is, stays so on average, or does
    not.

    Example: `Lever("split guidance", "training.guidance=split", "training.guidance=paired", note="for memory")`
    """

    name: str
    option: str
    without: str | None = None
    note: str = ""
    both: tuple[str, ...] = ()
    kind: Kind = "exact"

    def overrides(self, *, on: bool) -> list[str]:
        """Of the recipe, on one side."""
        own = self.option if on else self.without
        return [f"--{text}" for text in (*self.both, own) if text is not None]


_NO_KL = "objective.kl_mode=none"
_FULL = ("model.checkpointing=full",)
_FUSED = "against diffusers' own without padding and at the same speed of attention; both keep block inputs alone"
_TABLE = "for memory; auto has the table and keeps the weights where they are"
_CONDITIONAL = "same rollout, gradient through the conditional branch alone"
EXACT = (
    Lever("fused forward", "model.forward=fused", "model.forward=stock", _FUSED, both=_FULL),
    Lever("selective checkpointing", "model.checkpointing=selective", *_FULL, "attention is not computed again"),
    Lever(
        "attention backend", "model.attention=flash3", "model.attention=flash2", "auto takes the fastest one installed"
    ),
    Lever("AdaLN table", "model.adaln=offload", "model.adaln=weights", _TABLE),
    Lever("split guidance", "training.guidance=split", "training.guidance=paired", "for memory"),
    Lever(
        "single pass",
        "training.update=single_pass",
        "training.update=two_phase",
        "without a KL to an anchor",
        both=(_NO_KL,),
    ),
)
_QUARTER = "objective.kl_position_fraction=0.25"
UNBIASED = (
    Lever("KL at a quarter of the steps", _QUARTER, note="the anchor pass at 5 of 20 steps", kind="unbiased"),
    Lever(
        "KL at a quarter, single pass",
        "training.update=single_pass",
        "training.update=two_phase",
        "against two phases with the same share",
        both=(_QUARTER,),
        kind="unbiased",
    ),
    Lever("uniform pairs", "training.pairs=uniform", note="half of the steps of each video", kind="unbiased"),
    Lever("weighted pairs", "training.pairs=weighted", note="half of the pairs, by advantage", kind="unbiased"),
)
OTHER = (
    Lever("no KL to an anchor", _NO_KL, "objective.kl_mode=dual", "no anchor pass", kind="other"),
    Lever("SDE window", "rollout.sde_window.size=5", note="noise and gradient in 5 of 20 steps", kind="other"),
    Lever(
        "shared start",
        "rollout.shared_initial_noise=true",
        note="steps before the window once per group; against the window",
        both=("rollout.sde_window.size=5",),
        kind="other",
    ),
    Lever(
        "FP8 products",
        "model.fp8=true",
        note="the anchor pass and the steps outside the window; against the window",
        both=("rollout.sde_window.size=5",),
        kind="other",
    ),
    Lever(
        "best and worst",
        "training.train_on={best: 4, worst: 4}",
        note="8 of the 16 videos of a group are trained",
        both=("rollout.num_generations=16", "rollout.batch_size=16"),
        kind="other",
    ),
    Lever(
        "guidance off", "rollout.guidance_scale=1", note="another policy: the conditional branch alone", kind="other"
    ),
    Lever("condition-only gradient", "training.guidance=conditional", note=_CONDITIONAL, kind="other"),
    Lever("fewer steps", "rollout.num_steps=10", note="10 in place of 20", kind="other"),
)


def recipe(overrides: Sequence[str], file: str = RECIPE) -> RunConfig:
    """A recipe with overrides."""
    prompts = ROOT / "configs" / "prompts"
    paths = [f"--data.prompts={prompts / 'general_train.csv'}", f"--evaluation.prompts={prompts / 'general_eval.csv'}"]
    return load_config(ROOT / file, [*paths, *overrides])


def seconds(plan: Plan) -> float:
    """Predicted seconds of a video in the transformer."""
    return sum(phase.predicted for phase in plan.phases if phase.name in TRANSFORMER_PHASES)


def side(overrides: Sequence[str], file: str = RECIPE) -> tuple[Plan, dict[str, Any]]:
    """The plan of one side of a lever, and what is kept of it."""
    plan = make_plan(recipe(overrides, file), DEVICES[DEVICE])
    phases = {phase.name: phase.predicted for phase in plan.phases}
    return plan, {"seconds": seconds(plan), "peak_gb": plan.memory.peak / 1e9, "phases": phases}


def record(lever: Lever) -> dict[str, Any]:
    """A lever with its factor."""
    without, with_it = (side(lever.overrides(on=on))[1] for on in (False, True))
    head = {"name": lever.name, "option": lever.option.replace("=", ": "), "kind": lever.kind, "note": lever.note}
    return head | {"without": without, "with": with_it, "factor": without["seconds"] / with_it["seconds"]}


def fresh_anchor() -> dict[str, Any]:
    """The anchor pass that is left out in the rollout after a refresh; it has no switch."""
    plan, given = side(())
    steps = plan.visits.update + plan.visits.late_updates
    without = given["seconds"] + given["phases"]["anchor"] * (steps / plan.visits.anchor - 1)
    return {
        "name": "anchor pass skipped after a refresh",
        "option": f"training.anchor_interval: {plan.config.training.anchor_interval}",
        "kind": "exact",
        "note": "always on; one rollout in ten",
        "without": given | {"seconds": without},
        "with": given,
        "factor": without / given["seconds"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks levers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=FILE, help="JSON file")
    options = parser.parse_args(argv)
    rows = [*map(record, EXACT), fresh_anchor(), *map(record, UNBIASED), *map(record, OTHER)]
    device = DEVICES[DEVICE]
    result: dict[str, Any] = {"predicted": True, "commit": git_commit(ROOT), "recipe": RECIPE, "device": device.name}
    result |= {"source": device.source, "recipes": {file: side((), file)[1] for file in RECIPES}, "levers": rows}
    harness.write_result(options.output, result)
    for row in rows:
        print(f"{row['name']:36} {row['factor']:5.2f}x  {row['with']['peak_gb']:5.1f} GB  {row['option']}")
    print(f"written to {options.output}")
    return 0
