"""The GRPO loop on a tiny random model: what is computed, not how fast."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from sage_fast.checkpoint import list_checkpoints
from sage_fast.config.errors import ConfigError, TrainingError
from sage_fast.config.schema import RunConfig
from sage_fast.models.hunyuan15.backbone import dead_modules
from sage_fast.models.transformer import is_dead
from sage_fast.objective import KLMode, group_advantages, kl_uses
from sage_fast.records import RolloutRecord
from sage_fast.rollout import fixed_starts, rollout_table
from sage_fast.run.run import Run, build_trainer
from sage_fast.sde import SDE_TYPES
from sage_fast.trainer import Trainer
from tests.made_runs import untimed
from tests.test_gradient import passes

MakeRun = Callable[..., RunConfig]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.parameters.items()}


@pytest.mark.parametrize(
    ("sde_type", "kl_mode", "equalizer", "mode"),
    [
        (SDE_TYPES[i % 5], kl_mode, ("true", "false")[i // 3], ("lora", "full")[i % 2])
        for i, kl_mode in enumerate(get_args(KLMode))
    ],
)
def test_every_algorithm_is_finite_and_deterministic(
    tiny_run: MakeRun, sde_type: str, kl_mode: str, equalizer: str, mode: str
) -> None:
    config = tiny_run(
        f"--rollout.sde_type={sde_type}",
        f"--objective.kl_mode={kl_mode}",
        f"--objective.equalizer={equalizer}",
        f"--training.mode={mode}",
        "--kl_weight.minimum=1.0",
        "--kl_weight.maximum=1.0",
    )
    runs = []
    for _ in range(2 if kl_mode == "dual" else 1):
        trainer = build_trainer(config)
        start = weights(trainer)
        records = [untimed(trainer.iterate()) for _ in range(2)]
        moved = max(float((p - start[n]).abs().max()) for n, p in weights(trainer).items())
        assert moved > 0
        assert all(math.isfinite(v) for record in records for v in record.values())
        assert records[0]["ratio/max_deviation"] == records[0]["kl/position"] == 0.0
        assert (records[1]["kl/position"] > 0) == kl_uses(kl_mode)[0]
        runs.append((records, weights(trainer)))
    assert runs[0][0] == runs[-1][0]
    assert all(torch.equal(runs[0][1][n], w) for n, w in runs[-1][1].items())


def test_micro_batch_size_changes_nothing_but_rounding(tiny_run: MakeRun) -> None:
    """One group of four: in groups of two, advantages in the wrong order are a change of sign."""
    results = []
    for size in (4, 2, 1):
        trainer = build_trainer(tiny_run("--rollout.num_generations=4", f"--rollout.micro_batch_size={size}"))
        before = weights(trainer)
        record = trainer.iterate()
        moved = torch.cat([(after - before[name]).flatten() for name, after in weights(trainer).items()])
        results.append((record["reward/mean"], record["grad_norm"], moved))
    for reward, grad_norm, moved in results[1:]:
        assert reward == pytest.approx(results[0][0], abs=2e-4)  # a rounded pixel may differ by one
        assert grad_norm == pytest.approx(results[0][1], rel=1e-3)
        # AdamW's first step is the sign of the gradient, so compare directions rather than tiny entries.
        assert torch.nn.functional.cosine_similarity(moved, results[0][2], dim=0) > 0.999


def test_torch_may_not_pick_cudnn_whose_kernel_depends_on_the_gradient(tiny_run: MakeRun) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    build_trainer(tiny_run())
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_the_moving_anchor_follows_and_the_fixed_one_stays(tiny_run: MakeRun) -> None:
    for kl_mode in ("moving", "fixed"):
        trainer = build_trainer(tiny_run(f"--objective.kl_mode={kl_mode}", "--training.anchor_interval=2"))
        start = weights(trainer)
        history = []
        for _ in range(3):
            trainer.iterate()
            assert trainer.anchor is not None
            history.append({n: v.clone() for n, v in trainer.anchor.values.items()})
        same = [all(torch.equal(h[n], start[n]) for n in start) for h in history]
        assert same == ([True, True, False] if kl_mode == "moving" else [True, True, True])


def test_the_kl_share_is_measured_and_changes_nothing(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is linear in lambda, takes two more passes of the update, and leaves every other number to the bit."""
    found = {}
    for every, weight in (("0", 0.01), ("2", 0.01), ("2", 0.02)):
        fixed = [f"--kl_weight.minimum={weight}", f"--kl_weight.maximum={weight}", "--objective.kl_mode=fixed"]
        trainer = build_trainer(tiny_run(f"--training.kl_share_every={every}", *fixed))
        first = untimed(trainer.iterate())
        assert "kl/grad_share" not in first
        with monkeypatch.context() as patch:
            counts = passes(trainer, patch)
            second = untimed(trainer.iterate())
        assert counts["update"] == (12 if every == "2" else 4)
        found[every, weight] = second.pop("kl/grad_share", None), second, weights(trainer)
    unmeasured, measured, doubled = found.values()
    assert unmeasured[0] is None and unmeasured[1] == measured[1]
    assert all(torch.equal(measured[2][name], weight) for name, weight in unmeasured[2].items())
    # The first update of both is the same: its anchor is the policy, so no KL has acted yet.
    assert 0 < 2 * measured[0] == pytest.approx(doubled[0], rel=1e-4)


def test_a_kl_share_of_no_gradient_is_said_to_be_left_out(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build_trainer(tiny_run("--training.kl_share_every=1"))
    monkeypatch.setattr(trainer.gradient, "kl_share", lambda *_: math.inf)
    assert "kl/grad_share" not in trainer.iterate()
    assert "Update 1: kl/grad_share is left out" in caplog.text


def test_the_controller_can_move_with_every_trained_step(tiny_run: MakeRun) -> None:
    """Four videos with four steps each: sixteen times per update."""
    trainer = build_trainer(tiny_run("--kl_weight.advance=step", "--kl_weight.warmup_updates=20"))
    trainer.iterate()
    assert trainer.kl_weight.update == 16
    assert trainer.kl_weight.weight == pytest.approx(1e-7 + 16 / 20 * (1e-5 - 1e-7))


def test_lora_copies_no_frozen_weight(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run("--training.ema_decay=0.9"))
    frozen = {n: p.detach().clone() for n, p in trainer.policy.transformer.named_parameters() if not p.requires_grad}
    assert trainer.anchor is not None and trainer.ema is not None
    assert set(trainer.anchor.values) == set(trainer.ema.values) == set(trainer.parameters)
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in trainer.parameters.items())
    trainer.iterate()
    after = dict(trainer.policy.transformer.named_parameters())
    assert all(torch.equal(after[n], w) for n, w in frozen.items())


@pytest.mark.parametrize("forward", ["stock", "fused"])
def test_what_cannot_influence_the_video_is_not_trained(tiny_run: MakeRun, forward: str) -> None:
    for mode in ("lora", "full"):
        trainer = build_trainer(tiny_run(f"--training.mode={mode}", f"--model.forward={forward}"))
        dead = dead_modules(trainer.policy.transformer)
        assert not any(is_dead(name, dead) for name in trainer.parameters)
        trainer.engine.zero_grad()
        trainer.engine.step = lambda: None  # type: ignore[method-assign]  # keep the gradients
        trainer.iterate()
        # No toy prompt quotes text, and the weights that would embed it are not trained.
        assert not [name for name, p in trainer.parameters.items() if p.grad is None]
        zero = {name.split(".")[0] for name, p in trainer.parameters.items() if p.grad is not None and not p.grad.any()}
        assert "context_embedder_2" not in zero


def test_gradient_checkpointing_recomputes_and_changes_no_number(tiny_run: MakeRun) -> None:
    records, forwards = [], []
    for checkpointing in ("full", "none"):
        trainer = build_trainer(tiny_run("--model.forward=stock", f"--model.checkpointing={checkpointing}"))
        count: list[int] = []
        # Before, not after: a recomputation ends as soon as it has what it needs.
        block = trainer.policy.transformer.transformer_blocks[0]
        block.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        records.append([untimed(trainer.iterate()) for _ in range(2)])
        forwards.append(len(count))
    assert records[0] == records[1]
    assert forwards[0] > forwards[1]


ADALN_TARGETS = "--lora.target_modules=[attn.to_q, norm1.linear, norm1_context.linear]"
BEST_AND_WORST = "--training.best_and_worst=1"
SINGLE_PASS = "--training.update=single_pass --rollout.micro_batch_size=1"
FORWARD = "--training.update=forward_process --objective.kl_mode=none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--model.adaln=table --training.mode=full",
            "training.mode is 'full', but with model.adaln table .*model.adaln to auto",
        ),
        (
            f"--model.adaln=offload {ADALN_TARGETS}",
            "has norm1.linear, norm1_context.linear, but model.adaln offload .*model.adaln to auto",
        ),
        (f"{SINGLE_PASS} --training.mode=full", "training.mode is 'full'.*Set it to lora, or .*two_phase"),
        (f"{SINGLE_PASS} --rollout.micro_batch_size=2", "rollout.micro_batch_size is 2.*Set it to 1, or .*two_phase"),
        (
            f"{SINGLE_PASS} {BEST_AND_WORST} --rollout.num_generations=4",
            "gradient is there before an advantage. Set it to 0, .*update to two_phase",
        ),
        (BEST_AND_WORST, "is 1, .*num_generations is 2.* Raise num_generations"),
        (
            "--objective.kl_position_fraction=0.5 --objective.kl_mode=stepwise",
            "kl_position_fraction is 0.5.*set it to 1",
        ),
        (f"{FORWARD} --objective.kl_mode=dual", "objective.kl_mode"),
        (f"{FORWARD} --training.updates_per_rollout=2", "training.updates_per_rollout"),
        (f"{FORWARD} --training.timestep_fraction=0.5", "training.timestep_fraction"),
        (f"{FORWARD} --rollout.sde_type=ode --rollout.shared_initial_noise=true", "rollout.shared_initial_noise"),
        ("--training.guidance=conditional --rollout.guidance_scale=0", "guidance_scale 0"),
        ("--rollout.negative_prompt=x --rollout.guidance_scale=1", "negative_prompt is .*empty with"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tiny_run: MakeRun, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_run(*(f"--{word}" for word in words.removeprefix("--").split(" --")))


@pytest.mark.parametrize("trained", ["--training.mode=full", ADALN_TARGETS], ids=["full", "adapters"])
def test_by_default_trained_adaln_weights_are_no_mistake(tiny_run: MakeRun, trained: str) -> None:
    trainer = build_trainer(tiny_run(trained))
    trained_names = [name for name in trainer.parameters if "norm1.linear" in name]
    before = weights(trainer)
    assert trainer.iterate()["ratio/max_deviation"] == 0.0
    assert trained_names and any(not torch.equal(before[n], p) for n, p in weights(trainer).items())


def test_timesteps_are_permuted_per_sample_and_fraction_counts(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run("--rollout.num_steps=8", "--training.timestep_fraction=0.5"))
    scored = trainer._score(trainer._rollout(), {})
    assert all(len(set(order)) == len(order) == 4 for order in scored.orders)
    assert len({tuple(order) for order in scored.orders}) > 1
    trainer = build_trainer(tiny_run("--rollout.num_steps=8", "--training.permute_timesteps=false"))
    scored = trainer._score(trainer._rollout(), {})
    trainable = rollout_table(trainer.config.rollout, 0).trainable.nonzero().flatten().tolist()
    assert all(list(order) == trainable for order in scored.orders)


def test_sde_window_limits_noise_and_training(tiny_run: MakeRun) -> None:
    config = tiny_run(
        "--rollout.num_steps=6",
        "--rollout.sde_window.size=2",
        "--rollout.sde_window.stride=3",
    )
    windows = [rollout_table(config.rollout, r).trainable.nonzero().flatten().tolist() for r in range(4)]
    assert windows[:3] == [[0, 1], [3, 4], [0, 1]]
    wrapping = tiny_run("--rollout.num_steps=6", "--rollout.sde_window.size=2").rollout
    assert rollout_table(wrapping, 5).trainable.nonzero().flatten().tolist() == [0, 5]
    assert all(rollout_table(config.rollout, 0).std[i] == 0 for i in (2, 3, 4, 5))
    trainer = build_trainer(config)
    scored = trainer._score(trainer._rollout(), {})
    assert all(set(order) == {0, 1} for order in scored.orders)
    fixed = tiny_run("--rollout.sde_window.size=2", "--rollout.sde_window.stride=0")
    assert rollout_table(fixed.rollout, 7).trainable.nonzero().flatten().tolist() == [0, 1]


def test_shared_initial_noise_starts_a_group_alike(tiny_run: MakeRun) -> None:
    for shared in ("true", "false"):
        trainer = build_trainer(tiny_run(f"--rollout.shared_initial_noise={shared}"))
        start = trainer._rollout()[0].latents[0]
        assert torch.equal(start[0], start[1]) == (shared == "true")
        assert not torch.equal(start[0], start[2])


def test_fixed_initial_noise_starts_a_member_alike_in_every_rollout_and_for_every_prompt(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run("--rollout.fixed_initial_noise=true", "--rollout.num_generations=2"))
    first = trainer._rollout()[0]
    trainer.update += 1
    second = trainer._rollout()[0]
    start = first.latents[0]
    assert first.keys[0].prompt_index != first.keys[2].prompt_index
    assert torch.equal(start[:2], start[2:4]) and not torch.equal(start[0], start[1])
    assert torch.equal(start, second.latents[0]) and not torch.equal(first.latents[1], second.latents[1])
    keys = [replace(first.keys[0], seed=seed, sample_index=member) for seed, member in ((5, 0), (6, 0), (5, 2))]
    one, other, again = fixed_starts(keys, num_generations=2)
    assert one != other and one == again, "a prompt's own seed counts; its second group starts like its first"


def test_ema_is_evaluated_and_lags(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run("--training.ema_decay=0.5", "--optimizer.learning_rate=0.1"))
    start = weights(trainer)
    trainer.iterate()
    assert trainer.ema is not None
    after = weights(trainer)
    for name, value in trainer.ema.values.items():
        # The decay of the first update is 1 / 10: the average warms up.
        torch.testing.assert_close(value, 0.1 * start[name] + 0.9 * after[name])
    averaged = trainer.evaluate()[0].reward
    trainer.ema.refresh()
    assert trainer.evaluate()[0].reward != averaged
    assert all(torch.equal(after[n], p) for n, p in weights(trainer).items())


def test_gradients_are_clipped_to_the_global_norm(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run("--optimizer.max_grad_norm=1e-6"))
    norms: list[float] = []
    step = trainer.engine.step

    def spy() -> None:
        grads = [p.grad for p in trainer.parameters.values() if p.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))))
        step()

    trainer.engine.step = spy  # type: ignore[method-assign]
    assert trainer.iterate()["grad_norm"] > 1e-6
    assert norms[0] == pytest.approx(1e-6, rel=1e-2)


def test_a_prompt_seed_replaces_the_run_seed(tiny_run: MakeRun, tmp_path) -> None:
    file = tmp_path / "seeded.csv"
    file.write_text("prompt,seed\na red circle moving left,7\na blue square moving up,\n")
    starts = []
    for seed in (0, 1):
        trainer = build_trainer(
            tiny_run(f"--data.prompts={file}", "--data.shuffle=false", "--evaluation.num_prompts=2", f"--seed={seed}")
        )
        starts.append(trainer._rollout()[0].latents[0])
    assert torch.equal(starts[0][:2], starts[1][:2])
    assert not torch.equal(starts[0][2:], starts[1][2:])


# ------------------------------------------------------------------------------------- updates that are not finite

MODES = [
    pytest.param([], id="two_phase"),
    pytest.param(["--training.update=single_pass", "--rollout.micro_batch_size=1"], id="single_pass"),
]


def poison_gradients(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, updates: set[int]) -> None:
    """Make the gradient of the given updates, counted from 0, NaN in one entry."""
    accumulate = trainer.gradient.accumulate

    def poisoned(*arguments: Any) -> Any:
        terms = accumulate(*arguments)
        if trainer.update in updates:
            next(p for p in trainer.parameters.values() if p.grad is not None).grad.flatten()[0] = float("nan")
        return terms

    monkeypatch.setattr(trainer.gradient, "accumulate", poisoned)


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of weights, optimizer state and snapshots."""
    return {f"{group}/{name}": t.clone() for group, ts in trainer.tensors().items() for name, t in ts.items()}


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_not_finite_is_skipped_as_often_as_allowed(
    mode: list[str], tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*mode, "--training.skip_nonfinite_updates=1", "--training.ema_decay=0.9", "--optimizer.warmup_updates=9"]
    trainer = build_trainer(tiny_run(*words, "--training.num_updates=4"))
    poison_gradients(trainer, monkeypatch, {1, 3})
    assert trainer.iterate()["update/skipped_nonfinite"] == 0
    before, rate = everything(trainer), trainer.engine.learning_rate
    record = trainer.iterate()
    assert record["update"] == 2 and record["update/skipped_nonfinite"] == 1
    assert all(math.isfinite(value) for value in record.values())
    assert all(torch.equal(value, before[name]) for name, value in everything(trainer).items())
    assert trainer.engine.learning_rate == rate
    prompt = trainer.schedule.take(2, 1)[0]
    assert "Update 2 is skipped" in caplog.text and repr(prompt.text) in caplog.text
    record = trainer.iterate()
    assert record["ratio/first_max_deviation"] == 0.0 and math.isfinite(record["grad_norm"])
    after = everything(trainer)
    assert not all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(TrainingError, match=r"Update 4: .* is not finite, after 1 that training.skip_nonfinite"):
        trainer.iterate()
    assert trainer.update == 3 and all(torch.equal(value, after[name]) for name, value in everything(trainer).items())


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_is_not_finite_is_skipped_with_its_prompt_named(
    mode: list[str], tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build_trainer(tiny_run(*mode, "--training.skip_nonfinite_updates=1"))
    accumulate = trainer.gradient.accumulate

    def poisoned(*arguments: Any) -> Any:
        terms = accumulate(*arguments)
        terms.loss[0] = float("inf")
        return terms

    monkeypatch.setattr(trainer.gradient, "accumulate", poisoned)
    before = everything(trainer)
    record = trainer.iterate()
    assert record["update/skipped_nonfinite"] == 1 and "loss" not in record
    first, second = trainer.schedule.take(0, 2)
    assert f"the loss of prompt {first.index} ({first.text!r}) is not finite" in caplog.text
    assert repr(second.text) not in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in everything(trainer).items())


def test_skipped_updates_are_part_of_the_state(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run("--training.skip_nonfinite_updates=1")
    trainer, resumed = build_trainer(config), build_trainer(config)
    poison_gradients(trainer, monkeypatch, {0})
    trainer.iterate()
    resumed.load(Live(trainer), json.loads(json.dumps(trainer.state())))
    poison_gradients(resumed, monkeypatch, {1})
    with pytest.raises(TrainingError, match="Update 2"):
        resumed.iterate()


class Live:
    """Tensors of a trainer as those of its checkpoint."""

    def __init__(self, trainer: Trainer) -> None:
        self.groups = trainer.tensors()

    def load_into(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        with torch.no_grad():
            for group, values in tensors.items():
                for name, value in values.items():
                    value.copy_(self.groups[group][name])

    def read(self, group: str, name: str) -> Tensor:
        return self.groups[group][name]


def test_weights_that_an_optimizer_step_ruined_are_not_saved(tiny_run: MakeRun) -> None:
    config = tiny_run("--optimizer.learning_rate=1e30", "--evaluation.every=0", "--checkpoint.every=1")
    with pytest.raises(TrainingError, match=r"Update 1: .* left weights that are not finite.*it is 1e\+30"):
        Run(config).train()
    assert not list_checkpoints(Path(config.output_dir) / "checkpoints")


def test_ruined_weights_are_not_skipped_over(tiny_run: MakeRun) -> None:
    """No later update is finite either, and the message must not say that the weights are sound."""
    trainer = build_trainer(tiny_run("--training.skip_nonfinite_updates=9"))
    trainer.iterate()
    scored = trainer._score(trainer._rollout(), {})
    with torch.no_grad():
        next(iter(trainer.parameters.values())).fill_(float("nan"))
    with pytest.raises(TrainingError, match="Update 1: the optimizer step left weights that are not finite"):
        trainer._optimizer_update(scored, [0], {})


# ------------------------------------------------------------------------------------------------ global generators


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_python_and_numpy_are_seeded_by_the_run(tiny_run: MakeRun) -> None:
    values = []
    for seed in (5, 5, 2**40 + 5):
        build_trainer(tiny_run(f"--seed={seed}"))
        values.append((random.random(), float(np.random.rand())))
    assert values[0] == values[1]
    assert values[0][0] != values[2][0] and values[0][1] != values[2][1]


def test_a_checkpoint_holds_the_global_generators(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run())
    np.random.randn()  # leaves a second number in the generator's cache
    state = json.loads(json.dumps(trainer.state()))
    expected = drawn(), float(np.random.randn())
    tensors = Live(trainer)
    resumed = build_trainer(tiny_run())
    resumed.load(tensors, state)
    assert (drawn(), float(np.random.randn())) == expected


def test_guidance_leads_away_from_the_negative_prompt(tiny_run: Callable[..., RunConfig]) -> None:
    text = "a red circle moving left"
    plain, negative = (build_trainer(tiny_run(*words)) for words in ([], [f"--rollout.negative_prompt={text}"]))
    assert torch.equal(negative.policy.uncond.text, plain.embed(text).text)
    assert not torch.equal(negative.policy.uncond.text, plain.policy.uncond.text)
    first, other = plain.iterate(), negative.iterate()
    assert other["ratio/first_max_deviation"] == 0 and other["reward/mean"] != first["reward/mean"]


class FailsForReds:
    """Brightness, which prompts with "red" do not get."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if any("red" in prompt for prompt in prompts):
            raise ConnectionError("the scoring server is gone")
        return {"brightness": videos.float().mean((1, 2, 3, 4))}


def test_advantages_stay_with_their_group_when_an_earlier_one_is_dropped(tiny_run: MakeRun, tmp_path: Path) -> None:
    prompts = tmp_path / "three.txt"
    prompts.write_text("a red circle moving left\na blue square moving up\na green circle moving up\n")
    words = [
        f"--data.prompts={prompts}",
        "--data.shuffle=false",
        "--evaluation.every=0",
        "--evaluation.num_prompts=null",
    ]
    words += [f"--reward.rewards=['{__name__}:FailsForReds']", "--reward.weights={brightness: 1}"]
    words += ["--reward.on_failure=drop_group", "--rollout.batch_size=6", "--rollout.micro_batch_size=2"]
    trainer = build_trainer(tiny_run(*words, "--rollout.num_generations=2"))
    records: list[RolloutRecord] = []
    trainer.on_rollout = records.append
    trainer.iterate()
    (record,) = records
    assert record.trained.tolist() == [False, True, True] and not record.advantages[0].any()
    assert torch.equal(record.advantages[1:], group_advantages(record.reward[1:]).advantages)


def test_adapters_start_from_the_runs_seed(tiny_run: MakeRun) -> None:
    first, same, other = (weights(build_trainer(tiny_run(f"--seed={seed}"))) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_weights_come_back_after_an_exception(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run("--training.ema_decay=0.5", "--optimizer.learning_rate=0.1"))
    trainer.iterate()
    trained = {name: value.clone() for name, value in weights(trainer).items()}
    with pytest.raises(KeyboardInterrupt), trainer.evaluated_weights():
        assert any(not torch.equal(value, trained[name]) for name, value in weights(trainer).items())
        raise KeyboardInterrupt
    assert all(torch.equal(value, trained[name]) for name, value in weights(trainer).items())
