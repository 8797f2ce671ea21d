"""Seconds that the plan gives for what is timed: beside each measured figure, and for a
lease before it begins.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from benchmarks.results import Record
from benchmarks.session import BUDGET, left_of
from benchmarks.suites import attention, iteration, kernels, transformer
from benchmarks.suites.transformer import Timed
from sage_fast.config.load import load_config
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import Plan, make_plan
from sage_fast.planning.trace import Cost, trace
from sage_fast.planning.work import velocity_call
from sage_kernels.registry import specs

# Assumed seconds.
STARTING = 20.0
"""Of a run before its first cell."""
MODEL = 10.0
"""Of a suite that makes a model: its library, its weights, its parity."""
COMPILING = 1.0
"""Until Triton has compiled the kernels of an op, or a library has planned its call of
a new size.
"""
INDUCTOR = 4.0
"""Until Inductor has compiled an op."""
INDUCTOR_BLOCK = 45.0
"""The same of a block."""

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
    cost = step_cost(step, shape, layers, device)
    return DEVICES[device].seconds(cost, "bfloat16", backend)[0]


def step_cost(step: str, shape: str, layers: int, device: str) -> Cost:
    """Counted work of such a step."""
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
        return step_seconds(step, shape, row["layers"], row["attention"], device)
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


# --------------------------------------------------------------------------------------
# a lease


def transformer_seconds(order: Sequence[Timed]) -> float:
    """All cells of an order, each with a call that is compared."""
    total = 0.0
    for timed in order:
        ours = step_seconds(timed.step, timed.shape, transformer.LAYERS, "auto", "h100")
        # By count: what eager blocks read and write, a mask, a forward that is computed
        # again.
        peer = 2.7 if timed.contender == "P1" else 1.5 if timed.trains else 1.3
        total += (
            ours
            * (1.0 if timed.contender == "ours" else peer)
            * (1 + transformer.ROUNDS)
        )
    return total


def suite_seconds() -> dict[str, float]:
    """Seconds of every suite on an H100, in their order."""
    plan = plan_of("B", "h100")
    ops, compiled = (
        len(list(kernels.variants(specs().values(), (contender,), smoke=False)))
        for contender in ("ours", "compiled")
    )
    # A check of a quarter of the frames, two rounds of ours, and two of diffusers' in
    # tiles, at 1.65 times the work.
    decoding = 6 * (decode_seconds("B", "h100") + decode_seconds("A", "h100"))
    return {
        "starting": STARTING,
        "ceilings": 5.0,
        "attention": 2 * (len(attention.REMAINDERS) + len(VIDEO)) * COMPILING,
        "kernels parity": ops * COMPILING,
        "transformer": MODEL + transformer_seconds(transformer.ORDER),
        "decode": decoding,
        "iteration": MODEL + 4 * plan.seconds_per_video,
        "kernels bandwidth": ops * COMPILING,
        "transformer compiled": 3 * INDUCTOR_BLOCK
        + transformer_seconds(transformer.COMPILED_ORDER),
        "kernels compiled": compiled * INDUCTOR,
    }


def order(lease: float) -> list[tuple[str, int, float, float]]:
    """(suite, run of the lease in which it ends, when it begins and ends there).

    A suite that a run's budget does not hold goes on in the next.
    """
    found = []
    run = 1
    now = 0.0
    budget = min(BUDGET, left_of(lease, {}))
    for suite, taken in suite_seconds().items():
        begins = now
        now += taken
        if now > budget:
            run += 1
            begins = STARTING
            now += STARTING - budget
            budget = left_of(lease, {"first": budget})
        found.append((suite, run, begins, now))
    return found


def table(lease: float) -> str:
    """The order, as text."""
    lines = [
        f"Predicted on an H100, with a lease of {lease:.0f} s:",
        "",
        "run  begins    ends  suite",
    ]
    lines += [
        f"{run:3}  {begins:4.0f} s  {ends:4.0f} s  {suite}"
        for suite, run, begins, ends in order(lease)
    ]
    return "\n".join(lines)
