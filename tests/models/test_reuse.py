"""The feature cache: against diffusers' own, what it leaves alone, and that it only acts where nothing is trained."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast import accelerate
from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.models.hunyuan15.backbone import velocity
from sage_fast.models.reuse import FeatureCache, ReuseRule
from sage_fast.records import Trajectory
from sage_fast.run.run import build_trainer
from sage_fast.trainer import Trainer
from tests.models.hunyuan15.oracle import latents, padded_arguments, prompt, tiny_transformer

MakeRun = Callable[..., RunConfig]
STEPS, NOISY = 8, (3, 4)
WINDOW = (f"--rollout.num_steps={STEPS}", "--rollout.sde_window.size=2", "--rollout.sde_window.start=3")
CACHE = (*WINDOW, "--rollout.batch_size=2", "--rollout.micro_batch_size=1", "--rollout.cache_threshold=0.31")


def sampled(trainer: Trainer) -> list[Trajectory]:
    trainer.gradient.begin(trainer.kl_weight.weight, None, trainer._kl_factors())
    return trainer._rollout()


@pytest.mark.parametrize("threshold", [0.02, 0.1])
def test_it_is_the_first_block_cache_of_diffusers(threshold: float) -> None:
    """The same steps are left out, and the results agree, over a path on which some steps are small."""
    hooks = pytest.importorskip("diffusers.hooks.first_block_cache")
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry

    model, own = tiny_transformer(), tiny_transformer()
    block = type(model.transformer_blocks[0])
    found = TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=1)
    TransformerBlockRegistry.register(block, found)
    hooks.apply_first_block_cache(model, hooks.FirstBlockCacheConfig(threshold=threshold))
    runs: list[int] = []
    accelerate(own)
    own.transformer_blocks[2].register_forward_hook(lambda *_: runs.append(1))
    rule = ReuseRule(threshold=threshold)
    branches = [(prompt(5, 0, seed=1), FeatureCache(rule)), (prompt(3, 0, seed=2), FeatureCache(rule))]
    x = latents(1)
    with torch.no_grad():
        for step, move in enumerate((0.0, 0.01, 0.3, 0.01, 0.02, 0.02, 0.02)):
            x = x + move * latents(1, seed=step)
            sigma = torch.tensor([0.9])
            for name, (words, cache) in enumerate(branches):
                with model.cache_context(str(name)):
                    expected = model(**padded_arguments(x, sigma * 1000, [words], torch.float32))[0]
                given = velocity(own, x, sigma, [words], cache)
                assert float((given - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    skipped, forwards = rule.take_counts()
    assert forwards == 14 and 2 <= skipped <= 11 and len(runs) == forwards - skipped
    assert rule.take_counts() == (0, 0)


@pytest.mark.parametrize("update", ["two_phase", "single_pass"])
def test_forwards_are_left_out_and_the_ratio_is_one(tiny_run: MakeRun, update: str) -> None:
    trainer = build_trainer(tiny_run(*CACHE, f"--training.update={update}"))
    calls: list[int] = []
    in_rollout: list[int] = []
    trainer.policy.transformer.transformer_blocks[1].register_forward_hook(lambda *_: calls.append(1))
    trainer.on_rollout = lambda record: in_rollout.append(len(calls))
    record = trainer.iterate()
    ode, noisy = (2 * 2 * steps for steps in (STEPS - len(NOISY), len(NOISY)))
    skipped = round(record["rollout/skipped_forwards"] * ode)
    assert 0 < skipped < ode // 2
    assert in_rollout == [ode + noisy - skipped]
    assert record["ratio/max_deviation"] == record["log_ratio/mean"] == 0.0


def test_trained_steps_are_computed_in_full_and_are_the_same_in_both_updates(tiny_run: MakeRun) -> None:
    """A noisy step ends the reuse, whatever the threshold."""
    often = (*CACHE[:-1], "--rollout.cache_threshold=0.9")
    two_phase = build_trainer(tiny_run(*often))
    exact: dict[int, list[bool]] = {step: [] for step in range(STEPS)}
    trajectories = sampled(two_phase)
    with torch.no_grad():
        for t in trajectories:
            for step in range(STEPS):
                sigma = t.table.sigmas[[step]].float()
                v = two_phase.policy.velocity(t.latents[step], sigma, [s.embeds for s in t.samples])
                exact[step].append(torch.equal(v, t.velocities[step]))
    assert [step for step, rows in exact.items() if all(rows)] == [0, *NOISY, NOISY[-1] + 1]
    single_pass = build_trainer(tiny_run(*often, "--training.update=single_pass"))
    for ours, theirs in zip(sampled(single_pass), trajectories, strict=True):
        assert torch.equal(ours.final, theirs.final)


def test_a_cache_that_is_never_used_changes_no_bit(tiny_run: MakeRun) -> None:
    records = []
    for threshold in ("0", "1e-9"):
        trainer = build_trainer(tiny_run(*WINDOW, f"--rollout.cache_threshold={threshold}"))
        records.append({name: value for name, value in trainer.iterate().items() if not name.startswith("time/")})
    assert records[1].pop("rollout/skipped_forwards") == 0.0
    assert records[0] == records[1]


def test_what_is_computed_because_another_rank_has_to_changes_nothing(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = build_trainer(tiny_run(*CACHE))
    final: list[Tensor] = [t.final for t in sampled(alone)]
    assert alone.policy.reuse is not None and alone.policy.reuse.take_counts()[0] > 0
    monkeypatch.setattr(ReuseRule, "any_computes", lambda self, computes: True)
    together = build_trainer(tiny_run(*CACHE))
    assert all(torch.equal(t.final, x) for t, x in zip(sampled(together), final, strict=True))
    assert together.policy.reuse is not None and together.policy.reuse.take_counts()[0] == 0


def test_a_batch_of_ragged_prompts_keeps_features_apart() -> None:
    model = tiny_transformer()
    accelerate(model)
    prompts = [prompt(5, 0, seed=1), prompt(7, 2, seed=2), prompt(5, 0, seed=3)]
    cache = FeatureCache(ReuseRule(threshold=0.5))
    x, sigma = latents(3), torch.full((3,), 0.5)
    with torch.no_grad():
        expected = [velocity(model, x, sigma, prompts, cache) for _ in range(2)]
    assert cache.rule.take_counts() == (2, 4)
    torch.testing.assert_close(expected[0], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--rollout.cache_threshold=0.1"], "all 4 steps draw noise"),
        (["--rollout.cache_threshold=0.1", "--rollout.sde_window.size=4"], "all 4 steps draw noise"),
        (["--rollout.cache_threshold=1"], r"in \[0, 1\)"),
        (["--rollout.cache_threshold=0.1", "--rollout.sde_window.size=2", "--model.forward=stock"], "fused forward"),
    ],
    ids=["no-window", "whole-window", "range", "stock"],
)
def test_a_cache_that_cannot_act_is_refused(tiny_run: MakeRun, overrides: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_run(*overrides)
