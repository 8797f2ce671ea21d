"""Seconds that the plan gives for what is timed, beside each measured figure."""

from dataclasses import replace
from functools import cache

from benchmarks.results import Record
from benchmarks.suites import iteration
from sage_fast.config.load import load_config
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import Plan, make_plan
from sage_fast.planning.trace import Cost, trace
from sage_fast.planning.work import velocity_call

VIDEO: dict[str, dict[str, int]] = {
    "B": {},
    "A": {"video.height": 352, "video.width": 624},
}


@cache
def plan_of(shape: str, device: str) -> Plan:
    """The plan of the iteration that is timed, at a shape."""
    return make_plan(
        load_config(iteration.RECIPE, iteration.CHANGES | VIDEO[shape]),
        DEVICES[device],
        sizes={},
    )


def step_cost(step: str, shape: str, layers: int, device: str) -> Cost:
    """Counted work of a step of ours at a depth."""
    plan = plan_of(shape, device)
    description = replace(
        plan.description,
        transformer={**plan.description.transformer, "num_layers": layers},
    )
    call = replace(
        velocity_call(plan.config, description, True), checkpointing="selective"
    )
    if step == "forward":
        call = replace(call, guidance_scale=1.0, trained="full")  # without adapters
    elif step != "rollout":
        call = replace(
            call, gradient=True, guidance="paired" if step == "train" else "split"
        )
    return trace(call)


def seconds(suite: str, row: Record, device: str) -> float | None:
    """Seconds of a row; None where the plan says nothing of it."""
    step = row["step"]
    shape = row["shape"]
    who = row["contender"]
    if suite == "attention" and who in DEVICES[device].attention:
        cost = Cost(
            **{"attention" if step == "forward" else "attention_backward": row["flop"]}
        )
        return DEVICES[device].seconds(cost, "bfloat16", who)[0]
    if who != "ours":
        return None
    if suite == "transformer":
        cost = step_cost(step, shape, row["layers"], device)
        return DEVICES[device].seconds(cost, "bfloat16", row["attention"])[0]
    if suite == "iteration" and step == iteration.STEP:
        return row["videos"] * plan_of(shape, device).seconds_per_video
    # Earlier runs have decoded in tiles, which are more work.
    if suite == "decode" and shape in VIDEO and not row["tiled"]:
        return decode_seconds(shape, device)
    return None


def decode_seconds(shape: str, device: str) -> float:
    """Decoding of a video in float16."""
    plan = plan_of(shape, device)
    flops, moved = plan.description.decode_work(plan.latent, False, "float16")
    return DEVICES[device].decode_seconds(
        Cost(linear=flops, elementwise=moved), "float16"
    )[0]
