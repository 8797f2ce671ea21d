"""Transitions against values computed by the public reference implementations.

`tests/golden/transitions.json` names its tolerances: 1e-6 for the samplers whose
reference ran in float64, 1e-5 and 1e-4 for those whose reference ran in float32. A
deviation counts relative to values above 1 and absolutely below.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_fast.sde import sigma_schedule, transition, transition_table

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "transitions.json").read_text()
)
NAMES = ("num_steps", "shift", "eta", "step")
CASES = [
    pytest.param(
        case,
        sde_type,
        id="-".join([sde_type, *(f"{name} {case[name]:g}" for name in NAMES)]),
    )
    for case in GOLDEN["cases"]
    for sde_type in case["expected"]
]


def deviation(ours: torch.Tensor, expected: Any) -> float:
    expected = torch.tensor(expected, dtype=torch.float64).reshape(ours.shape)
    return float(((ours - expected).abs() / expected.abs().clamp(min=1)).max())


@pytest.mark.parametrize(("case", "sde_type"), CASES)
def test_transition_equals_the_reference(case: dict[str, Any], sde_type: str) -> None:
    expected = case["expected"][sde_type]
    tolerance = GOLDEN["tolerances"][sde_type]
    step = case["step"]
    table = transition_table(
        sde_type, sigma_schedule(case["num_steps"], case["shift"]), case["eta"]
    )
    assert float(table.sigmas[step]) == pytest.approx(case["sigma"], abs=1e-12)
    assert float(table.sigmas[step + 1]) == pytest.approx(case["sigma_next"], abs=1e-12)

    if expected.get("official_is_nan"):
        assert step in table.degenerate
        assert not table.trainable[step]
        assert float(table.a[step]) == 1
        assert float(table.b[step]) == float(
            table.sigmas[step + 1] - table.sigmas[step]
        )
        assert (
            float(table.std[step])
            == float(table.gain[step])
            == float(table.scale[step])
            == 0
        )
        return

    x, v, x_next = (
        torch.tensor(case[name], dtype=torch.float64).reshape(case["shape"])
        for name in ("x", "v", "x_next")
    )
    a = float(table.a[step])
    b = float(table.b[step])
    std = float(table.std[step])
    mean = transition(x, v, torch.zeros_like(x), a=a, b=b, std=std)
    assert deviation(mean, expected["mean"]) <= tolerance
    assert deviation(torch.tensor(std).double(), expected["std"]) <= tolerance
    assert bool(table.trainable[step]) == (expected["std"] > 0)

    squares = (x_next - mean).square().flatten(1).mean(1)
    if "log_prob" in expected:
        log_prob = -squares / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2
        assert deviation(log_prob, expected["log_prob"]) <= tolerance
    else:
        assert deviation(-squares, expected["log_prob_unnormalized"]) <= tolerance


def test_the_file_covers_every_sampler_and_the_nan_steps() -> None:
    assert len(GOLDEN["cases"]) == 60
    for sde_type in ("sage_grpo", "dance_grpo", "flow_grpo", "cps"):
        assert sum(sde_type in case["expected"] for case in GOLDEN["cases"]) == 60
    assert (
        sum(
            "official_is_nan" in case["expected"]["sage_grpo"]
            for case in GOLDEN["cases"]
        )
        == 2
    )
