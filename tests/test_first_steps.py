"""The steps before the SDE window: once per group where its members start alike, with
the bits that each would have.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast import trainer as trainer_module
from sage_fast.config.schema import RunConfig
from sage_fast.noise import NoiseKey
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Prompt, PromptEmbeds, Sample, Trajectory
from sage_fast.rollout import (
    FirstSteps,
    Sampler,
    StepVelocity,
    initial_latents,
    micro_batches,
    num_first_steps,
    shares_first_steps,
)
from sage_fast.run.run import build_trainer
from sage_fast.sde import TransitionTable, sigma_schedule, transition_table
from sage_fast.trainer import Trainer
from tests.made_runs import untimed

MakeRun = Callable[..., RunConfig]

SHAPE = (2, 1, 2, 2)
WINDOW = [
    "--rollout.initial_noise=shared",
    "--rollout.num_steps=6",
    "--rollout.sde_window.size=2",
    "--rollout.solver_order=2",
]
OPENS = 3
"""Rollout of a window that begins at this step."""


def window_table(first: int) -> TransitionTable:
    table = transition_table("sage_grpo", sigma_schedule(6, 3.0), 0.5)
    return table.restrict([first, first + 1]).second_order()


class Elementwise:
    """A velocity whose bits do not depend on the size of a batch; it counts rows by
    step.
    """

    def __init__(self) -> None:
        self.rows = [0] * 6

    def __call__(
        self, samples: Sequence[Sample], keys: Sequence[NoiseKey] = ()
    ) -> StepVelocity:
        index = torch.tensor([sample.prompt.index for sample in samples]).view(
            -1, 1, 1, 1, 1
        )

        def velocity(step: int, latents: Tensor, sigma: Tensor) -> Tensor:
            assert latents.is_contiguous() and len(latents) == len(samples) == len(
                sigma
            )
            self.rows[step] += len(latents)
            return latents.sin() + index

        return velocity


def sampler_of(
    velocity: Elementwise,
    table: TransitionTable,
    members: int | None,
    keep_steps: bool = True,
) -> Sampler:
    """Sampler of groups of three that start alike; `members` None computes every
    member.
    """
    return Sampler(
        velocity=velocity,
        embed=lambda prompt: PromptEmbeds(
            text=torch.zeros(1, 1), glyph=torch.zeros(0, 1)
        ),
        initial=lambda keys: initial_latents(keys, SHAPE, kind="shared", members=3),
        table=table,
        seed=0,
        keep_steps=keep_steps,
        first_steps=None
        if members is None
        else FirstSteps(velocity=velocity, members=members),
    )


def states(trajectories: Sequence[Trajectory]) -> list[Tensor]:
    """States and velocities of all videos, then the final latents."""
    by_step = [
        *zip(*(found.latents for found in trajectories), strict=True),
        *zip(*(found.velocities for found in trajectories), strict=True),
        tuple(found.final for found in trajectories),
    ]
    return [torch.cat(list(parts)) for parts in by_step]


@pytest.mark.parametrize("keep_steps", [True, False])
@pytest.mark.parametrize("size", [1, 4, 12])
def test_a_start_is_followed_once_whatever_the_micro_batches_are(
    size: int, keep_steps: bool
) -> None:
    """Four groups of three, two of them of one prompt, and a window over steps 3 and 4
    of six.
    """
    table = window_table(OPENS)
    counts = Elementwise()
    expected = sampler_of(Elementwise(), table, None, keep_steps)
    shared = sampler_of(counts, table, 3, keep_steps)
    prompts = [Prompt(text="", index=index) for index in range(3)]
    members = [(prompt, member) for prompt in prompts for member in range(3)]
    samples = shared.samples(
        [*members, *((prompts[2], member) for member in range(3, 6))]
    )
    found = []
    for batch in micro_batches(samples, size):
        found.append(shared(batch))
        assert shared.first_steps is not None
        assert len(shared.first_steps.known) == len(
            {(s.prompt.index, s.member // 3) for s in batch}
        )
        assert (list(found[-1].samples), len(found[-1].keys)) == (
            list(batch),
            len(batch),
        )
    assert counts.rows == [4] * OPENS + [12] * 3
    alike = zip(states(found), states([expected(samples)]), strict=True)
    assert all(torch.equal(given, wanted) for given, wanted in alike)


def test_a_window_at_the_first_step_leaves_nothing_to_share() -> None:
    counts = Elementwise()
    sampler = sampler_of(counts, window_table(0), 3)
    sampler(
        sampler.samples([(Prompt(text="", index=0), member) for member in range(3)])
    )
    assert counts.rows == [3] * 6
    assert num_first_steps(transition_table("ode", sigma_schedule(6, 3.0), 0.5)) == 6


def test_ranks_that_keep_step_share_whole_groups_alone(tiny_run: MakeRun) -> None:
    def shares(*words: str, sharded: bool, videos: int = 8) -> bool:
        config = tiny_run(
            "--rollout.batch_size=8", "--rollout.num_generations=4", *WINDOW, *words
        ).rollout
        return shares_first_steps(
            replace(config, batch_size=videos, micro_batch_size=1), sharded
        )

    assert shares(sharded=True) and shares(sharded=False)
    assert shares(sharded=False, videos=6) and not shares(sharded=True, videos=6)
    assert not shares("--rollout.initial_noise=fixed", sharded=False)
    assert not shares("--rollout.initial_noise=own", sharded=False)


def trainer_at(config: RunConfig, rollout: int = OPENS) -> Trainer:
    trainer = build_trainer(config)
    trainer.rollouts = rollout
    return trainer


def sampled(config: RunConfig, *, shared: bool) -> tuple[list[Tensor], int]:
    """States of a rollout of the tiny model, and the rows of its velocities."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "shares_first_steps", lambda *arguments: shared)
        trainer = trainer_at(config)
        velocity = GuidedPolicy.velocity
        rows = []

        def counted(policy: GuidedPolicy, latents: Tensor, *arguments: Any) -> Tensor:
            rows.append(len(latents))
            return velocity(policy, latents, *arguments)

        patch.setattr(GuidedPolicy, "velocity", counted)
        trainer.objective.begin(0, OPENS)
        trajectories, _ = trainer._rollout()
        return states(trajectories), sum(rows)


@pytest.mark.parametrize("words", ["", "--model.forward=stock"])
def test_with_one_video_at_a_time_the_bits_are_those_of_every_member(
    tiny_run: MakeRun, words: str
) -> None:
    """Two groups of two with six steps: of the three before the window, one row in two
    is computed.
    """
    given = [
        *WINDOW,
        "--rollout.batch_size=4",
        "--rollout.num_generations=2",
        *words.split(),
    ]
    config = tiny_run(
        *given, "--rollout.micro_batch_size=1", "--objective.kl_mode=none"
    )
    alone = sampled(config, shared=False)
    together = sampled(config, shared=True)
    assert all(
        torch.equal(given, wanted)
        for given, wanted in zip(together[0], alone[0], strict=True)
    )
    assert (alone[1], together[1]) == (4 * 6, 2 * 3 + 4 * 3)


@pytest.mark.parametrize("size", [4, 8])
def test_with_several_at_a_time_the_first_steps_are_those_of_one(
    tiny_run: MakeRun, size: int
) -> None:
    """To the bit where a micro-batch lies within a group, which every member's own
    forward need not be.
    """
    words = [
        *WINDOW,
        "--rollout.batch_size=8",
        "--rollout.num_generations=4",
        "--objective.kl_mode=none",
    ]
    config = tiny_run(*words, f"--rollout.micro_batch_size={size}")
    one = sampled(tiny_run(*words, "--rollout.micro_batch_size=1"), shared=True)[0]
    alone = sampled(config, shared=False)
    together = sampled(config, shared=True)
    assert together[1] == 2 * 3 + 8 * 3
    for given, wanted in zip(together[0], alone[0], strict=True):
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-4)
    if size <= 4:
        before = [*range(OPENS + 1), *range(6, 6 + OPENS)]
        assert all(torch.equal(together[0][i], one[i]) for i in before)


@pytest.mark.parametrize(
    ("update", "size"), [("two_phase", 4), ("single_pass", 4), ("single_pass", 1)]
)
def test_an_iteration_is_the_same(tiny_run: MakeRun, update: str, size: int) -> None:
    """Its metrics and weights: to the bit with one video at a time, and the first ratio
    is 1 with any number.
    """
    words = [
        *WINDOW,
        "--rollout.num_generations=4",
        f"--training.update={update}",
        "--objective.kl_mode=moving",
    ]
    config = tiny_run(
        *words, f"--rollout.micro_batch_size={size}", "--training.num_updates=2"
    )
    results = []
    for shared in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                trainer_module, "shares_first_steps", lambda *_, shared=shared: shared
            )
            trainer = trainer_at(config)
            record = untimed(trainer.iterate())
        results.append((record, list(trainer.parameters.values())))
    (alone, expected), (together, found) = results
    assert together["ratio/first_max_deviation"] == 0.0
    if size == 1:
        assert together == alone
        assert all(
            torch.equal(given, wanted)
            for given, wanted in zip(found, expected, strict=True)
        )
    else:
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-3)
