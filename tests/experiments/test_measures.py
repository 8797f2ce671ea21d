"""Measurements without training, in miniature."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import measures
from experiments.findings import COST, Findings, read_findings
from experiments.measures import (
    SAMPLERS,
    make_measurement,
    measure_exact_policy,
    measure_gradients,
    measure_rollouts,
)
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.run.run import build_trainer

MakeRun = Callable[..., RunConfig]


def test_the_exact_policy_in_miniature(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "STEPS", 6)
    arguments = {
        "starts": 3,
        "groups": 1,
        "members": 4,
        "steps": (3, 6),
        "etas": (0.5,),
    }
    rows = Findings(list(measure_exact_policy(tiny_run(), seed=0, **arguments)))  # type: ignore[arg-type]
    distance = {
        name: rows.mean("fig2", "distance", f"{name}, T=6, eta=0.5")
        for name in ("ode", *SAMPLERS)
    }
    assert (
        max(distance[name] for name in ("ode", "cps", "sage_exact"))
        < 0.01
        < distance["sage_grpo"]
    )
    assert distance["sage_grpo"] < min(distance["flow_grpo"], distance["dance_grpo"])
    assert rows.mean("fig2", "exploration", "ode, T=6, eta=0.5") == 1
    assert rows.mean("fig2", "exploration", "sage_exact, T=6, eta=0.5") > 1
    (row,) = rows.select("fig2", "distance", "cps, T=6, eta=0.5")
    (grouped,) = rows.select("fig2", "distance", "cps, T=3, eta=0.5")
    assert (row.n, grouped.n) == (3, 4)


def test_rewards_of_a_rollout_are_those_of_the_base_model(tiny_run: MakeRun) -> None:
    config = tiny_run()
    rows = Findings(
        list(measure_rollouts(config, seed=0, samplers=("sage_grpo", "cps")))
    )
    trained = build_trainer(
        replace(config, rollout=replace(config.rollout, sde_type="cps"))
    )
    metrics = trained.iterate()
    for quantity, key in (
        ("reward", "reward/mean"),
        ("group_std", "advantage/group_std"),
        ("TA", "reward/TA_mean"),
    ):
        assert rows.mean("base", quantity, "cps") == metrics[key]
    assert rows.mean("base", "reward", "cps") != rows.mean(
        "base", "reward", "sage_grpo"
    )
    assert rows.select("base", "reward", "cps")[0].n == config.rollout.batch_size


def test_the_gradient_follows_the_gain_unless_it_is_equalized(
    tiny_run: MakeRun,
) -> None:
    rows = Findings(
        list(measure_gradients(tiny_run(), seed=0, samplers=("sage_grpo", "cps")))
    )
    for sampler, steps in (("sage_grpo", 4), ("cps", 3)):
        (plain,) = rows.select("fig4", "spread", f"{sampler}, plain")
        (equal,) = rows.select("fig4", "spread", f"{sampler}, equalizer")
        (slope,) = rows.select("fig4", "slope", f"{sampler}, plain")
        assert len(plain.parts) == len(equal.parts) == len(slope.parts) == steps
        assert plain.value == pytest.approx(max(plain.parts) / min(plain.parts))
        # On policy the equalizer multiplies a step by a number, so its norm is known
        # from the other.
        scaled = [
            norm / gain for norm, gain in zip(plain.parts, slope.parts, strict=True)
        ]
        ratios = [b / a for a, b in zip(scaled, equal.parts, strict=True)]
        assert max(ratios) == pytest.approx(min(ratios), rel=1e-4)


def test_a_measurement_is_a_file_with_its_cost(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    short = {"experiment": "testbed3", "runs": {"short": {"num_updates": 1}}}
    requests: dict[str, dict[str, object]] = {
        "base": {
            "measure": "rollouts",
            "overrides": ["--rollout.num_steps=3"],
            "arguments": {"samplers": ["cps"]},
        },
        "testbed3": {"measure": "testbed", "overrides": [], "arguments": short},
    }
    for key, request in requests.items():
        result = tmp_path / "measures" / f"{key}.jsonl"
        make_measurement(result, request | {"seeds": [1, 2]}, [str(file)])
        found = read_findings(result)
        assert (
            found.seeds(key) == [1, 2]
            and found.rows[0].torch
            and found.select(key, COST)[0].value > 0
        )
    assert found.arms("testbed3", "area") == ["short"]
