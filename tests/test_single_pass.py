"""The gradient taken during the rollout is the gradient of the two phases, in every setting that it allows."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, TrainingError
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import LoraConfig
from sage_fast.objective import KL_MODES, kl_uses
from sage_fast.run.run import build_trainer
from sage_fast.single_pass import SinglePassGradient
from tests.made_runs import untimed
from tests.tiny.velocity_field import move_weights, relative, use_smooth_velocity

MakeRun = Callable[..., RunConfig]


def single_video(tiny_run: MakeRun, *overrides: str) -> MakeRun:
    """`tiny_run` with one video at a time, as single_pass needs it; `update` goes last."""

    def make(update: str, *more: str) -> RunConfig:
        return tiny_run("--rollout.micro_batch_size=1", *overrides, *more, f"--training.update={update}")

    return make


class PickyReward:
    """Brightness; fails for prompts with a word."""

    def __init__(self, word: str = "red") -> None:
        self.word = word

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if any(self.word in prompt for prompt in prompts):
            raise ConnectionError("the scoring server is gone")
        return {"brightness": videos.float().mean((1, 2, 3, 4))}


@pytest.fixture
def two_prompts(tmp_path: Path) -> list[str]:
    """Overrides: a rollout of two prompts, the reward of one of which fails."""
    file = tmp_path / "two.txt"
    file.write_text("a red circle moving left\na blue square moving up\n")
    return [
        f"--data.prompts={file}",
        "--evaluation.every=0",
        "--evaluation.num_prompts=null",
        f"--reward.rewards=['{__name__}:PickyReward']",
        "--reward.weights={brightness: 1}",
        "--reward.on_failure=drop_group",
    ]


def train(
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    iterations: int = 1,
    moved: bool = True,
    smooth: bool = False,
) -> tuple[list[dict[str, float]], list[Tensor], list[Tensor]]:
    """Metrics of some iterations, the gradient of each update, and the last weights.

    moved: the policy has left its anchor before the first rollout. smooth: in float64, see `use_smooth_velocity`.
    """
    trainer = build_trainer(config)
    found: list[Tensor] = []
    with monkeypatch.context() as patch:
        if smooth:
            use_smooth_velocity(trainer, patch)
        if moved:
            move_weights(trainer)
        step = trainer.engine.step

        def observed() -> None:
            found.append(torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None]))
            step()

        patch.setattr(trainer.engine, "step", observed)
        records = [trainer.iterate() for _ in range(iterations)]
    return records, found, [p.detach() for p in trainer.parameters.values()]


def assert_same_numbers(two_phase: dict[str, float], single: dict[str, float], rel: float) -> None:
    assert two_phase.keys() == single.keys()
    for key, value in untimed(two_phase).items():
        tolerance = 1e-4 if key.startswith(("reward", "advantage")) else 1e-9
        assert single[key] == pytest.approx(value, rel=rel, abs=tolerance), key


# A weight of the KL terms at which they are a good part of the gradient.
STRONG_KL = ["--kl_weight.minimum=0.5", "--kl_weight.maximum=0.5", "--objective.kl_velocity_weight=0.7"]
SETTINGS = {
    "no-kl": ["--objective.kl_mode=none"],
    "no-equalizer": ["--objective.kl_mode=none", "--objective.equalizer=false"],
    "fixed": ["--objective.kl_mode=fixed"],
    "moving": ["--objective.kl_mode=moving"],
    "stepwise": ["--objective.kl_mode=stepwise"],
    "stepwise-exact": ["--objective.kl_mode=stepwise", "--objective.kl_velocity=exact"],
    "fixed-stepwise": ["--objective.kl_mode=fixed_stepwise"],
    "dual": ["--objective.kl_mode=dual"],
    "dual-exact": ["--objective.kl_mode=dual", "--objective.kl_velocity=exact"],
    "dual-velocity-alone": ["--objective.kl_mode=dual", "--objective.kl_position_weight=0"],
    "unnormalized-cps": ["--rollout.sde_type=cps", "--objective.logprob=unnormalized", "--objective.kl_mode=stepwise"],
    "unnormalized-cps-dual": ["--rollout.sde_type=cps", "--objective.logprob=unnormalized", "--objective.kl_mode=dual"],
    "bias-corrected": ["--objective.ratio=bias_corrected", "--rollout.sde_type=dance_grpo", "--objective.kl_mode=dual"],
    "ratio-norm": ["--objective.ratio=ratio_norm", "--objective.equalizer=false", "--rollout.sde_type=sage_exact"],
    "no-guidance": ["--rollout.guidance_scale=1", "--objective.kl_mode=dual"],
    "split": ["--rollout.guidance_scale=6", "--training.guidance=split", "--objective.kl_mode=dual"],
    "fraction": ["--rollout.num_steps=6", "--training.timestep_fraction=0.5", "--objective.kl_mode=dual"],
    "window": [
        "--rollout.sde_type=flow_grpo",
        "--rollout.num_steps=6",
        "--rollout.sde_window.size=2",
    ],
    "global-advantages": ["--advantage.std=global", "--rollout.batch_size=8", "--rollout.num_generations=4"],
}


FRESH = ("no-kl", "stepwise", "dual", "split")
"""Settings that are also run with an anchor that is the policy."""


@pytest.mark.parametrize(("name", "moved"), [*((name, True) for name in SETTINGS), *((name, False) for name in FRESH)])
def test_in_float64_it_is_the_two_phase_gradient(
    tiny_run: MakeRun, name: str, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = single_video(tiny_run, *STRONG_KL, *SETTINGS[name])
    two_phase, single = (
        train(config(update), monkeypatch, moved=moved, smooth=True) for update in ("two_phase", "single_pass")
    )
    assert single[1][0].dtype == torch.float64 and float(single[1][0].norm()) > 0
    assert relative(single[1][0], two_phase[1][0]) < 1e-10
    assert_same_numbers(two_phase[0][0], single[0][0], rel=1e-6)
    assert single[0][0]["ratio/first_max_deviation"] == 0.0
    uses_anchor = moved and any(f"kl_mode={mode}" in "".join(SETTINGS[name]) for mode in KL_MODES if kl_uses(mode)[0])
    if uses_anchor:
        assert single[0][0]["kl/position"] > 0


def test_every_kl_mode_and_sampler_is_among_the_settings() -> None:
    """A KL term that is added to `policy_loss` must be added to the accumulators too."""
    given = {word for overrides in SETTINGS.values() for word in overrides}
    assert {f"--objective.kl_mode={mode}" for mode in KL_MODES} <= given
    assert {"--rollout.sde_type=cps", "--rollout.sde_type=dance_grpo", "--rollout.sde_type=flow_grpo"} <= given


def test_a_dropped_group_takes_no_part(
    tiny_run: MakeRun, two_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = single_video(tiny_run, *STRONG_KL, *two_prompts, "--objective.kl_mode=dual")
    two_phase, single = (train(config(update), monkeypatch, smooth=True) for update in ("two_phase", "single_pass"))
    assert single[0][0]["reward/dropped_groups"] == 1
    assert relative(single[1][0], two_phase[1][0]) < 1e-10
    assert_same_numbers(two_phase[0][0], single[0][0], rel=1e-6)


# ------------------------------------------------------------------------------------------ the model

# Adam's first updates follow the sign of a gradient; a larger epsilon lets both sides' rounding stay rounding.
SMOOTH_ADAM = ["--optimizer.eps=1e-3", "--optimizer.learning_rate=1e-2", "--training.num_updates=4"]
SMALL = ["--rollout.num_steps=3", "--evaluation.every=0"]
TRAININGS = {
    "no-kl": ["--objective.kl_mode=none"],
    "moving-average": ["--objective.kl_mode=moving", "--training.anchor_interval=2", "--training.ema_decay=0.9"],
    "dual-split": ["--objective.kl_mode=dual", "--training.anchor_interval=2", "--training.guidance=split"],
    "stepwise-cps": ["--objective.kl_mode=stepwise", "--rollout.sde_type=cps", "--objective.logprob=unnormalized"],
    "stock-checkpointed-window": [
        "--model.forward=stock",
        "--model.checkpointing=full",
        "--objective.kl_mode=dual",
        "--rollout.sde_window.size=2",
    ],
    "checkpointed-dual": [
        "--model.checkpointing=selective",
        "--objective.kl_mode=dual",
        "--rollout.guidance_scale=1",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_whole_trainings_agree(tiny_run: MakeRun, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = single_video(tiny_run, *SMOOTH_ADAM, *SMALL, *STRONG_KL, *TRAININGS[name])
    two_phase, single = (
        train(config(update), monkeypatch, iterations=3, moved=False) for update in ("two_phase", "single_pass")
    )
    assert relative(single[1][0], two_phase[1][0]) < 1e-5
    for before, after in zip(two_phase[0], single[0], strict=True):
        assert before.keys() == after.keys()
        assert after["ratio/first_max_deviation"] == after["log_ratio/mean"] == 0.0
        for key in untimed(before):
            assert after[key] == pytest.approx(before[key], rel=1e-3, abs=1e-4 if "reward" in key else 2e-6), key
    for a, b in zip(two_phase[2], single[2], strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_with_the_kernels_of_sage_kernels(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    config = single_video(
        tiny_run, *STRONG_KL, "--model.kernels=triton", "--model.forward=stock", "--objective.kl_mode=dual"
    )
    small = ("--rollout.num_steps=2", "--rollout.batch_size=2", "--evaluation.every=0")
    two_phase, single = (train(config(update, *small), monkeypatch) for update in ("two_phase", "single_pass"))
    assert relative(single[1][0], two_phase[1][0]) < 1e-5
    assert_same_numbers(two_phase[0][0], single[0][0], rel=1e-5)


def test_the_rollout_is_the_same_to_the_bit(tiny_run: MakeRun) -> None:
    finals = []
    for update in ("two_phase", "single_pass"):
        trainer = build_trainer(single_video(tiny_run)(update))
        move_weights(trainer)
        trainer.gradient.begin(trainer.kl_weight.weight, trainer.anchor, [1.0] * 4)
        finals.append(torch.cat([t.final for t in trainer._rollout()]))
    assert torch.equal(finals[0], finals[1])


def test_one_accumulator_per_video_and_one_per_group_where_a_kl_acts(tiny_run: MakeRun) -> None:
    for kl_mode, anchor_behind, per_group in (
        ("none", True, False), ("moving", False, False), ("moving", True, True), ("stepwise", False, True),
    ):  # fmt: skip
        trainer = build_trainer(single_video(tiny_run)("single_pass", f"--objective.kl_mode={kl_mode}"))
        gradient = trainer.gradient
        assert isinstance(gradient, SinglePassGradient)
        move_weights(trainer)
        gradient.begin(trainer.kl_weight.weight, trainer.anchor if anchor_behind else None, [1.0] * 4)
        trajectories = trainer._rollout()
        sums = {id(s): s for video in gradient._videos for s in (video.surrogate, video.kl)}
        allocated = [s for s in sums.values() if any(value is not None for value in s.values)]
        assert len(allocated) == 4 + (2 if per_group else 0)
        size = sum(p.numel() for p in trainer.parameters.values())
        assert all(sum(v.numel() for v in s.values if v is not None) == size for s in allocated)
        assert all(p.grad is None for p in trainer.parameters.values())
        scored = trainer._score(trajectories, {})
        gradient.accumulate(scored, range(len(scored.orders[0])), trainer.kl_weight.weight)
        assert not gradient._videos and all(p.grad is not None for p in trainer.parameters.values())


# (update, guidance scale, branches, anchor fresh): forwards per video in (phase, with gradient).
PHASES = {
    ("two_phase", 1, "paired", True): {("rollout", False): 4, ("update", True): 4},
    ("two_phase", 1, "paired", False): {("rollout", False): 4, ("anchor", False): 4, ("update", True): 4},
    ("two_phase", 6, "paired", True): {("rollout", False): 8, ("update", True): 8},
    ("two_phase", 6, "paired", False): {("rollout", False): 8, ("anchor", False): 8, ("update", True): 8},
    ("two_phase", 6, "split", True): {("rollout", False): 8, ("update", True): 8},
    ("two_phase", 6, "split", False): {("rollout", False): 8, ("anchor", False): 8, ("update", True): 8},
    ("single_pass", 1, "paired", True): {("rollout", True): 4},
    ("single_pass", 1, "paired", False): {("rollout", True): 4, ("rollout", False): 4},
    ("single_pass", 6, "paired", True): {("rollout", True): 8},
    ("single_pass", 6, "paired", False): {("rollout", True): 8, ("rollout", False): 8},
    ("single_pass", 6, "split", True): {("rollout", True): 8},
    # The cotangent of the KL to the anchor needs the whole velocity before the first branch is differentiated.
    ("single_pass", 6, "split", False): {("rollout", True): 8, ("rollout", False): 8 + 4},
}


@pytest.mark.slow
@pytest.mark.parametrize(("update", "scale", "branches"), [key[:3] for key in PHASES if key[3]])
def test_forwards_of_the_transformer_per_phase(
    tiny_run: MakeRun, update: str, scale: int, branches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 videos of 4 steps; the anchor is refreshed every second update, and then its forwards are not needed."""
    trainer = build_trainer(
        single_video(tiny_run)(
            update,
            f"--rollout.guidance_scale={scale}",
            f"--training.guidance={branches}",
            "--training.anchor_interval=2",
            "--training.num_updates=4",
            "--evaluation.every=0",
        )
    )
    counts: dict[tuple[str, bool], int] = {}
    phase = ""
    enter = trainer._phase

    def entering(name: str):
        nonlocal phase
        phase = name
        return enter(name)

    def count(*_: object) -> None:
        key = (phase, torch.is_grad_enabled())
        counts[key] = counts.get(key, 0) + 1

    monkeypatch.setattr(trainer, "_phase", entering)
    trainer.policy.transformer.register_forward_pre_hook(count)
    steps: list[int] = []
    optimize = trainer.engine.step
    monkeypatch.setattr(trainer.engine, "step", lambda: (steps.append(1), optimize()))
    for iteration in range(4):
        counts.clear()
        steps.clear()
        record = trainer.iterate()
        fresh = iteration % 2 == 0
        assert counts == {key: 4 * n for key, n in PHASES[update, scale, branches, fresh].items()}
        assert len(steps) == 1 and (record["kl/position"] == 0) == fresh
        assert {"time/rollout", "time/reward", "time/anchor", "time/update"} <= record.keys()


def test_untrained_steps_have_no_graph(tiny_run: MakeRun) -> None:
    trainer = build_trainer(
        single_video(tiny_run)("single_pass", "--rollout.num_steps=6", "--rollout.sde_window.size=2")
    )
    modes: list[bool] = []
    trainer.policy.transformer.register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    trainer.iterate()
    pairs = modes[0:12:2]
    assert pairs == modes[1:12:2] == [True, True, False, False, False, False]


# ------------------------------------------------------------------------------------------ runs, faults, refusals


def test_a_rollout_whose_reward_failed_leaves_nothing_behind(
    tiny_run: MakeRun, two_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*two_prompts, "--objective.kl_mode=none", "--training.num_updates=4"]
    trainer = build_trainer(single_video(tiny_run, *given)("single_pass"))
    clean = build_trainer(single_video(tiny_run, *given)("single_pass"))
    with monkeypatch.context() as patch:
        patch.setattr(PickyReward, "score", lambda *_: (_ for _ in ()).throw(ConnectionError("gone")))
        with pytest.raises(TrainingError, match="failed in every group"):
            trainer.iterate()
    again, expected = trainer.iterate(), clean.iterate()
    assert untimed(again) == untimed(expected)


def test_a_nan_stops_before_the_weights_change(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(single_video(tiny_run, "--objective.kl_mode=none")("single_pass"))
    before = [p.detach().clone() for p in trainer.parameters.values()]
    differentiate = torch.autograd.grad

    def poisoned(*arguments, **options) -> tuple[Tensor, ...]:
        return tuple(g * float("nan") for g in differentiate(*arguments, **options))

    monkeypatch.setattr(torch.autograd, "grad", poisoned)
    with pytest.raises(TrainingError, match=r"Update 1: the gradient norm .* is not finite.*not changed"):
        trainer.iterate()
    assert all(torch.equal(a, p) for a, p in zip(before, trainer.parameters.values(), strict=True))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--training.mode=full"], ["training.mode is 'full'", "Set it to lora", "two_phase"]),
        (
            ["--training.updates_per_rollout=2"],
            ["training.updates_per_rollout is 2", "Set it to 1", "two_phase"],
        ),
        (["--rollout.micro_batch_size=2"], ["rollout.micro_batch_size is 2", "Set it to 1", "two_phase"]),
    ],
)
def test_what_it_cannot_do_is_refused(tiny_run: MakeRun, overrides: list[str], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        single_video(tiny_run)("single_pass", *overrides)
    assert all(part in str(error.value) for part in ["training.update single_pass", *expected])
    single_video(tiny_run)("two_phase", *overrides)


def test_a_kl_for_which_it_does_not_pay_is_said_aloud(tiny_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    for kl_mode, said in (("none", False), ("stepwise", False), ("moving", True), ("dual", True)):
        caplog.clear()
        with caplog.at_level("INFO"):
            build_trainer(single_video(tiny_run)("single_pass", f"--objective.kl_mode={kl_mode}"))
        assert ("two_phase is faster here" in caplog.text) == said


def test_the_stated_size_of_an_accumulator(tiny_run: MakeRun) -> None:
    """225 MB in the config's help and docs/policy.md: rank 32 on the default layers, without the two dead ones."""
    from diffusers import HunyuanVideo15Transformer3DModel

    from sage_fast.policy.lora import lora_targets

    with torch.device("meta"):
        transformer = HunyuanVideo15Transformer3DModel()
    lora = LoraConfig()
    layers = [transformer.get_submodule(n) for n in lora_targets(transformer, lora.target_modules)]
    assert len(layers) == 430 and lora.rank == 32
    assert sum(lora.rank * (layer.in_features + layer.out_features) * 4 for layer in layers) // 10**6 == 225
