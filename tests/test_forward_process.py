"""The forward-process objective against formulas written down on their own, and its
work in a training.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import ForwardProcessConfig
from sage_fast.noise import STREAM_FORWARD, NoiseKey, gaussian
from sage_fast.objectives.forward_process import (
    ForwardProcess,
    allowed_steps,
    forward_loss,
    level_steps,
    old_decay,
)
from sage_fast.records import PromptEmbeds, ScoredRollout, Trajectory
from sage_fast.rollout import VideoScoring, initial_latents
from sage_fast.run.run import build_trainer
from sage_fast.sde import sigma_schedule, transition_table
from tests.made_runs import untimed
from tests.test_gradient import EXACT, STRONG_KL, Estimates, passes, videos_of
from tests.test_wrong_updates import poison_gradients
from tests.tiny.velocity_field import (
    move_weights,
    relative,
    smooth_velocity,
    use_smooth_velocity,
)

MakeRun = Callable[..., RunConfig]
FORWARD = (
    "--training.update=forward_process",
    "--objective.kl_mode=none",
    "--rollout.sde_type=ode",
)
BOUND = 5.0


def levels_of(
    objective: ForwardProcess, key: NoiseKey, trajectory: Trajectory
) -> Tensor:
    """Noise levels (K,) at which a video is trained."""
    steps = allowed_steps(objective.process, trajectory.table)
    return trajectory.table.sigmas[level_steps(key, steps, objective.process.levels)]


class Drawn:
    """Random velocities of two samples in float64."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(4, 2, 3, 2, 4, 4, generator=generator, dtype=torch.float64)
        self.velocity, self.old, self.anchor, self.target = drawn
        self.sigma = torch.tensor([0.9, 0.35], dtype=torch.float64)

    def gradient(
        self,
        settings: ForwardProcessConfig,
        advantage: float,
        kl: float = 0.0,
        **other: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Loss (B,) and its derivative by the velocity."""
        velocity = self.velocity.clone().requires_grad_()
        terms = forward_loss(
            velocity,
            self.target,
            other.get("old", self.old),
            self.anchor if kl else None,
            sigma=self.sigma,
            advantage=torch.full((2,), advantage, dtype=torch.float64),
            anchor_weight=kl,
            settings=settings,
        )
        (gradient,) = torch.autograd.grad(terms.loss.sum(), velocity)
        return terms.loss.detach(), gradient


def weight_of(drawn: Drawn, row: int, weighting: str) -> float:
    s = float(drawn.sigma[row])
    if weighting == "velocity":
        return 1.0
    error = float((drawn.target[row] - drawn.velocity[row]).abs().mean())
    return s * s / max(1e-5, s * error) if weighting == "adaptive" else s * s


@pytest.mark.parametrize(
    ("weighting", "error"),
    [
        ("adaptive", None),
        # It divides by the error of a video, of 1e-5 at least.
        ("adaptive", 1e-3),
        ("adaptive", 1e-7),
        ("x0", None),
        ("velocity", None),
    ],
)
@pytest.mark.parametrize("advantage", [-5.0, 0.0, 0.3])
def test_loss_and_gradient_are_those_of_the_formula(
    advantage: float, weighting: str, error: float | None
) -> None:
    drawn = Drawn()
    if error is not None:
        drawn.velocity = drawn.target + error
    kl = 0.04
    settings = ForwardProcessConfig(weighting=weighting, beta=0.3)  # type: ignore[arg-type]
    loss, gradient = drawn.gradient(settings, advantage, kl)
    for b in range(2):
        v = drawn.velocity[b]
        old = drawn.old[b]
        u = drawn.target[b]
        anchor = drawn.anchor[b]
        w = weight_of(drawn, b, weighting)
        moved = v - old
        terms = (
            w * (2 * advantage * (old - u) * moved + BOUND * 0.3 * moved**2)
            + kl * (v - anchor) ** 2
        )
        assert float(loss[b]) == pytest.approx(float(terms.mean()), rel=1e-10)
        slope = w * (2 * advantage * (old - u) + 2 * BOUND * 0.3 * moved) + 2 * kl * (
            v - anchor
        )
        torch.testing.assert_close(
            gradient[b], slope / v.numel(), rtol=1e-10, atol=1e-14
        )


@pytest.mark.parametrize("weighting", ["x0", "branches"])
@pytest.mark.parametrize("advantage", [-5.0, 2.0])
def test_the_two_branches_of_diffusion_nft_are_this_loss_and_a_constant(
    advantage: float, weighting: str
) -> None:
    """r |v+ - u|^2 + (1 - r) |v- - u|^2 with v+- = v_old +- beta dv and r = (A / A_max
    + 1) / 2, times A_max / beta.

    In the public codes each branch is over its own mean error of x0, which has no
    gradient.
    """
    settings = ForwardProcessConfig(weighting=weighting, beta=0.3)  # type: ignore[arg-type]
    losses = []
    gradients = []
    for seed in (1, 2):
        drawn = Drawn(3)
        drawn.velocity = Drawn(seed).velocity
        loss, gradient = drawn.gradient(settings, advantage)
        velocity = drawn.velocity.clone().requires_grad_()
        moved = velocity - drawn.old
        r = (advantage / BOUND + 1) / 2
        nft = torch.zeros(2, dtype=torch.float64)
        for share, sign in ((r, 1), (1 - r, -1)):
            error = (drawn.old + sign * 0.3 * moved - drawn.target).flatten(
                1
            ) * drawn.sigma[:, None]
            divisor = error.detach().abs().mean(1) if weighting == "branches" else 1
            nft = nft + BOUND / 0.3 * share * error.square().mean(1) / divisor
        (expected,) = torch.autograd.grad(nft.sum(), velocity)
        assert relative(gradient, expected) < 1e-12
        losses.append(nft.detach() - loss)
        gradients.append(gradient)
    if weighting == "x0":
        # the constant does not know v
        assert torch.allclose(losses[0], losses[1], rtol=1e-12)
    assert relative(gradients[0], gradients[1]) > 0.1


def test_at_the_old_policy_it_is_advantage_weighted_flow_matching() -> None:
    drawn = Drawn()
    for settings in (ForwardProcessConfig(), ForwardProcessConfig(clip=0.2)):
        _, gradient = drawn.gradient(settings, -1.5, old=None)
        velocity = drawn.velocity.clone().requires_grad_()
        weights = torch.tensor(
            [weight_of(drawn, b, "adaptive") for b in range(2)], dtype=torch.float64
        )
        awm = (
            -1.5 * weights * (velocity - drawn.target).square().flatten(1).mean(1)
        ).sum()
        (expected,) = torch.autograd.grad(awm, velocity)
        assert relative(gradient, expected) < 1e-12


def test_the_clip_stops_what_has_moved_far_enough() -> None:
    drawn = Drawn()
    # far nearer to the video than the old policy
    drawn.velocity = drawn.target + 0.1 * (drawn.old - drawn.target)
    settings = ForwardProcessConfig(clip=0.1, beta=0.0)
    assert not drawn.gradient(settings, 1.0)[1].any()
    assert drawn.gradient(settings, -1.0)[1].any()


def test_every_part_of_the_schedule_has_one_level() -> None:
    table = transition_table("ode", sigma_schedule(12, 5.0), 0.0)
    keys = [NoiseKey(0, 1, p, m) for p in range(40) for m in range(5)]
    steps = allowed_steps(ForwardProcessConfig(), table)
    drawn = torch.tensor([level_steps(key, steps, 4) for key in keys])
    assert torch.equal(drawn // 3, torch.arange(4).expand(len(keys), 4))
    assert len(set(drawn[:, 0].tolist())) == 3
    assert drawn[7].tolist() == level_steps(keys[7], steps, 4)


@pytest.mark.parametrize(
    ("within", "states", "sde_type", "expected"),
    [
        (1.0, "noised", "ode", range(8)),
        (0.5, "noised", "ode", range(4)),
        (0.1, "noised", "ode", range(1)),
        (1.0, "path", "sage_exact", range(7)),  # its last step draws no noise
        (1.0, "path", "sage_grpo", range(8)),
        (0.5, "path", "cps", range(4)),
    ],
)
def test_levels_lie_within_the_first_steps_and_on_the_path_where_noise_was_drawn(
    within: float, states: Literal["noised", "path"], sde_type: str, expected: range
) -> None:
    table = transition_table(sde_type, sigma_schedule(8, 3.0), 0.5)
    assert allowed_steps(
        ForwardProcessConfig(within=within, states=states), table
    ) == list(expected)
    window = table.restrict([2, 3])
    assert states == "noised" or allowed_steps(
        ForwardProcessConfig(within=within, states=states), window
    ) == [2, 3]


def test_schedules_of_the_old_policy() -> None:
    assert [old_decay("rising", n) for n in (0, 100, 900)] == [0.0, 0.1, 0.5]
    assert [old_decay("late", n) for n in (75, 95, 300)] == pytest.approx(
        [0.0, 0.15, 0.999]
    )
    assert old_decay(0.3, 7) == 0.3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Passes of the old policy and the anchor, and of the update; two micro-batches,
        # the second without advantages.
        (["--forward_process.old_decay=null"], (0, 4)),
        ([], (8, 8)),
        (
            [
                "--forward_process.old_decay=null",
                "--objective.kl_mode=fixed",
                "--objective.kl_position_fraction=0.5",
            ],
            (4, 6),
        ),
        (["--forward_process.levels=2", "--forward_process.old_decay=null"], (0, 2)),
    ],
)
def test_forwards_per_video(
    given: list[str],
    expected: tuple[int, int],
    tiny_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = build_trainer(
        tiny_run(*videos_of(tmp_path, "square", "circle"), *FORWARD, *given)
    )
    move_weights(trainer)
    counts = passes(trainer, monkeypatch)
    trainer.iterate()
    assert (counts["anchor"], counts["update"]) == expected
    assert counts["rollout"] == 2 * trainer.config.rollout.num_steps


def test_the_kl_at_a_share_of_the_levels_is_unbiased(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        *EXACT,
        *STRONG_KL,
        *FORWARD,
        "--forward_process.old_decay=null",
        "--forward_process.levels=3",
        "--rollout.num_steps=3",
        "--objective.kl_mode=fixed",
    )
    config = tiny_run(*words, "--objective.kl_position_fraction=0.5")
    found, whole, (metrics, *drawn) = Estimates(config, monkeypatch).over_positions()
    assert relative(found.mean(0), whole) < 1e-10
    assert relative(found[0], whole) > 1e-3
    assert sum(m["kl/anchor"] for m in drawn) / len(drawn) == pytest.approx(
        metrics["kl/anchor"], rel=1e-6
    )


def test_dropped_groups_take_no_part(tiny_run: MakeRun, tmp_path: Path) -> None:
    """Squares beside triangles, which cannot be scored, train as squares alone."""
    found = []
    for shapes in (("square", "triangle"), ("square",)):
        folder = tmp_path / str(len(shapes))
        folder.mkdir()
        trainer = build_trainer(
            tiny_run(
                *videos_of(folder, *shapes),
                *FORWARD,
                "--forward_process.old_decay=null",
            )
        )
        record = trainer.iterate()
        found.append(
            (record["loss"], [p.detach().clone() for p in trainer.parameters.values()])
        )
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7)
        for a, b in zip(found[0][1], found[1][1], strict=True)
    )


def test_split_guidance_and_full_training(tiny_run: MakeRun) -> None:
    records = []
    for guidance in ("paired", "split"):
        words = [
            *FORWARD,
            "--rollout.guidance_scale=3",
            "--training.mode=full",
            "--objective.kl_mode=fixed",
        ]
        trainer = build_trainer(tiny_run(*words, f"--training.guidance={guidance}"))
        records.append(untimed(trainer.iterate()))
    # Its largest parts are of elements whose gradient is nearly 0.
    shares = [record.pop("optimizer/eps_share") for record in records]
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)
    assert records[0] == pytest.approx(records[1], rel=1e-5, abs=1e-9)


def test_the_old_policy_samples_and_is_what_the_trained_one_has_left(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tiny_run(*FORWARD))
    move_weights(trainer)
    before = [p.detach().clone() for p in trainer.parameters.values()]
    sampled: list[Tensor] = []
    rollout = trainer._rollout

    def watched() -> tuple[list[Trajectory], VideoScoring]:
        sampled.extend(p.detach().clone() for p in trainer.parameters.values())
        return rollout()

    monkeypatch.setattr(trainer, "_rollout", watched)
    assert trainer.iterate()["old/deviation"] > 0
    assert not any(torch.equal(a, b) for a, b in zip(sampled, before, strict=True))
    assert (
        isinstance(trainer.objective, ForwardProcess)
        and trainer.objective.old is not None
    )
    averaged = trainer.objective.old.tensors()
    # The average of the first policy and the trained one.
    for p, old, first in zip(
        trainer.parameters.values(), averaged.values(), sampled, strict=True
    ):
        assert torch.allclose(old, (first + p) / 2, atol=1e-6)


def test_guided_samples_train_the_unguided_velocity(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples by hand along v_u + 3 (v_c - v_u), the loss with its KL and its gradient
    by hand at v_c alone, in float64.
    """
    words = [
        "--rollout.guidance_scale=1",
        "--forward_process.sampling_guidance=3",
        "--forward_process.old_decay=null",
        "--forward_process.weighting=x0",
        "--objective.kl_mode=fixed",
        "--objective.kl_position_weight=0.5",
        "--kl_weight.minimum=0.1",
        "--kl_weight.maximum=0.1",
    ]
    trainer = build_trainer(tiny_run(*FORWARD, *words))
    use_smooth_velocity(trainer, monkeypatch)
    move_weights(trainer)
    parameters = list(trainer.parameters.values())
    objective = trainer.objective
    negative = trainer.policy.uncond
    assert isinstance(objective, ForwardProcess) and objective.anchor is not None
    anchor = list(objective.anchor.values.values())

    def velocity(
        latents: Tensor,
        sigma: float,
        *prompts: PromptEmbeds,
        weights: Sequence[Tensor] = parameters,
    ) -> Tensor:
        texts = torch.stack([p.text.mean() + len(p.text) for p in prompts])
        levels = torch.full((len(latents),), sigma)
        return smooth_velocity(weights, latents, levels, texts)

    objective.begin(0, 0)
    scored, _ = trainer._score(*trainer._rollout())
    ((_, trajectory),) = scored.batches()
    embeds = [sample.embeds for sample in trajectory.samples]
    x = initial_latents(trajectory.keys, trainer.latent_shape)
    sigmas = trajectory.table.sigmas
    for s, after in itertools.pairwise(sigmas.tolist()):
        unguided = velocity(x, s, *[negative] * 4)
        conditional = velocity(x, s, *embeds)
        guided = unguided + 3 * (conditional - unguided)
        x = (x + (after - s) * guided).detach().float()
    torch.testing.assert_close(trajectory.final, x, rtol=1e-4, atol=1e-5)

    expected = torch.zeros((), dtype=torch.float64)
    for b, key in enumerate(trajectory.keys):
        for position, s in enumerate(
            levels_of(objective, key, trajectory).float().tolist()
        ):
            x0 = trajectory.final[b]
            level = torch.tensor(s)
            z = gaussian([key], position, tuple(x0.shape), stream=STREAM_FORWARD)[0]
            noised = ((1 - level) * x0 + level * z)[None]
            v = velocity(noised, s, embeds[b])[0]
            pulled = velocity(noised, s, embeds[b], weights=anchor)[0].detach()
            error = (v - (z - x0).double()).square().mean()
            expected = expected + s**2 * float(scored.advantages[b]) * error
            expected = expected + 0.1 * 0.5 * (v - pulled).square().mean()
    found = torch.autograd.grad(expected / 16, parameters)
    trainer.engine.zero_grad()
    objective.measure(scored)
    objective.accumulate(scored, range(4), 0)
    for p, wanted in zip(parameters, found, strict=True):
        assert p.grad is not None and relative(p.grad.double(), wanted.double()) < 1e-10


def test_updates_of_a_rollout_share_its_videos_and_the_old_policy_follows_once(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--rollout.micro_batch_size=1",
        "--training.updates_per_rollout=2",
        "--rollout.num_generations=4",
    ]
    trainer = build_trainer(tiny_run(*FORWARD, *words))
    assert (
        isinstance(trainer.objective, ForwardProcess)
        and trainer.objective.old is not None
    )
    trained = []
    averaged = []
    update = trainer._optimizer_update

    def watched(scored: ScoredRollout, positions: Sequence[int]) -> dict[str, float]:
        trained.append((scored.all_trained.tolist(), list(positions)))
        return update(scored, positions)

    monkeypatch.setattr(trainer, "_optimizer_update", watched)
    monkeypatch.setattr(
        trainer.objective.old, "average", lambda decay: averaged.append(trainer.update)
    )
    trainer.iterate()
    every = [0, 1, 2, 3]
    assert trained == [
        ([True, False] * 2, every),
        ([False, True] * 2, every),
    ] and averaged == [2]
    # One that is left out as the last of its rollout: what the first one moved is
    # followed all the same.
    again = build_trainer(
        tiny_run(*FORWARD, *words, "--training.skip_nonfinite_updates=1")
    )
    old = again.objective.old
    poison_gradients(again, monkeypatch, {1})
    before = {name: value.clone() for name, value in old.values.items()}
    assert again.iterate()["update/skipped_nonfinite"] == 1
    assert any(
        not torch.equal(value, before[name]) for name, value in old.values.items()
    )


def test_the_controller_moves_once_for_every_level_that_is_trained(
    tiny_run: MakeRun,
) -> None:
    words = [
        "--training.update=forward_process",
        "--objective.kl_mode=fixed",
        "--kl_weight.advance=step",
        "--training.updates_per_rollout=2",
        "--rollout.micro_batch_size=1",
        "--rollout.num_steps=2",
        "--forward_process.levels=2",
    ]
    trainer = build_trainer(tiny_run(*words))
    trainer.iterate()
    assert trainer.objective.kl_weight.update == 4 * 2
