"""The gradient taken during the rollout is the gradient of the two phases, in every
setting that it allows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import KLMode, kl_uses
from sage_fast.data import make_groups
from sage_fast.distributed.engine import WeightSnapshot
from sage_fast.objectives.single_pass import SinglePass, VideoGradient
from sage_fast.rollout import noise_keys, rollout_table, step_sigma
from sage_fast.run.run import build_trainer
from tests.made_runs import untimed
from tests.test_gradient import STRONG_KL, videos_of
from tests.tiny.velocity_field import move_weights, relative, use_smooth_velocity

MakeRun = Callable[..., RunConfig]


def single_video(tiny_run: MakeRun, *overrides: str) -> MakeRun:
    """`tiny_run` with one video at a time, as single_pass needs it; `update` goes last."""

    def make(update: str, *more: str) -> RunConfig:
        return tiny_run(
            *overrides,
            *more,
            "--rollout.micro_batch_size=1",
            f"--training.update={update}",
        )

    return make


def train(
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    iterations: int = 1,
    moved: bool = True,
    smooth: bool = False,
) -> tuple[list[dict[str, float]], list[Tensor], list[Tensor]]:
    """Metrics of some iterations, the gradient of each update, and the last weights.

    moved: the policy has left its anchor before the first rollout. smooth: in float64,
    see `use_smooth_velocity`.
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
            found.append(
                torch.cat(
                    [
                        p.grad.flatten()
                        for p in trainer.parameters.values()
                        if p.grad is not None
                    ]
                )
            )
            step()

        patch.setattr(trainer.engine, "step", observed)
        records = [trainer.iterate() for _ in range(iterations)]
    return records, found, [p.detach() for p in trainer.parameters.values()]


def assert_same_numbers(
    two_phase: dict[str, float], single: dict[str, float], rel: float
) -> None:
    assert two_phase.keys() == single.keys()
    for key, value in untimed(two_phase).items():
        tolerance = 1e-4 if key.startswith(("reward", "advantage")) else 1e-9
        assert single[key] == pytest.approx(value, rel=rel, abs=tolerance), key


SETTINGS = {
    "no-equalizer": ["--objective.kl_mode=none", "--objective.equalizer=false"],
    "fixed": ["--objective.kl_mode=fixed"],
    "stepwise": ["--objective.kl_mode=stepwise"],
    "fixed-stepwise": ["--objective.kl_mode=fixed_stepwise"],
    "dual-velocity-alone": [
        "--objective.kl_mode=dual",
        "--objective.kl_position_weight=0",
    ],
    "unnormalized-cps": [
        "--rollout.sde_type=cps",
        "--objective.ratio=unnormalized",
        "--objective.kl_mode=stepwise",
    ],
    "bias-corrected": [
        "--objective.ratio=bias_corrected",
        "--rollout.sde_type=dance_grpo",
        "--objective.kl_mode=dual",
    ],
    "ratio-norm": [
        "--objective.ratio=ratio_norm",
        "--objective.equalizer=false",
        "--rollout.sde_type=sage_exact",
    ],
    "split": [
        "--rollout.guidance_scale=6",
        "--training.guidance=split",
        "--objective.kl_mode=dual",
    ],
    "fraction": [
        "--rollout.num_steps=6",
        "--training.timestep_fraction=0.5",
        "--objective.kl_mode=dual",
    ],
    "moving-window-global-advantages": [
        "--objective.kl_mode=moving",
        "--rollout.sde_type=flow_grpo",
        "--rollout.sde_window.size=2",
        "--advantage.std=global",
    ],
}


FRESH = ("stepwise", "split")
"""Settings that are also run with an anchor that is the policy."""


@pytest.mark.parametrize(
    ("name", "moved"),
    [*((name, True) for name in SETTINGS), *((name, False) for name in FRESH)],
)
def test_in_float64_it_is_the_two_phase_gradient(
    tiny_run: MakeRun, name: str, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--rollout.num_steps=3", *STRONG_KL, *SETTINGS[name]]
    config = single_video(tiny_run, *words)
    two_phase, single = (
        train(config(update), monkeypatch, moved=moved, smooth=True)
        for update in ("two_phase", "single_pass")
    )
    assert single[1][0].dtype == torch.float64 and float(single[1][0].norm()) > 0
    assert relative(single[1][0], two_phase[1][0]) < 1e-10
    assert_same_numbers(two_phase[0][0], single[0][0], rel=1e-6)
    assert single[0][0]["ratio/first_max_deviation"] == 0.0
    uses_position = kl_uses(config("single_pass").objective.kl_mode)[0]
    assert (single[0][0]["kl/position"] > 0) == (moved and uses_position)


def test_every_kl_mode_and_sampler_is_among_the_settings() -> None:
    """A KL term that is added to `policy_loss` must be added to the accumulators too."""
    given = {word for overrides in SETTINGS.values() for word in overrides}
    assert {f"--objective.kl_mode={mode}" for mode in get_args(KLMode)} <= given
    assert {
        "--rollout.sde_type=cps",
        "--rollout.sde_type=dance_grpo",
        "--rollout.sde_type=flow_grpo",
    } <= given


def test_a_dropped_group_takes_no_part(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        *STRONG_KL,
        *videos_of(tmp_path, "triangle", "square"),
        "--objective.kl_mode=dual",
        "--rollout.num_steps=2",
    ]
    config = single_video(tiny_run, *words)
    two_phase, single = (
        train(config(update), monkeypatch, smooth=True)
        for update in ("two_phase", "single_pass")
    )
    assert single[0][0]["reward/dropped_groups"] == 1
    assert relative(single[1][0], two_phase[1][0]) < 1e-10
    assert_same_numbers(two_phase[0][0], single[0][0], rel=1e-6)


# --------------------------------------------------------------------------------------
# the model

# Adam's first updates follow the sign of a gradient; a larger epsilon lets both sides'
# rounding stay rounding.
SMOOTH_ADAM = [
    "--optimizer.eps=1e-3",
    "--optimizer.learning_rate=1e-2",
    "--training.num_updates=4",
]
SMALL = ["--rollout.num_steps=3", "--evaluation.every=0"]
TRAININGS = {
    "dual-split": [
        "--objective.kl_mode=dual",
        "--training.anchor_interval=2",
        "--training.guidance=split",
    ],
    "stock-checkpointed-window": [
        "--model.forward=stock",
        "--model.checkpointing=full",
        "--objective.kl_mode=dual",
        "--rollout.sde_window.size=2",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_whole_trainings_agree(
    tiny_run: MakeRun, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = single_video(tiny_run, *SMOOTH_ADAM, *SMALL, *STRONG_KL, *TRAININGS[name])
    two_phase, single = (
        train(config(update), monkeypatch, iterations=3, moved=False)
        for update in ("two_phase", "single_pass")
    )
    assert relative(single[1][0], two_phase[1][0]) < 1e-5
    for before, after in zip(two_phase[0], single[0], strict=True):
        assert before.keys() == after.keys()
        assert after["ratio/first_max_deviation"] == after["log_ratio/mean"] == 0.0
        for key in untimed(before):
            assert after[key] == pytest.approx(
                before[key], rel=1e-3, abs=1e-4 if "reward" in key else 2e-6
            ), key
    for a, b in zip(two_phase[2], single[2], strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=2e-4)


def test_the_rollout_is_the_same_to_the_bit(tiny_run: MakeRun) -> None:
    finals = []
    for update in ("two_phase", "single_pass"):
        trainer = build_trainer(tiny_run(f"--training.update={update}"))
        move_weights(trainer)
        trainer.objective.begin(0, 0)
        finals.append(torch.cat([t.final for t in trainer._rollout()[0]]))
    assert torch.equal(finals[0], finals[1])


def test_one_accumulator_per_video_and_one_per_group_where_a_kl_acts(
    tiny_run: MakeRun,
) -> None:
    for kl_mode, anchor_behind, per_group in (
        ("none", True, False), ("moving", False, False), ("moving", True, True), ("stepwise", False, True),
    ):  # fmt: skip
        words = [f"--objective.kl_mode={kl_mode}", "--rollout.num_steps=2"]
        trainer = build_trainer(single_video(tiny_run)("single_pass", *words))
        objective = trainer.objective
        assert isinstance(objective, SinglePass)
        move_weights(trainer)
        objective.anchor_update = -1 if anchor_behind else 0
        objective.begin(0, 0)
        rollout = trainer._rollout()
        sums = {
            id(s): s for video in objective._videos for s in (video.surrogate, video.kl)
        }
        allocated = [s for s in sums.values() if s.values]
        assert len(allocated) == 4 + (2 if per_group else 0)
        size = sum(p.numel() for p in trainer.parameters.values())
        assert all(sum(v.numel() for v in s.values.values()) == size for s in allocated)
        scored, _ = trainer._score(*rollout)
        objective.accumulate(scored, range(len(scored.orders[0])), 0)
        assert not objective._videos


PARTS = [
    "--rollout.num_steps=4",
    "--training.timestep_fraction=0.5",
    "--objective.kl_position_fraction=0.5",
]
BATCHES = {
    "parts": ["--objective.kl_mode=dual", "--rollout.guidance_scale=1", *PARTS],
    "stock-split": [
        "--training.guidance=split",
        "--objective.kl_mode=dual",
        "--model.forward=stock",
        "--model.checkpointing=full",
    ],
    "lengths": ["--objective.kl_mode=stepwise", "--lora.rank=3"],
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_leaves_each_video_the_gradient_that_it_has_alone(
    tiny_run: MakeRun, tmp_path: Path, name: str
) -> None:
    """In float64, at the same states: sums, terms and velocities of a micro-batch of 4
    are those of 4 micro-batches.
    """

    file = tmp_path / "prompts.txt"
    file.write_text(
        f"a {'' if name == 'lengths' else 'red '}circle moving left\na blue square "
        "moving up\n"
    )

    def collected(size: int) -> tuple[list[VideoGradient], list[Tensor]]:
        words = [
            *STRONG_KL,
            "--rollout.num_steps=2",
            f"--data.prompts={file}",
            "--evaluation.num_prompts=2",
            *BATCHES[name],
        ]
        trainer = build_trainer(
            tiny_run(
                *words,
                "--training.update=single_pass",
                f"--rollout.micro_batch_size={size}",
            )
        )
        objective = trainer.objective
        table = rollout_table(trainer.config.rollout, 0)
        assert isinstance(objective, SinglePass)
        if name != "stock-split":  # diffusers' own forward passes through float32
            trainer.policy.transformer.double()
        move_weights(trainer)
        if objective.anchor is not None:
            objective.anchor = WeightSnapshot(
                {name: p * 0.9 for name, p in trainer.parameters.items()}
            )
            objective.anchor._parameters = trainer.parameters
        objective.begin(0, 0)
        samples = make_groups(
            trainer._prompts(), lambda prompt: trainer.embed(prompt.text), 2, range(4)
        )
        generator = torch.Generator().manual_seed(3)
        states = torch.randn(
            table.num_steps, 4, *trainer.latent_shape, generator=generator
        )
        velocities = []
        for first in range(0, 4, size):
            rows = slice(first, first + size)
            velocity = objective.velocity(
                samples[rows], noise_keys(samples[rows], 0, 0), table
            )
            sigmas = [step_sigma(table, [step] * size) for step in range(len(states))]
            of_steps = [
                velocity(step, states[step, rows], sigma)
                for step, sigma in enumerate(sigmas)
            ]
            velocities += torch.stack(of_steps, dim=1).unbind()
        return objective._videos, velocities

    (alone, velocities_alone) = collected(1)
    (together, velocities) = collected(4)
    for expected, found in zip(velocities_alone, velocities, strict=True):
        assert relative(found, expected) < (1e-5 if name == "stock-split" else 1e-6)
    assert len({id(video.kl) for video in together}) == 2
    for one, other in zip(alone, together, strict=True):
        assert one.kl_factors == other.kl_factors
        for expected, found in ((one.surrogate, other.surrogate), (one.kl, other.kl)):
            assert expected.values.keys() == found.values.keys()
            for key, value in expected.values.items():
                tolerance = 1e-5 if name == "stock-split" else 1e-12
                assert relative(found.values[key], value) < tolerance
        for (slope, terms), (other_slope, other_terms) in zip(
            one.terms, other.terms, strict=True
        ):
            torch.testing.assert_close(other_slope, slope, rtol=1e-6, atol=1e-9)
            for expected, found in zip(terms, other_terms, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_group_begins_where_it_does_among_all_ranks(tiny_run: MakeRun) -> None:
    """A rank whose first video is the third of a group of four."""
    trainer = build_trainer(
        tiny_run("--training.update=single_pass", "--rollout.num_generations=4")
    )
    objective = trainer.objective
    config = trainer.config
    assert isinstance(objective, SinglePass)
    objective.first_video = 6
    objective.begin(0, 0)
    samples = make_groups(
        trainer._prompts() * 4,
        lambda prompt: trainer.embed(prompt.text),
        4,
        range(6, 14),
    )
    objective.velocity(
        samples, noise_keys(samples, 0, 0), rollout_table(config.rollout, 0)
    )
    sums = [video.kl for video in objective._videos]
    assert [row for row in range(8) if row == 0 or sums[row] is not sums[row - 1]] == [
        0,
        2,
        6,
    ]


def test_terms_of_a_batch_are_in_the_order_of_two_phases(tiny_run: MakeRun) -> None:
    losses = []
    for update in ("two_phase", "single_pass"):
        words = [
            f"--training.update={update}",
            "--objective.kl_mode=none",
            "--training.permute_timesteps=false",
        ]
        trainer = build_trainer(tiny_run(*words, "--rollout.micro_batch_size=4"))
        trainer.objective.begin(0, 0)
        scored, _ = trainer._score(*trainer._rollout())
        losses.append(
            trainer.objective.accumulate(scored, range(len(scored.orders[0])), 0).loss
        )
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-7)
    # They differ from video to video, so another order would show.
    assert len({round(loss, 5) for loss in losses[0][:4].tolist()}) == 4


def test_untrained_steps_have_no_graph(tiny_run: MakeRun) -> None:
    words = ("--rollout.num_steps=6", "--rollout.sde_window.size=2")
    trainer = build_trainer(single_video(tiny_run)("single_pass", *words))
    trainer.objective.begin(0, 0)
    modes: list[bool] = []
    trainer.policy.transformer.register_forward_pre_hook(
        lambda *_: modes.append(torch.is_grad_enabled())
    )
    trainer._rollout()
    pairs = modes[0:12:2]
    assert pairs == modes[1:12:2] == [True, True, False, False, False, False]
