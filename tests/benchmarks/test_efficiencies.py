"""Shares of a device's ceilings are those of its committed results."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import efficiencies
from benchmarks.efficiencies import BLOCK, files_of, measured
from sage_fast.config.load import load_config
from sage_fast.planning.devices import DEVICES, Efficiencies
from sage_fast.planning.estimate import make_plan
from sage_fast.planning.text import assumptions, to_json
from sage_fast.planning.trace import Cost

ROOT = Path(__file__).resolve().parents[2]

COSTS = {
    ("forward", "A"): Cost(linear=2e13, attention=2e13, elementwise=1e10),
    ("forward", "B"): Cost(linear=3e13, attention=8e13, elementwise=2e10),
    ("train", "B"): Cost(
        linear=2e14, attention=2e14, attention_backward=4e14, elementwise=2e11
    ),
}


@pytest.mark.parametrize("device", DEVICES)
def test_the_plan_takes_what_the_committed_results_show(device: str) -> None:
    """A new result of a card asks for new constants."""
    shown = measured(device, files_of(device)) or Efficiencies()
    assert DEVICES[device].efficiencies == shown


def test_the_page_says_how_sure_they_are() -> None:
    shown = " ".join((ROOT / "docs/performance.md").read_text("utf-8").split())
    found = DEVICES["h200"].efficiencies
    first, second = (
        alone.linear
        for file in files_of("h200")
        if (alone := measured("h200", [file])) is not None
    )
    assert f"products reach {found.linear:.0%}".replace("%", " %") in shown
    each = f"({100 * first:.0f} and {100 * second:.0f} % by each call alone)"
    assert each in shown
    attention = [f"{100 * share:.0f} % by" for share in found.attention.values()]
    assert all(said in shown for said in attention)
    assert f"{100 * found.elementwise:.0f} % of a copy" in shown


def test_the_page_of_plans_names_the_cards_that_were_measured() -> None:
    shown = " ".join((ROOT / "docs/planning.md").read_text("utf-8").split())
    said = shown.split("GPUs other than ")[1].split(" are assumed")[0]
    cards = {name for name in DEVICES if files_of(name)}
    assert {*said.lower().split(" and ")} == {"h100", *cards}


def made_result(path: Path, backend: str, known: Efficiencies) -> Path:
    """A result of an H100 that reaches known shares of its ceilings."""
    card = replace(DEVICES["h100"], efficiencies=known)

    def row(step: str, shape: str, seconds: float, **more: Any) -> dict[str, Any]:
        timed = {"median": seconds}
        names = {"step": step, "shape": shape, "contender": "ours"}
        return {**names, "seconds": timed, **more}

    def cells() -> Iterator[tuple[str, dict[str, Any]]]:
        for op in (*BLOCK, "sde_step"):
            # the one that stands outside of a block is slow
            reached = known.elementwise if op in BLOCK else 0.1
            seconds = 1e9 / (reached * card.bandwidth * 1e12)
            yield "kernels", row(f"{op} forward", "B", seconds, bytes=1e9, op=op)
        for (step, shape), cost in COSTS.items():
            seconds = card.seconds(cost, "bfloat16", backend)[0]
            yield (
                "transformer",
                row(step, shape, seconds, layers=9, attention=backend),
            )

    made = {
        str(number): {"suite": suite, "status": "done", "rows": [one]}
        for number, (suite, one) in enumerate(cells())
    }
    path.write_text(json.dumps({"environment": {"gpu": None}, "cells": made}))
    return path


def test_shares_that_a_result_was_made_of_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two results, of one backend each."""
    known = Efficiencies(
        linear=0.7,
        attention={"cudnn": 0.95, "flash2": 1.05},
        elementwise=0.6,
        source="measured on an H100 (benchmarks/results/nvidia-h100, 2026-11-29)",
    )
    monkeypatch.setattr(
        efficiencies,
        "step_cost",
        lambda step, shape, layers, device: COSTS[step, shape],
    )
    files = [
        made_result(tmp_path / f"2026-11-{day}-abc.json", backend, known)
        for day, backend in (("28", "sdpa"), ("29", "cudnn"))
    ]
    assert measured("h100", files) == known
    without_kernels = json.loads(files[0].read_text())
    without_kernels["cells"] = {
        name: cell
        for name, cell in without_kernels["cells"].items()
        if cell["suite"] != "kernels"
    }
    files[0].write_text(json.dumps(without_kernels))
    alone = measured("h100", files[:1])
    assert alone is not None
    assert alone.elementwise == Efficiencies().elementwise
    assert alone.source.endswith("elementwise assumed)")
    assert measured("h100", []) is None


def test_a_plan_says_whether_its_efficiencies_are_measured() -> None:
    config = load_config("hv15_quick_lora_1gpu")
    for device, said in (
        ("h100", "efficiencies, assumed: products 90%, attention 90%, elementwise 80%"),
        (
            "h200",
            "efficiencies, measured on an H200 (benchmarks/results/nvidia-h200, "
            "2026-11-27): products 79%, attention 92%, elementwise 94%",
        ),
    ):
        plan = make_plan(config, DEVICES[device], sizes={})
        assert said in assumptions(plan)
        source = to_json(plan, ())["device"]["efficiencies"]["source"]
        assert f"efficiencies, {source}: " in said


def test_seconds_are_those_of_the_backend_that_attends() -> None:
    """FlashAttention-3 was not measured on an H200, nor was float32."""
    card = DEVICES["h200"]
    cost = Cost(attention=1e15)
    for backend, rate, share in (
        ("cudnn", 639, 0.92),
        ("auto", 639, 0.92),
        ("sdpa", 368, 0.99),
        ("xformers", 368, 0.99),
        ("flash3", 648, 0.9),
    ):
        seconds = card.seconds(cost, "bfloat16", backend)
        assert seconds == pytest.approx((1e3 / rate / share, 1e3 / rate))
    slow = card.seconds(cost, "float32", "cudnn")
    assert slow[0] == pytest.approx(slow[1] / 0.9)
