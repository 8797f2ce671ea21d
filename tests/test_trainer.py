"""The GRPO loop on a tiny random model: what is computed, not how fast."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sage_fast import optim
from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import KLMode, kl_uses
from sage_fast.data import PromptSchedule
from sage_fast.models.family import WeightFacts
from sage_fast.models.hunyuan15.backbone import dead_modules
from sage_fast.models.stored import is_dead
from sage_fast.models.toy.components import WordEncoder
from sage_fast.models.toy.renderer import all_captions
from sage_fast.objectives.base import objective_of
from sage_fast.records import Prompt
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rollout import initial_latents, rollout_table
from sage_fast.run.run import build_trainer
from sage_fast.sde import SDE_TYPES
from sage_fast.trainer import Trainer
from tests.made_runs import untimed
from tests.test_gradient import passes

MakeRun = Callable[..., RunConfig]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.parameters.items()}


@pytest.mark.parametrize(("number", "kl_mode"), list(enumerate(get_args(KLMode))))
def test_every_algorithm_is_finite_and_its_kl_begins_with_the_first_move(
    tiny_run: MakeRun, number: int, kl_mode: str
) -> None:
    words = [
        f"--rollout.sde_type={SDE_TYPES[number]}",
        f"--objective.kl_mode={kl_mode}",
        "--rollout.num_steps=2",
    ]
    words += [
        f"--training.mode={('lora', 'full')[number % 2]}",
        f"--objective.equalizer={number < 3}".lower(),
    ]
    trainer = build_trainer(
        tiny_run(*words, "--kl_weight.minimum=1.0", "--kl_weight.maximum=1.0")
    )
    start = weights(trainer)
    first = trainer.iterate()
    second = trainer.iterate()
    assert any(not torch.equal(start[name], p) for name, p in weights(trainer).items())
    assert all(math.isfinite(v) for v in (*first.values(), *second.values()))
    assert first["ratio/max_deviation"] == first["kl/position"] == 0.0
    assert (second["kl/position"] > 0) == kl_uses(kl_mode)[0]


def test_micro_batch_size_changes_nothing_but_rounding(tiny_run: MakeRun) -> None:
    """One group of four: in groups of two, advantages in the wrong order are a change
    of sign.
    """
    results = []
    for size in (4, 1):
        words = ["--rollout.num_generations=4", f"--rollout.micro_batch_size={size}"]
        trainer = build_trainer(tiny_run(*words))
        before = weights(trainer)
        record = trainer.iterate()
        after = weights(trainer)
        moved = torch.cat([(after[name] - w).flatten() for name, w in before.items()])
        results.append((record["reward/mean"], record["grad_norm"], moved))
    (reward, grad_norm, moved), expected = results
    # a rounded pixel may differ by one
    assert reward == pytest.approx(expected[0], abs=2e-4)
    assert grad_norm == pytest.approx(expected[1], rel=1e-3)
    # AdamW's first step is the sign of the gradient, so compare directions rather than
    # tiny entries.
    assert torch.nn.functional.cosine_similarity(moved, expected[2], dim=0) > 0.999


def test_torch_may_not_pick_cudnn_whose_kernel_depends_on_the_gradient(
    tiny_run: MakeRun,
) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    build_trainer(tiny_run())
    assert (
        not torch.backends.cuda.cudnn_sdp_enabled()
        and torch.backends.cuda.flash_sdp_enabled()
    )


def test_the_moving_anchor_follows_and_the_fixed_one_stays(tiny_run: MakeRun) -> None:
    for kl_mode, follows in (("moving", [False, False, True]), ("fixed", [False] * 3)):
        words = [f"--objective.kl_mode={kl_mode}", "--training.anchor_interval=2"]
        trainer = build_trainer(tiny_run(*words))
        start = weights(trainer)
        anchor = trainer.objective.anchor
        assert anchor is not None
        for moved in follows:
            trainer.iterate()
            assert moved != all(torch.equal(anchor.values[n], start[n]) for n in start)


def test_the_kl_share_is_measured_and_changes_nothing(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is linear in lambda, takes two more passes of the update, and leaves every
    other number to the bit.
    """
    found = {}
    for every, weight in (("0", 0.01), ("2", 0.01), ("2", 0.02)):
        fixed = [
            f"--kl_weight.minimum={weight}",
            f"--kl_weight.maximum={weight}",
            "--objective.kl_mode=fixed",
            "--rollout.num_steps=2",
        ]
        trainer = build_trainer(tiny_run(f"--training.kl_share_every={every}", *fixed))
        first = untimed(trainer.iterate())
        assert "kl/grad_share" not in first
        with monkeypatch.context() as patch:
            counts = passes(trainer, patch)
            second = untimed(trainer.iterate())
        assert counts["update"] == (6 if every == "2" else 2)
        found[every, weight] = (
            second.pop("kl/grad_share", None),
            second,
            weights(trainer),
        )
    unmeasured, measured, doubled = found.values()
    assert unmeasured[0] is None and unmeasured[1] == measured[1]
    assert all(
        torch.equal(measured[2][name], weight) for name, weight in unmeasured[2].items()
    )
    # The first update of both is the same: its anchor is the policy, so no KL has acted
    # yet.
    assert 0 < 2 * measured[0] == pytest.approx(doubled[0], rel=1e-4)


@pytest.mark.parametrize("eps", [1e-15, 1e-2])
def test_an_eps_that_rules_the_denominator_is_said_once(
    eps: float, tiny_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build_trainer(tiny_run(f"--optimizer.eps={eps}"))
    shares = [trainer.iterate()["optimizer/eps_share"] for _ in range(2)]
    assert all(share > 0.9 if eps > 1e-3 else share < 0.1 for share in shares)
    assert "all have the same reward" not in caplog.text
    told = [message for message in caplog.messages if "optimizer.eps = " in message]
    assert len(told) == (eps > 1e-3) and all(
        "Update 1: " in message and "to 1e-05" in message for message in told
    )


def test_the_controller_can_move_with_every_trained_step(tiny_run: MakeRun) -> None:
    """Two of four videos with four steps each: eight times per update."""
    words = ["--kl_weight.advance=step", "--kl_weight.warmup_updates=20"]
    words += [BEST_AND_WORST, "--rollout.num_generations=4"]
    trainer = build_trainer(tiny_run(*words))
    trainer.iterate()
    found = trainer.objective.kl_weight
    assert found.update == 8
    assert found.weight == pytest.approx(1e-7 + 8 / 20 * (1e-5 - 1e-7))


@pytest.mark.parametrize(("mode", "forward"), [("lora", "stock"), ("full", "fused")])
def test_what_cannot_influence_the_video_is_not_trained(
    tiny_run: MakeRun, mode: str, forward: str
) -> None:
    words = [f"--training.mode={mode}", f"--model.forward={forward}"]
    trainer = build_trainer(tiny_run(*words))
    dead = dead_modules(trainer.policy.transformer)
    assert not any(is_dead(name, dead) for name in trainer.parameters)
    trainer.engine.step = lambda: None  # type: ignore[method-assign]  # keep the gradients
    trainer.iterate()
    # No toy prompt quotes text, and the weights that would embed it are not trained.
    gradients = {name: p.grad for name, p in trainer.parameters.items()}
    assert None not in gradients.values()
    assert not [
        name
        for name, gradient in gradients.items()
        if name.startswith("context_embedder_2") and not gradient.any()
    ]


def test_gradient_checkpointing_recomputes_and_changes_no_number(
    tiny_run: MakeRun,
) -> None:
    records = []
    forwards = []
    for checkpointing in ("full", "none"):
        trainer = build_trainer(
            tiny_run("--model.forward=stock", f"--model.checkpointing={checkpointing}")
        )
        count: list[int] = []
        # Before, not after: a recomputation ends as soon as it has what it needs.
        block = trainer.policy.transformer.transformer_blocks[0]
        block.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        records.append(untimed(trainer.iterate()))
        forwards.append(len(count))
    assert records[0] == records[1]
    assert forwards[0] > forwards[1]


ADALN_TARGETS = "--lora.target_modules=[attn.to_q, norm1.linear, norm1_context.linear]"
BEST_AND_WORST = "--training.best_and_worst=1"
SINGLE_PASS = "--training.update=single_pass"
FORWARD = "--training.update=forward_process --objective.kl_mode=none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--model.adaln=table --training.mode=full",
            "is 'full', but with model.adaln table .*model.adaln to auto",
        ),
        (
            f"--model.adaln=offload {ADALN_TARGETS}",
            "has norm1.linear, norm1_context.linear, but model.adaln offload",
        ),
        (
            f"{SINGLE_PASS} --training.mode=full",
            "training.mode is 'full'.*Set it to lora, or .*two_phase",
        ),
        (
            f"{SINGLE_PASS} {BEST_AND_WORST} --rollout.num_generations=4",
            "gradient is there before an advantage",
        ),
        (BEST_AND_WORST, "is 1, .*num_generations is 2.* Raise num_generations"),
        (
            "--objective.kl_position_fraction=0.5 --objective.kl_mode=stepwise",
            "fraction is 0.5.*set it to 1",
        ),
        (f"{FORWARD} --objective.kl_mode=dual", "objective.kl_mode"),
        (
            f"{FORWARD} --training.updates_per_rollout=2",
            "micro_batch_size is .*updates split the videos.* Set it to 1",
        ),
        (
            "--forward_process.weighting=branches --forward_process.clip=0.2",
            "clip is 0.2, but it must be null with forward_process.weighting",
        ),
        (
            f"{FORWARD} --training.updates_per_rollout=2 --rollout.micro_batch_size=1 "
            f"{BEST_AND_WORST} --rollout.num_generations=4",
            "best_and_worst is 1, .* must be 0: several updates split the videos",
        ),
        (
            f"{FORWARD} --forward_process.sampling_guidance=5",
            "guidance_scale is 2.0, but with .*sampling_guidance 5",
        ),
        (
            "--forward_process.sampling_guidance=5 --rollout.guidance_scale=1",
            "training.update is 'two_phase'.*to null",
        ),
        (
            f"{FORWARD} --rollout.sde_type=ode --rollout.initial_noise=shared",
            "rollout.initial_noise",
        ),
        (
            "--rollout.negative_prompt=x --rollout.guidance_scale=1",
            "negative_prompt is .*empty with",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tiny_run: MakeRun, words: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_run(*(f"--{word}" for word in words.removeprefix("--").split(" --")))


def test_by_default_trained_adaln_weights_are_no_mistake(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run(ADALN_TARGETS))
    before = weights(trainer)
    assert trainer.iterate()["ratio/max_deviation"] == 0.0
    after = weights(trainer)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("norm1.linear" in name for name in moved)


WARNED_OF = {
    "changes nothing": [
        ("", True),
        ("--rollout.sde_type=cps", True),
        ("--rollout.sde_window.size=5", True),
        ("--rollout.sde_window.size=4 --rollout.sde_window.stride=0", False),
        (f"{FORWARD} --rollout.sde_type=ode", False),
        ("--rollout.solver_order=1", False),
    ],
    "per update: nearly all public recipes have at least 64 of 8": [
        ("--rollout.batch_size=64", False),
        ("--rollout.batch_size=56", True),
        ("--rollout.batch_size=64 --rollout.num_generations=16", True),
        (f"--rollout.batch_size=64 {FORWARD} --training.updates_per_rollout=2 --rollout.micro_batch_size=1", True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("said", WARNED_OF)
def test_a_run_is_warned_of_what_it_may_regret(
    said: str, tiny_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    """An order of the solver that no step takes, and few videos or prompts."""
    given = ["--rollout.num_steps=6", "--rollout.solver_order=2"]
    for words, told in WARNED_OF[said]:
        config = tiny_run(*given, *words.split())
        sizes = config.rollout
        caplog.clear()
        objective_of(config).check_run(
            config, sizes.batch_size // sizes.num_generations
        )
        assert any(said in message for message in caplog.messages) == told, words


def orders(config: RunConfig) -> list[list[int]]:
    """The steps that each video of a rollout trains on, in order."""
    trainer = build_trainer(config)
    return [list(order) for order in trainer._score(*trainer._rollout())[0].orders]


def test_timesteps_are_permuted_per_sample_and_fraction_counts(
    tiny_run: MakeRun,
) -> None:
    permuted = orders(
        tiny_run("--rollout.num_steps=8", "--training.timestep_fraction=0.5")
    )
    assert all(len(set(order)) == len(order) == 4 for order in permuted)
    assert any(order != permuted[0] for order in permuted)
    config = tiny_run("--rollout.num_steps=8", "--training.permute_timesteps=false")
    assert (
        orders(config)
        == [rollout_table(config.rollout, 0).trainable.nonzero().flatten().tolist()] * 4
    )


def test_sde_window_limits_noise_and_training(tiny_run: MakeRun) -> None:
    def window(rollout: int, *words: str) -> list[int]:
        config = tiny_run(
            "--rollout.num_steps=6", "--rollout.sde_window.size=2", *words
        )
        table = rollout_table(config.rollout, rollout)
        assert torch.equal(table.std > 0, table.trainable)
        return table.trainable.nonzero().flatten().tolist()

    stride = "--rollout.sde_window.stride=3"
    assert [window(rollout, stride) for rollout in range(3)] == [[0, 1], [3, 4], [0, 1]]
    assert window(5) == [0, 5] and window(7, "--rollout.sde_window.stride=0") == [0, 1]
    half = "--rollout.sde_window.within=0.5"
    assert [window(rollout, half) for rollout in range(3)] == [[0, 1], [1, 2], [0, 2]]
    least = ["--rollout.sde_window.within=0.1", "--rollout.sde_window.size=1"]
    assert window(3, *least) == [0], "at least one step"
    found = orders(tiny_run("--rollout.num_steps=6", "--rollout.sde_window.size=2"))
    assert all(set(order) == {0, 1} for order in found)


def test_a_run_encodes_and_shows_to_rewards_what_it_will_use(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[list[str]] = []
    prepare = WordEncoder.prepare
    monkeypatch.setattr(
        WordEncoder,
        "prepare",
        lambda self, texts, *more: (
            encoded.append(list(texts)) or prepare(self, texts, *more)
        ),
    )
    shown = Mock(wraps=CompositeReward.from_config)
    monkeypatch.setattr(CompositeReward, "from_config", shown)
    names = [caption.text for caption in all_captions()]
    words = (
        "--training.num_updates=6",
        "--training.updates_per_rollout=2",
        "--evaluation.num_prompts=2",
    )
    config = tiny_run(*words)
    config = replace(config, data=replace(config.data, prompts=names))
    trainer = build_trainer(config)
    per_rollout = trainer.prompts_per_rollout
    taken = [prompt.text for prompt in trainer.schedule.take(0, 3 * per_rollout)]
    evaluated = [prompt.text for prompt in trainer.eval_prompts]
    assert encoded[-1] == [
        config.rollout.negative_prompt,
        *dict.fromkeys([*taken, *evaluated]),
    ]
    assert (
        len(encoded[-1]) < len(names) / 2 and shown.call_args.args[1] == encoded[-1][1:]
    )
    build_trainer(
        replace(config, evaluation=replace(config.evaluation, every=0)), done=(4, 2)
    )
    assert encoded[-1][1:] == list(dict.fromkeys(taken[2 * per_rollout :])), (
        "the rest of a run that goes on"
    )
    build_trainer(replace(config, training=replace(config.training, num_updates=10**9)))
    assert set(encoded[-1][1:]) == {*names, *evaluated}


def test_a_long_list_is_ordered_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = PromptSchedule(
        [Prompt(text="", index=i) for i in range(50)], seed=0, shuffle=True
    )
    draw = Mock(wraps=torch.randperm)
    monkeypatch.setattr(torch, "randperm", draw)
    schedule.take(0, 120)
    assert draw.call_count == 3


def test_fixed_initial_noise_starts_a_member_alike_in_every_rollout_and_for_every_prompt(
    tiny_run: MakeRun,
) -> None:
    trainer = build_trainer(tiny_run("--rollout.initial_noise=fixed"))
    first = trainer._rollout()[0][0]
    trainer.update += 1
    second = trainer._rollout()[0][0]
    start = first.latents[0]
    assert first.keys[0].prompt_index != first.keys[2].prompt_index
    assert torch.equal(start[:2], start[2:4]) and not torch.equal(start[0], start[1])
    assert torch.equal(start, second.latents[0]) and not torch.equal(
        first.latents[1], second.latents[1]
    )
    keys = [
        replace(first.keys[0], seed=seed, sample_index=member)
        for seed, member in ((5, 0), (6, 0), (5, 2))
    ]
    one, other, again = initial_latents(keys, (4,), kind="fixed", members=2)
    assert not torch.equal(one, other), "a prompt's own seed counts"
    assert torch.equal(one, again), "its second group starts like its first"


def test_ema_is_evaluated_and_lags_and_the_trained_weights_come_back(
    tiny_run: MakeRun,
) -> None:
    trainer = build_trainer(
        tiny_run("--training.ema_decay=0.5", "--optimizer.learning_rate=0.1")
    )
    start = weights(trainer)
    trainer.iterate()
    assert trainer.ema is not None
    after = weights(trainer)
    for name, value in trainer.ema.values.items():
        # The decay of the first update is 1 / 10: the average warms up.
        torch.testing.assert_close(value, 0.1 * start[name] + 0.9 * after[name])
    averaged = trainer.evaluate().reward
    with pytest.raises(KeyboardInterrupt), trainer.evaluated_weights():
        assert not all(torch.equal(after[n], p) for n, p in weights(trainer).items())
        raise KeyboardInterrupt
    assert all(torch.equal(after[n], p) for n, p in weights(trainer).items())
    trainer.ema.refresh()
    assert trainer.evaluate().reward != averaged


def test_gradients_are_clipped_to_the_global_norm(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run("--optimizer.max_grad_norm=1e-6"))
    norms: list[float] = []
    step = trainer.engine.step

    def spy() -> None:
        grads = [p.grad for p in trainer.parameters.values() if p.grad is not None]
        norms.append(
            float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads])))
        )
        step()

    trainer.engine.step = spy  # type: ignore[method-assign]
    assert trainer.iterate()["grad_norm"] > 1e-6
    assert norms[0] == pytest.approx(1e-6, rel=1e-2)


# --------------------------------------------------------------------------------------
# global generators


def test_python_numpy_and_adapters_are_seeded_by_the_run(tiny_run: MakeRun) -> None:
    values = []
    for seed in (5, 5, 2**40 + 6):
        trainer = build_trainer(tiny_run(f"--seed={seed}"))
        drawn = (random.random(), float(np.random.rand()))
        values.append((*drawn, *(float(w.sum()) for w in weights(trainer).values())))
    assert values[0] == values[1]
    # The second factor of an adapter begins as zero.
    assert not {*values[0]} & {*values[2]} - {0.0}


def draws(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    return torch.tensor(
        [
            random.random() + float(np.random.rand()) + float(torch.rand(()))
            for _ in prompts
        ]
    )


def test_what_a_reward_draws_is_a_function_of_seed_update_and_video(
    tiny_run: MakeRun,
) -> None:
    """So a run that goes on, and one on other ranks, draws the same, and evaluations
    pair.
    """
    config = tiny_run(
        f"--reward.rewards=[{__name__}:draws]", "--reward.weights={draws: 1}"
    )
    trainer = build_trainer(config)
    again = build_trainer(config)
    first = trainer.iterate()["reward/mean"]
    second = trainer.iterate()["reward/mean"]
    assert first != second
    again.update = 1
    again.rollouts = 1
    draws(torch.empty(0), ["another process has drawn less or more"])
    assert again.iterate()["reward/mean"] == second
    assert trainer.evaluate().reward == again.evaluate().reward


def constant(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    return torch.ones(len(videos))


def test_a_rollout_without_spread_is_a_warning_once(
    tiny_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    words = [
        f"--reward.rewards=[{__name__}:constant]",
        "--reward.weights={constant: 1}",
    ]
    trainer = build_trainer(tiny_run(*words))
    for _ in range(2):
        trainer.iterate()
    (told,) = [m for m in caplog.messages if "all have the same reward" in m]
    assert told.startswith("Update 1: ") and "Look at what constant returns" in told
    # A smaller eps would make whole steps of what the KL and rounding leave.
    assert "optimizer.eps" not in caplog.text


def test_guidance_leads_away_from_the_negative_prompt(
    tiny_run: Callable[..., RunConfig],
) -> None:
    text = "a red circle moving left"
    plain, negative = (
        build_trainer(tiny_run(*words))
        for words in ([], [f"--rollout.negative_prompt={text}"])
    )
    assert torch.equal(negative.policy.uncond.text, plain.embed(text).text)
    assert not torch.equal(negative.policy.uncond.text, plain.policy.uncond.text)
    first = plain.iterate()
    other = negative.iterate()
    assert (
        other["ratio/first_max_deviation"] == 0
        and other["reward/mean"] != first["reward/mean"]
    )


def test_the_start_looks_at_rates_steps_and_guidance(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `doctor` does; a small model has no published rate."""
    build_trainer(tiny_run("--optimizer.learning_rate=0.1"))
    assert "optimizer.learning_rate" not in caplog.text
    monkeypatch.setattr(optim, "LARGE_MODEL", 1)
    monkeypatch.setattr(
        WeightFacts,
        "few_steps",
        lambda self, steps: {key: f"{key} {n}" for key, n in steps.items()},
    )
    build_trainer(tiny_run("--optimizer.learning_rate=0.1", "--evaluation.num_steps=7"))
    words = (
        "moves weights 88 times as far",
        "rollout.num_steps 4",
        "evaluation.num_steps 7",
    )
    assert all(word in caplog.text for word in words), caplog.text
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        WeightFacts, "check_guidance", lambda self, *given: seen.append(given)
    )
    build_trainer(
        tiny_run(
            *FORWARD.split(),
            "--rollout.guidance_scale=1",
            "--forward_process.sampling_guidance=5",
        )
    )
    assert seen == [(1.0,), (5.0, "forward_process.sampling_guidance")]
