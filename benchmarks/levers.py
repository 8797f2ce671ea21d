"""What each option is worth, predicted by `sage-fast plan` from counted work, written to results/predicted/levers.json.

    python -m benchmarks levers            on an H100: both LoRA recipes, and every lever on the one at 480p

A lever is two configurations that differ in one option; its factor is predicted transformer seconds of a video without
it over those with it. Nothing here is a measurement.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Lever:
    """An option and what it is compared with.

    without, with_it: overrides on the recipe. exact: whether the objective's gradient stays what it is. note: for the
    reader.

    Example: `Lever(name="selective checkpointing", without=("--model.checkpointing=full",), with_it=(), exact=True)`
    """

    name: str
    without: tuple[str, ...]
    with_it: tuple[str, ...]
    exact: bool
    note: str = ""


_NO_KL = "--objective.kl_mode=none"
LEVERS = (
    Lever(
        name="fused forward",
        without=("--model.forward=stock", "--model.checkpointing=full"),
        with_it=("--model.forward=fused", "--model.checkpointing=full"),
        exact=True,
        note="against diffusers' own without padding and at the same speed of attention; both keep block inputs alone",
    ),
    Lever(
        name="selective checkpointing",
        without=("--model.checkpointing=full",),
        with_it=("--model.checkpointing=selective",),
        exact=True,
        note="attention is not computed again",
    ),
    Lever(
        name="attention backend",
        without=("--model.attention=flash2",),
        with_it=("--model.attention=flash3",),
        exact=True,
        note="auto takes the fastest one installed",
    ),
    Lever(
        name="AdaLN table",
        without=("--model.adaln=weights",),
        with_it=("--model.adaln=offload",),
        exact=True,
        note="for memory; auto has the table and keeps the weights where they are",
    ),
    Lever(
        name="split guidance",
        without=("--training.guidance=paired",),
        with_it=("--training.guidance=split",),
        exact=True,
        note="for memory",
    ),
    Lever(
        name="single pass",
        without=(_NO_KL, "--training.update=two_phase"),
        with_it=(_NO_KL, "--training.update=single_pass"),
        exact=True,
        note="without a KL to an anchor",
    ),
    Lever(
        name="no KL to an anchor",
        without=("--objective.kl_mode=dual",),
        with_it=(_NO_KL,),
        exact=False,
        note="no anchor pass",
    ),
    Lever(
        name="SDE window",
        without=(),
        with_it=("--rollout.sde_window.size=5",),
        exact=False,
        note="noise and gradient in 5 of 20 steps",
    ),
    Lever(
        name="timestep fraction",
        without=(),
        with_it=("--training.timestep_fraction=0.5",),
        exact=False,
        note="half of the steps trained",
    ),
    Lever(
        name="guidance off",
        without=(),
        with_it=("--rollout.guidance_scale=1",),
        exact=False,
        note="another policy: the conditional branch alone",
    ),
    Lever(
        name="condition-only gradient",
        without=(),
        with_it=("--training.guidance=conditional",),
        exact=False,
        note="same rollout, gradient through the conditional branch alone",
    ),
    Lever(
        name="fewer steps",
        without=(),
        with_it=("--rollout.num_steps=10",),
        exact=False,
        note="10 in place of 20",
    ),
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


def option_of(lever: Lever) -> str:
    """The option in which the two sides differ, as `key: value`."""
    (option,) = set(lever.with_it) - set(lever.without)
    return option.removeprefix("--").replace("=", ": ")


def record(lever: Lever) -> dict[str, Any]:
    """A lever with its factor."""
    without, with_it = (side(overrides)[1] for overrides in (lever.without, lever.with_it))
    return {
        "name": lever.name,
        "option": option_of(lever),
        "exact": lever.exact,
        "note": lever.note,
        "without": without,
        "with": with_it,
        "factor": without["seconds"] / with_it["seconds"],
    }


def fresh_anchor() -> dict[str, Any]:
    """The anchor pass that is left out in the rollout after a refresh; it has no switch."""
    plan, given = side(())
    steps = plan.visits.update + plan.visits.late_updates
    without = given["seconds"] + given["phases"]["anchor"] * (steps / plan.visits.anchor - 1)
    return {
        "name": "anchor pass skipped after a refresh",
        "option": f"training.anchor_interval: {plan.config.training.anchor_interval}",
        "exact": True,
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
    rows = [record(lever) for lever in LEVERS]
    rows.insert(sum(row["exact"] for row in rows), fresh_anchor())
    device = DEVICES[DEVICE]
    result: dict[str, Any] = {"predicted": True, "commit": git_commit(ROOT), "recipe": RECIPE, "device": device.name}
    result |= {"source": device.source, "recipes": {file: side((), file)[1] for file in RECIPES}, "levers": rows}
    harness.write_result(options.output, result)
    for row in rows:
        print(f"{row['name']:36} {row['factor']:5.2f}x  {row['with']['peak_gb']:5.1f} GB  {row['option']}")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
