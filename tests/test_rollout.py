"""The steps that the videos of a group share are taken once, and the run is the one that takes them for every video."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sage_fast import rollout as rollout_module
from sage_fast.config.schema import RunConfig
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Trajectory
from sage_fast.rollout import SharedPrefixes, rollout_table, steps_before_noise
from sage_fast.run.run import build_trainer
from sage_fast.trainer import Trainer
from tests.test_gradient import passes
from tests.tiny.velocity_field import move_weights

MakeRun = Callable[..., RunConfig]

# Two groups of two; noise at steps 3 and 4 of 6, and in the next rollout at 4 and 5.
SHARED = [
    "--rollout.shared_initial_noise=true",
    "--rollout.num_steps=6",
    "--rollout.sde_window.size=2",
    "--rollout.sde_window.start=3",
    "--evaluation.every=0",
]
ONE_BY_ONE = "--rollout.micro_batch_size=1"


def test_videos_stay_together_until_the_first_noise(tiny_run: MakeRun) -> None:
    config = tiny_run(*SHARED)
    # The window wraps around: steps 3, 4, then 5 and 0, then 0 and 1.
    assert [steps_before_noise(rollout_table(config.rollout, number)) for number in range(5)] == [3, 4, 0, 0, 1]
    assert steps_before_noise(rollout_table(tiny_run().rollout, 0)) == 0


@pytest.mark.parametrize(
    ("overrides", "rollouts"),
    [
        ([], 2),
        (["--training.update=single_pass", "--training.guidance=split"], 1),
        (["--rollout.guidance_scale=1", "--rollout.num_generations=4", "--rollout.sde_type=cps"], 1),
    ],
    ids=["two-phase", "split-single-pass", "unguided-cps"],
)
def test_sharing_changes_no_bit_and_saves_forwards(
    overrides: list[str], rollouts: int, tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(ONE_BY_ONE, *SHARED, *overrides)

    def train() -> tuple[list[dict[str, float]], list[Trajectory], list[Tensor], list[int]]:
        with monkeypatch.context() as patch:
            trainer = build_trainer(config)
            move_weights(trainer)
            counts, found, seen, forwards = passes(trainer, patch), [], [], []
            roll_out = trainer._rollout
            patch.setattr(trainer, "_rollout", lambda: seen.append(roll_out()) or seen[-1])
            for _ in range(rollouts):
                counts["rollout"] = 0
                record = trainer.iterate()
                found.append({k: v for k, v in record.items() if not k.startswith("time/")})
                forwards.append(counts["rollout"])
        state = [t.clone() for group in trainer.tensors().values() for t in group.values()]
        return found, [t for trajectories in seen for t in trajectories], state, forwards

    records, trajectories, state, forwards = train()
    monkeypatch.setattr(rollout_module, "steps_before_noise", lambda table: 0)
    everything = train()
    assert records == everything[0]
    assert all(torch.equal(a, b) for a, b in zip(state, everything[2], strict=True))
    for one, other in zip(trajectories, everything[1], strict=True):
        assert one.keys == other.keys and len(one.latents) == len(one.velocities) == 6
        for mine, theirs in ((one.latents, other.latents), (one.velocities, other.velocities)):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert torch.equal(one.final, other.final)
    # Of four videos; single_pass measures the anchor in its rollout too.
    saved = 4 - 4 // config.rollout.num_generations
    assert [b - a for a, b in zip(forwards, everything[3], strict=True)] == [3 * saved, 4 * saved][:rollouts]


def test_a_micro_batch_of_two_groups_takes_both_at_once(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tiny_run(*SHARED))
    sizes: list[int] = []
    velocity = GuidedPolicy.velocity
    monkeypatch.setattr(
        GuidedPolicy, "velocity", lambda self, x, *given, **k: (sizes.append(len(x)), velocity(self, x, *given, **k))[1]
    )
    (trajectory,) = trainer._rollout()
    assert sizes == [2, 2, 2, 4, 4, 4]
    for step in range(4):
        a, b, c, d = trajectory.latents[step]
        assert torch.equal(a, b) and torch.equal(c, d) and not torch.equal(a, c)
    assert not torch.equal(*trajectory.latents[4][:2])
    apart = build_trainer(tiny_run(*SHARED, ONE_BY_ONE))._rollout()
    torch.testing.assert_close(trajectory.final, torch.cat([t.final for t in apart]), rtol=1e-4, atol=1e-4)
    # The states of the first steps are in memory once per group.
    assert apart[0].latents[1].data_ptr() == apart[1].latents[1].data_ptr()
    scored = trainer._score([trajectory], {})
    trainer.gradient.begin(0.0, None, [1.0, 1.0])
    terms = trainer.gradient.accumulate(scored, range(2), 0.0)
    assert torch.equal(terms.ratio, torch.ones_like(terms.ratio))


def test_ranks_that_keep_step_take_shared_steps_at_the_same_micro_batches(tiny_run: MakeRun) -> None:
    """Three ranks with four videos each of two groups of six: a group starts in the middle of the second rank."""
    for size, expected in ((1, [True, False, True, False]), (2, [True, True]), (4, [True])):
        section = {"num_generations": 6, "batch_size": 4, "micro_batch_size": size}
        ranks = SimpleNamespace(videos_per_rollout=12, config=SimpleNamespace(rollout=SimpleNamespace(**section)))
        assert [Trainer._begins_group(ranks, number) for number in range(4 // size)] == expected  # type: ignore[arg-type]
    trainer = build_trainer(tiny_run(*SHARED, ONE_BY_ONE))
    table, calls = rollout_table(trainer.config.rollout, 0), []
    prefixes = SharedPrefixes(trainer.policy, table, trainer.kernels, trainer.latent_shape, trainer.device, 2)
    trainer.policy.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    samples, keys = trainer._samples(), trainer.next_noise()
    found = [prefixes.take(samples[:1], keys[:1], always=always) for always in (False, False, True)]
    assert len(calls) == 2 * 3 * 2
    assert all(taken.final.data_ptr() == found[0].final.data_ptr() for taken in found)


def test_a_rank_that_shares_weights_runs_what_another_needs(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every micro-batch were the first of a group on some rank."""
    records, counted = [], []
    for sharded in (False, True):
        trainer = build_trainer(tiny_run(*SHARED, ONE_BY_ONE))
        monkeypatch.setattr(trainer.engine, "sharded", sharded)
        monkeypatch.setattr(trainer, "_begins_group", lambda number: True)
        counts = passes(trainer, monkeypatch)
        records.append({k: v for k, v in trainer.iterate().items() if not k.startswith("time/")})
        counted.append(counts["rollout"])
    assert counted == [2 * 3 + 4 * 3, 4 * 3 + 4 * 3] and records[0] == records[1]
