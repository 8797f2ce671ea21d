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


def step_seconds(
    step: str, shape: str, layers: int, backend: str, device: str
) -> float:
    """A step of ours at a depth."""
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
    return DEVICES[device].seconds(trace(call), "bfloat16", backend)[0]


def seconds(suite: str, row: Record, device: str) -> float | None:
    """Seconds of a row; None where the plan says nothing of it."""
    step = row["step"]
    shape = row["shape"]
    who = row["contender"]
    if suite == "attention" and who in DEVICES[device].attention:
        kind = "attention" if step == "forward" else "attention_backward"
        cost = Cost(**{kind: row["flop"]})
        return DEVICES[device].seconds(cost, "bfloat16", who)[0]
    if who != "ours":
        return None
    if suite == "transformer":
        return step_seconds(step, shape, row["layers"], row["attention"], device)
    if suite == "iteration" and step == iteration.STEP:
        return row["videos"] * plan_of(shape, device).seconds_per_video
    if suite == "decode" and shape in VIDEO:
        plan = plan_of(shape, device)
        work = plan.description.decode_work(plan.latent, row["tiled"], "float16")
        cost = Cost(linear=work[0], elementwise=work[1])
        return DEVICES[device].decode_seconds(cost, "float16")[0]
    return None
