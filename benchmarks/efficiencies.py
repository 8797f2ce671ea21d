"""Shares of a device's ceilings that its committed results show: the constants of
`sage_fast.planning.devices.Efficiencies`, which a test holds to this.

Elementwise: bytes over seconds of the kernels of a block, each alone, by those of a
copy. Products and attention: of the steps of the transformer, whose seconds are

    linear / (rate * share)  +  attention / (rate * share)  +  elementwise

by counted work. The two shares solve this for all steps and shapes, by least squares of
the relative error. Alone and for milliseconds both are faster than within a step.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import harness, results
from benchmarks.predicted import step_cost
from sage_fast.planning.devices import DEVICES, ELEMENTWISE_SHARE, Efficiencies

BLOCK = ("adaln", "gated_residual", "gated_residual_adaln", "qk_norm_rope", "gelu_tanh")
"""Ops of a block of HunyuanVideo-1.5."""
SHAPE = "B"


def files_of(device: str) -> list[Path]:
    """Committed results of a device of the planner, oldest first."""
    return sorted((harness.RESULTS / f"nvidia-{device}").glob("*.json"))


def measured(device: str, files: Sequence[Path]) -> Efficiencies | None:
    """The efficiencies of a device from its results, to two digits. Without timings of
    the kernels the elementwise one stays assumed; None without steps of the
    transformer.
    """
    card = DEVICES[device]
    moved = 0.0
    seconds = 0.0
    steps = []
    dates = set()
    for file in files:
        for (suite, step, shape), contenders in results.rows(
            results.read_result(file)
        ).items():
            ours = contenders.get("ours")
            if ours is None:
                continue
            if suite == "kernels" and shape == SHAPE and ours["op"] in BLOCK:
                moved += ours["bytes"]
                seconds += ours["seconds"]["median"]
            elif suite == "transformer":
                steps.append((step, shape, ours))
                dates.add(file.name[: len("2026-11-27")])
    if not steps:
        return None
    elementwise = ELEMENTWISE_SHARE
    assumed = "; elementwise assumed"
    if seconds:
        elementwise = moved / seconds / (card.bandwidth * 1e12)
        assumed = ""
    backends = sorted({card.backend(ours["attention"]) for _, _, ours in steps})
    shares = []
    others = []
    for step, shape, ours in steps:
        cost = step_cost(step, shape, ours["layers"], device)
        product, forward, backward, _ = card.rates("bfloat16", ours["attention"])
        attention = cost.attention / forward + cost.attention_backward / backward
        own = card.backend(ours["attention"])
        taken = ours["seconds"]["median"]
        columns = [attention if name == own else 0.0 for name in backends]
        shares.append([x / taken for x in (cost.linear / product, *columns)])
        moving = cost.elementwise / (card.bandwidth * 1e12 * elementwise)
        others.append(1 - moving / taken)
    found = torch.linalg.lstsq(
        torch.tensor(shares, dtype=torch.float64),
        torch.tensor(others, dtype=torch.float64)[:, None],
    )
    linear, *attention_shares = (
        round(1 / x, 2) for x in found.solution.flatten().tolist()
    )
    return Efficiencies(
        linear=linear,
        attention=dict(zip(backends, attention_shares, strict=True)),
        elementwise=round(elementwise, 2),
        source=(
            f"measured on an {device.upper()} (benchmarks/results/nvidia-{device}, "
            f"{max(dates)}{assumed})"
        ),
    )
