"""An update that goes wrong: numbers that are not finite, and scores that are lost."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.checkpoint.folder import list_checkpoints
from sage_fast.checkpoint.reader import open_checkpoint
from sage_fast.checkpoint.writer import CheckpointData, CheckpointWriter
from sage_fast.config.errors import DecodeError, TrainingError
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import ModelConfig
from sage_fast.distributed.engine import WeightSnapshot
from sage_fast.kernels import PolicyTerms
from sage_fast.models.family import load_components
from sage_fast.objective import KLWeightState, group_advantages
from sage_fast.records import RolloutRecord
from sage_fast.rollout import decode
from sage_fast.run.run import Run, build_trainer
from sage_fast.trainer import Trainer
from tests.made_runs import lose_scores, untimed
from tests.test_gradient import videos_of
from tests.tiny.checkpoints import save_diffusers_layout
from tests.tiny.wan import save_wan

MakeRun = Callable[..., RunConfig]


def poison(
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    ruin: Callable[[PolicyTerms], object],
) -> None:
    """Have the terms of every update, or the gradient that is there by then, ruined."""
    accumulate = trainer.objective.accumulate

    def poisoned(*arguments: Any) -> PolicyTerms:
        terms = accumulate(*arguments)
        ruin(terms)
        return terms

    monkeypatch.setattr(trainer.objective, "accumulate", poisoned)


def poison_gradients(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, updates: set[int]
) -> None:
    """Make the gradient of the given updates, counted from 0, NaN in one entry."""

    def ruin(terms: PolicyTerms) -> None:
        if trainer.update in updates:
            next(
                p for p in trainer.parameters.values() if p.grad is not None
            ).grad.flatten()[0] = float("nan")

    poison(trainer, monkeypatch, ruin)


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of weights, optimizer state and snapshots."""
    snapshots = {
        name: value.tensors()
        for name, value in vars(trainer).items()
        if isinstance(value, WeightSnapshot)
    }
    groups = {**trainer.engine.tensors(), **snapshots}
    return {
        f"{group}/{name}": t.clone()
        for group, ts in groups.items()
        for name, t in ts.items()
    }


def test_a_gradient_that_is_not_finite_is_skipped_as_often_as_allowed(
    tiny_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = [
        "--training.update=single_pass",
        "--training.skip_nonfinite_updates=1",
        "--training.ema_decay=0.9",
        "--optimizer.warmup_updates=9",
    ]
    trainer = build_trainer(tiny_run(*words, "--training.num_updates=4"))
    poison_gradients(trainer, monkeypatch, {1, 3})
    assert trainer.iterate()["update/skipped_nonfinite"] == 0
    before = everything(trainer)
    rate = trainer.engine.learning_rate
    record = trainer.iterate()
    assert record["update"] == 2 and record["update/skipped_nonfinite"] == 1
    assert all(math.isfinite(value) for value in record.values())
    assert all(
        torch.equal(value, before[name]) for name, value in everything(trainer).items()
    )
    assert trainer.engine.learning_rate == rate
    prompt = trainer.schedule.take(2, 1)[0]
    assert "Update 2 is skipped" in caplog.text and repr(prompt.text) in caplog.text
    record = trainer.iterate()
    assert record["ratio/first_max_deviation"] == 0.0 and math.isfinite(
        record["grad_norm"]
    )
    after = everything(trainer)
    assert not all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(
        TrainingError,
        match=r"Update 4: .* is not finite, after 1 that training.skip_nonfinite",
    ):
        trainer.iterate()
    assert trainer.update == 3 and all(
        torch.equal(value, after[name]) for name, value in everything(trainer).items()
    )


def test_a_loss_that_is_not_finite_is_skipped_with_its_prompt_named(
    tiny_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = build_trainer(tiny_run("--training.skip_nonfinite_updates=1"))
    poison(trainer, monkeypatch, lambda terms: terms.loss[0].fill_(float("inf")))
    before = everything(trainer)
    record = trainer.iterate()
    assert record["update/skipped_nonfinite"] == 1 and "loss" not in record
    first, second = trainer.schedule.take(0, 2)
    assert (
        f"the loss of prompt {first.index} ({first.text!r}) is not finite"
        in caplog.text
    )
    assert repr(second.text) not in caplog.text
    assert all(
        torch.equal(value, before[name]) for name, value in everything(trainer).items()
    )


@pytest.mark.parametrize(
    "mode",
    [
        ["--training.ema_decay=0.9"],
        ["--training.update=forward_process", "--rollout.sde_type=ode"],
    ],
    ids=["two_phase", "forward_process"],
)
def test_nothing_of_the_state_is_lost_in_a_checkpoint(
    mode: list[str], tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved where every part differs from a fresh trainer's: an anchor neither fresh
    nor due, a skipped update.
    """
    words = [
        *mode,
        "--objective.kl_mode=moving",
        "--training.anchor_interval=2",
        "--training.skip_nonfinite_updates=1",
    ]
    config = tiny_run(
        *words, "--kl_weight.warmup_updates=3", "--optimizer.warmup_updates=9"
    )
    trainer = build_trainer(config)
    resumed = build_trainer(config)
    poison_gradients(trainer, monkeypatch, {1})
    fresh = resumed.state()
    for _ in range(3):
        trainer.iterate()
    state = trainer.state()
    assert (
        not [key for key in state if state[key] == fresh[key]]
        and state["kl_weight"]["history"]
    )
    before = everything(resumed)
    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        folder = writer.save(3, CheckpointData(tensors=trainer.tensors(), state=state))
    checkpoint = open_checkpoint(folder)
    resumed.load(checkpoint, checkpoint.state)
    numbers = (int, KLWeightState)
    own, loaded = (
        {k: v for k, v in (vars(t) | vars(t.objective)).items() if type(v) in numbers}
        for t in (trainer, resumed)
    )
    assert own == loaded and "anchor_update" in own and resumed.state() == state
    after = everything(resumed)
    for name, value in everything(trainer).items():
        assert torch.equal(value, after[name]) and not (
            value.any() and torch.equal(value, before[name])
        ), name
    assert untimed(resumed.iterate()) == untimed(trainer.iterate())


@pytest.mark.parametrize(("value", "noise"), [(math.nan, "own"), (math.inf, "shared")])
def test_latents_that_are_not_finite_are_no_fault_of_the_reward(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, value: float, noise: str
) -> None:
    """The toy's codec clips them to pixels like any others."""
    trainer = build_trainer(tiny_run(f"--rollout.initial_noise={noise}"))
    monkeypatch.setattr(trainer.reward, "score", lambda *_, **__: pytest.fail("scored"))
    trainer.policy.transformer.proj_out.bias.data.fill_(value)
    with pytest.raises(
        DecodeError,
        match=r"Sampled latents are not finite.*check the weights, the adapter",
    ):
        trainer.iterate()
    with pytest.raises(DecodeError, match="Sampled latents are not finite"):
        trainer.evaluate()


@pytest.mark.parametrize("family", ["toy", "hunyuan15", "wan"])
def test_one_latent_of_a_batch_is_enough_in_every_family(
    family: str, tmp_path: Path
) -> None:
    save = {
        "toy": lambda folder: None,
        "hunyuan15": save_diffusers_layout,
        "wan": save_wan,
    }[family]
    save(tmp_path)
    section = ModelConfig(
        family=family, path=None if family == "toy" else str(tmp_path), device="cpu"
    )
    decoder = load_components(section).video_decoder
    latents = torch.zeros(
        2, *decoder.latent_shape(*((4, 16, 16) if family == "toy" else (5, 32, 32)))
    )
    assert len(decode(decoder, latents)) == 2
    for value in (math.nan, math.inf, -math.inf):
        latents[1, -1, -1, -1, -1] = value
        with pytest.raises(DecodeError, match="not finite"):
            decode(decoder, latents)


def test_weights_that_an_optimizer_step_ruined_are_not_saved(tiny_run: MakeRun) -> None:
    config = tiny_run(
        "--optimizer.learning_rate=1e30", "--evaluation.every=0", "--checkpoint.every=1"
    )
    with pytest.raises(
        TrainingError,
        match=r"Update 1: .* left weights that are not finite.*it is 1e\+30",
    ):
        Run(config).train()
    assert not list_checkpoints(Path(config.output_dir) / "checkpoints")


def test_ruined_weights_are_not_skipped_over(tiny_run: MakeRun) -> None:
    """No later update is finite either, and the message must not say that the weights
    are sound.
    """
    trainer = build_trainer(tiny_run("--training.skip_nonfinite_updates=9"))
    trainer.iterate()
    scored, _ = trainer._score(*trainer._rollout())
    with torch.no_grad():
        next(iter(trainer.parameters.values())).fill_(float("nan"))
    with pytest.raises(
        TrainingError,
        match="Update 1: the optimizer step left weights that are not finite",
    ):
        trainer._optimizer_update(scored, [0])


def test_advantages_stay_with_their_group_when_an_earlier_one_is_dropped(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    trainer = build_trainer(
        tiny_run(*videos_of(tmp_path, "triangle", "square", "circle"))
    )
    records: list[RolloutRecord] = []
    trainer.on_rollout = records.append
    trainer.iterate()
    (record,) = records
    assert (
        record.trained.tolist() == [False, True, True]
        and not record.advantages[0].any()
    )
    assert torch.equal(
        record.advantages[1:], group_advantages(record.reward[1:]).advantages
    )


@pytest.mark.parametrize(
    ("lost", "trained"),
    [([1], [False, True]), ([0, 3], [])],
    ids=["one", "one-of-each"],
)
def test_a_group_that_lacks_a_score_is_not_trained(
    lost: list[int],
    trained: list[bool],
    tiny_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose_scores(monkeypatch, lost)
    trainer = build_trainer(tiny_run())
    records: list[RolloutRecord] = []
    trainer.on_rollout = records.append
    if trained:
        trainer.iterate()
        assert records[0].trained.tolist() == trained
    else:
        with pytest.raises(
            TrainingError,
            match="Update 1: the reward failed in every group of the rollout",
        ):
            trainer.iterate()
