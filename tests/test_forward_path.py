"""The forward-process objective at the states of the sampler's own path."""

from collections.abc import Callable

import pytest
import torch

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.objectives.forward_process import (
    ForwardProcess,
    allowed_steps,
    level_steps,
)
from sage_fast.run.run import build_trainer
from tests.tiny.velocity_field import (
    move_weights,
    relative,
    smooth_velocity,
    use_smooth_velocity,
)

MakeRun = Callable[..., RunConfig]

PATH = (
    "--training.update=forward_process",
    "--objective.kl_mode=none",
    "--rollout.sde_type=sage_exact",
    "--rollout.guidance_scale=1",
    "--forward_process.states=path",
    "--forward_process.levels=2",
)


def test_on_the_path_the_rollout_has_states_and_old_velocities(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """u = (x_t - x0) / s at states that the sampler visited; the old policy's
    velocities need no forward.
    """
    trainer = build_trainer(tiny_run(*PATH, "--rollout.micro_batch_size=2"))
    objective = trainer.objective
    assert isinstance(objective, ForwardProcess) and objective.old is not None
    objective.begin(0, 0)
    with objective.sampling():
        scored, _ = trainer._score(*trainer._rollout())
    monkeypatch.setattr(trainer.policy, "velocity", None)  # a call would be an error
    objective.measure(scored)
    for number, (rows, trajectory) in enumerate(scored.batches()):
        for position in range(2):
            loss = objective._loss(scored, rows, trajectory, (number, position))
            for b, key in enumerate(trajectory.keys):
                steps = allowed_steps(objective.process, trajectory.table)
                step = level_steps(key, steps, 2)[position]
                s = float(trajectory.table.sigmas[step])
                assert float(loss.sigma[b]) == pytest.approx(s)
                assert torch.equal(loss.latents[b], trajectory.latents[step][b])
                torch.testing.assert_close(
                    s * loss.target[b] + trajectory.final[b], loss.latents[b]
                )
                assert loss.velocity_old is not None
                assert torch.equal(loss.velocity_old[b], trajectory.velocities[step][b])


def test_the_path_gradient_is_that_of_grpo_with_the_noise_that_the_video_tells(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weight gain^2 / 2 at every step it is sum A r eps dv by hand with eps = r (u
    - v), in float64.
    """
    words = ["--forward_process.old_decay=null", "--forward_process.weighting=velocity"]
    trainer = build_trainer(tiny_run(*PATH, *words))
    use_smooth_velocity(trainer, monkeypatch)
    move_weights(trainer)
    parameters = list(trainer.parameters.values())
    objective = trainer.objective
    assert isinstance(objective, ForwardProcess)
    objective.begin(0, 0)
    scored, _ = trainer._score(*trainer._rollout())
    expected = torch.zeros((), dtype=torch.float64)
    count = 0
    for rows, trajectory in scored.batches():
        for b, key in enumerate(trajectory.keys):
            embeds = trajectory.samples[b].embeds
            text = (embeds.text.mean() + len(embeds.text))[None]
            for step in level_steps(
                key, allowed_steps(objective.process, trajectory.table), 2
            ):
                x = trajectory.latents[step][b]
                v_old = trajectory.velocities[step][b]
                s = float(trajectory.table.sigmas[step])
                gain = float(trajectory.table.gain[step])
                eps = gain * ((x - trajectory.final[b]) / s - v_old)
                v = smooth_velocity(parameters, x[None], torch.tensor([s]), text)[0]
                advantage = float(scored.advantages[rows][b])
                surrogate = -advantage * gain * (eps * v).double().mean()
                # GRPO's weight of a step less what `weighting: velocity` leaves out of
                # it.
                expected = expected + surrogate * 2 / gain**2
                count += 1
    found = torch.autograd.grad(expected / count, parameters)
    trainer.engine.zero_grad()
    objective.measure(scored)
    objective.accumulate(scored, range(2), 0)
    for p, wanted in zip(parameters, found, strict=True):
        assert p.grad is not None and relative(p.grad.double(), wanted.double()) < 1e-6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rollout.eta=0",), "draws no noise"),
        (("--training.update=single_pass",), "before its video is finished"),
        (("--training.update=two_phase",), "train by the drawn noise"),
        (
            ("--forward_process.sampling_guidance=2", "--rollout.guidance_scale=1"),
            "its path is the sampler's",
        ),
        (("--forward_process.levels=9",), "forward_process.levels is 9"),
        (
            ("--rollout.sde_window.size=1",),
            "forward_process.levels is 2, but the sampler draws noise in [01] of",
        ),
    ],
)
def test_what_a_path_cannot_be_trained_with(
    tiny_run: MakeRun, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_run(*PATH, *words)


def test_a_guided_path_is_warned_of(
    tiny_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_run(*PATH, "--rollout.guidance_scale=2")
    ForwardProcess.check_run(config, 2)
    assert "a reason that is not in the reward" in caplog.text
