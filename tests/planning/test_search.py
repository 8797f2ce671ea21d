"""Levers, ranked by predicted signal of the gradient per GPU-hour."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.planning import search
from sage_fast.planning.search import LEAST_GAIN, Option, ranked_levers

RECIPE = Path(__file__).resolve().parents[2] / "configs/hv15_480p_lora_8gpu.yaml"


def seconds(config: RunConfig) -> float:
    """As of a model whose passes cost what theirs do: two forwards and two backward passes a step."""
    training, objective = config.training, config.objective
    share = training.pair_fraction if training.pairs != "all" else 1.0
    share *= (config.rollout.sde_window.size or 20) / 20
    share *= training.train_on.count / config.rollout.num_generations or 1.0
    shared = 0.3 if config.rollout.shared_initial_noise and config.rollout.sde_window.size else 0.0
    anchor = 1.0 if objective.kl_mode == "dual" else 0.0
    anchor *= objective.kl_position_fraction
    saved = 0.9 if config.model.checkpointing == "auto" else 1.0
    if training.update == "two_phase":
        return 1 - shared + share * (anchor + 3 * saved)
    return 1 - shared + share * (2 * saved + 3 * anchor)


def signal(config: RunConfig) -> float:
    kept = {"all": 1.0, "uniform": 0.5, "weighted": 0.8}[config.training.pairs]
    kept *= 0.98 if config.objective.kl_position_fraction < 1 else 1.0
    return kept * (0.9 if config.rollout.sde_window.size else 1.0)


def made_plan(config: RunConfig, on_gpu: bool = True) -> Any:
    # A window of its own makes no room.
    fits = config.training.update == "two_phase" or config.rollout.sde_window.size is None
    speed = {"seconds_per_video": seconds(config), "layout": SimpleNamespace(sp=1)}
    return SimpleNamespace(asked=config, config=config, on_gpu=on_gpu, fits=fits, **speed)


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(plan: Any, changes: Any) -> Option | None:
        try:
            return Option(changes=changes, plan=made_plan(search._changed(plan.asked, changes)))
        except ConfigError:
            return None

    monkeypatch.setattr(search, "_try", attempt)
    monkeypatch.setattr(search, "relative_signal", signal)


def ranked(*words: str, most: int = 100, on_gpu: bool = True) -> list[Option]:
    config = load_config(RECIPE, words)
    return ranked_levers(made_plan(config, on_gpu), most)


def test_levers_are_ranked_by_signal_per_second_within_their_kind() -> None:
    found = ranked()
    by_kind = {kind: [o for o in found if o.kind == kind] for kind in ("exact", "unbiased", "biased")}
    assert [o for options in by_kind.values() for o in options] == found
    for options in by_kind.values():
        known = [o for o in options if o.is_measured]
        for rows in (known, options[len(known) :]):
            assert all(a.signal_per_second >= b.signal_per_second for a, b in pairwise(rows))
        assert known == options[: len(known)] != []
        assert all(o.plan.fits for o in options)
    assert [dict(o.changes) for o in by_kind["exact"]] == [{"model.checkpointing": "auto"}]
    for kind, options in by_kind.items():
        for option in options:
            keys = dict(option.changes)
            biased = "rollout.sde_window.size" in keys
            drawn = {"training.pairs", "objective.kl_position_fraction"} & keys.keys()
            assert kind == ("biased" if biased else "unbiased" if drawn else "exact")
    # A cheaper step is no lever where it loses more signal than time.
    assert not any(("training.pairs", "uniform") in o.changes for o in found)
    # A second backward pass is dear, at a quarter of the steps it is not.
    assert all(
        ("objective.kl_position_fraction", 0.25) in o.changes
        for o in found
        if ("training.update", "single_pass") in o.changes
    )
    assert any(("training.update", "single_pass") in o.changes for o in found)


GROUP = "--rollout.batch_size=4"


def test_what_has_no_factor_comes_behind_and_without_one() -> None:
    found = ranked(GROUP)
    pair, shared = ("training.train_on.best", 1), ("rollout.shared_initial_noise", True)
    unknown = [o for o in found if pair in o.changes or shared in o.changes]
    assert found[-len(unknown) :] == unknown and not any(o.is_measured for o in unknown)
    assert all(o.is_measured and o.kind != "biased" for o in found[:3])
    assert any(pair in o.changes for o in unknown) and any(shared in o.changes for o in unknown)
    assert all(("rollout.sde_window.size", 5) in o.changes for o in unknown if shared in o.changes)
    assert all(("training.update", "single_pass") not in o.changes for o in unknown if pair in o.changes)
    assert not any(pair in o.changes for o in ranked()), "where a rank would wait for another"
    assert (shared,) in [o.changes for o in ranked("--rollout.sde_window.size=5")]


def test_no_member_of_a_combination_can_be_left_out() -> None:
    found = ranked()
    worth = {frozenset(o.changes): o.signal_per_second for o in found}
    for changes, value in worth.items():
        assert all(value > LEAST_GAIN * other for fewer, other in worth.items() if fewer < changes)


def test_levers_that_are_in_use_are_not_offered() -> None:
    words = ["--model.checkpointing=auto", "--objective.kl_position_fraction=0.25", "--rollout.sde_window.size=5"]
    words += ["--rollout.shared_initial_noise=true", "--training.train_on={best: 1, worst: 1}", GROUP]
    keys = {key for option in ranked(*words, "--training.pairs=weighted") for key, _ in option.changes}
    assert not keys
    keys = {key for option in ranked("--objective.kl_mode=none", on_gpu=False) for key, _ in option.changes}
    window = {"rollout.sde_window.size", "rollout.shared_initial_noise"}
    assert keys == {"training.update", "training.pairs", "training.pair_fraction", *window}


def test_the_fewest_of_each_kind() -> None:
    assert [o.kind for o in ranked(most=1)] == ["exact", "unbiased", "biased", "biased"]


@pytest.mark.slow
def test_the_command_shows_seconds_signal_and_signal_per_hour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    words = ["plan", "toy_cpu", "--device=cpu", "--levers"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "signal  per GPU-hour" in text and "exact: the same gradient" in text
    assert "--objective.kl_position_fraction=0.25  unbiased" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for lever in found["levers"]:
        if lever["relative_signal"] is None:
            assert lever["signal_per_gpu_hour"] is None
            continue
        expected = 3600 * lever["relative_signal"] / lever["seconds_per_video"]
        assert lever["signal_per_gpu_hour"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model.checkpointing=none"], {"model.checkpointing": ["selective", "full"]}),
        (["--model.checkpointing=feed_forward"], {"model.checkpointing": ["selective", "full"]}),
        (["--model.checkpointing=auto"], {"model.checkpointing": ["selective", "full"]}),
        (["--model.lighter_blocks=3"], {"model.checkpointing": ["full"], "model.lighter_blocks": [0]}),
    ],
)
def test_what_blocks_could_keep_less(words: list[str], expected: dict[str, list[Any]]) -> None:
    plan: Any = made_plan(load_config(RECIPE, words))
    plan.tiled, plan.gathered, plan.device = True, SimpleNamespace(sharded=False), SimpleNamespace(link=1.0)
    found: dict[str, list[Any]] = {}
    for key, value in search._changes(plan):
        found.setdefault(key, []).append(value)
    assert {key: found.get(key) for key in ("model.checkpointing", "model.lighter_blocks") if key in found} == expected
