"""The update of a rollout: its gradient, and that the work it leaves out changes
nothing.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast import trainer as trainer_module
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import ObjectiveConfig
from sage_fast.data import best_and_worst, kl_factors
from sage_fast.kernels import PolicyTerms
from sage_fast.objectives import grpo, single_pass
from sage_fast.objectives.base import gather_terms, second_half
from sage_fast.objectives.grpo import Replay
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import ScoredRollout
from sage_fast.rollout import at_steps, step_columns
from sage_fast.run.run import build_trainer
from sage_fast.sde import sigma_schedule, transition_table
from sage_fast.trainer import Trainer
from tests.made_runs import untimed
from tests.tiny.velocity_field import move_weights, relative, use_smooth_velocity

MakeRun = Callable[..., RunConfig]


class BrightSquares:
    """Brightness; all videos of a circle are equally good, and triangles cannot be
    scored.
    """

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if any("triangle" in prompt for prompt in prompts):
            raise ConnectionError("the scoring server is gone")
        circle = torch.tensor(["circle" in prompt for prompt in prompts])
        return {
            "brightness": videos.float().mean((1, 2, 3, 4)).masked_fill(circle, 0.5)
        }


def videos_of(folder: Path, *shapes: str) -> list[str]:
    """Overrides: two videos of each shape in every rollout, each a micro-batch."""
    file = folder / "shapes.txt"
    file.write_text("".join(f"a blue {shape} moving up\n" for shape in shapes))
    return [
        f"--data.prompts={file}",
        "--data.shuffle=false",
        "--evaluation.every=0",
        "--evaluation.num_prompts=null",
        f"--reward.rewards=['{__name__}:BrightSquares']",
        "--reward.weights={brightness: 1}",
        "--reward.on_failure=drop_group",
        f"--rollout.batch_size={2 * len(shapes)}",
        "--rollout.micro_batch_size=2",
    ]


def passes(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Guided velocities by phase of the coming iterations; `none` is where the
    advantages are made.
    """
    counts = {"rollout": 0, "anchor": 0, "update": 0}
    phase = ""
    velocity = GuidedPolicy.velocity
    enter = trainer._phase

    def entering(name: str) -> Any:
        nonlocal phase
        phase = name
        return enter(name)

    def counted(self: GuidedPolicy, *arguments: Any, **options: Any) -> Tensor:
        counts[phase] += 1
        return velocity(self, *arguments, **options)

    monkeypatch.setattr(trainer, "_phase", entering)
    monkeypatch.setattr(GuidedPolicy, "velocity", counted)
    return counts


def test_every_sample_has_the_values_and_columns_of_its_own_step() -> None:
    table = transition_table("flow_grpo", sigma_schedule(4, 3.0), 0.5)
    settings = ObjectiveConfig(ratio="ratio_norm", equalizer=False)
    steps = [2, 0, 1]
    advantage = torch.tensor([1.0, -1.0, 0.5])
    columns = step_columns(settings, table, steps, advantage)
    torch.testing.assert_close(columns.gain, table.gain[steps].float())
    torch.testing.assert_close(columns.std, (table.std[steps].float() / 2).sqrt())
    torch.testing.assert_close(
        columns.scale, 1 / (table.sigmas[steps] - table.sigmas[[3, 1, 2]]).float()
    )
    assert columns.advantage is advantage
    assert torch.equal(
        step_columns(ObjectiveConfig(), table, steps, advantage).scale,
        table.scale[steps].float(),
    )
    values = [torch.tensor([step, step + 10, step + 20]) for step in range(4)]
    assert at_steps(values, steps).tolist() == [2, 10, 21]


def shared_out(rows: Tensor, second_half: int | None = None) -> ScoredRollout:
    """A rollout of ranks with these videos, of which the second one is not trained."""
    return ScoredRollout(
        trajectories=[SimpleNamespace(samples=range(2))],  # type: ignore[list-item]
        all_orders=[[0]] * 4,
        rows=rows,
        rank=0,
        all_advantages=torch.ones(4),
        all_trained=torch.tensor([True, False, True, True]),
        second_half=second_half,
    )


def test_ranks_that_share_a_video_count_its_terms_once() -> None:
    """Of two pairs of ranks, the first one with videos 0 and 1, the other with 2 and 3."""
    scored = shared_out(torch.tensor([[0, 1], [2, 3]]))
    fields = len(PolicyTerms._fields)
    other = (torch.tensor([[2.0, 3.0]] * fields), "")
    world = SimpleNamespace(size=4, sp=2, gather=lambda own: [own, own, other, other])
    own = PolicyTerms(*[torch.arange(2.0)] * fields)
    terms, fault = gather_terms(scored, own, [0], world)  # type: ignore[arg-type]
    assert fault is None and terms.loss.tolist() == terms.ratio.tolist() == [0, 2, 3]


def test_every_draw_of_positions_is_as_likely() -> None:
    seen = Counter(tuple(kl_factors(7, update, 4, 0.5)) for update in range(1200))
    assert len(seen) == 6 and all(abs(count - 200) < 60 for count in seen.values())
    assert kl_factors(7, 0, 20, 0.25).count(4.0) == 5 and sum(
        kl_factors(7, 0, 18, 0.25)
    ) == pytest.approx(18)
    assert kl_factors(7, 3, 20, 0.25) != kl_factors(8, 3, 20, 0.25)
    assert (
        kl_factors(0, 0, 3, 1.0) == [1.0] * 3
        and kl_factors(0, 0, 3, 0.01).count(3.0) == 1
    )


def test_the_best_and_the_worst_are_chosen_and_ties_broken_by_member() -> None:
    advantages = torch.tensor([[0.5, -1.0, 2.0, -1.0, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0]])
    for count, expected in (
        (1, [[2, 3], [0, 4]]),
        (2, [[0, 1, 2, 3], [0, 1, 3, 4]]),
        (0, [[0, 1, 2, 3, 4]] * 2),
    ):
        chosen = best_and_worst(advantages, count)
        assert [row.nonzero().flatten().tolist() for row in chosen] == expected
    many = torch.arange(64).remainder(3).float()[None]
    assert best_and_worst(many, 3).nonzero()[:, 1].tolist() == [2, 5, 8, 57, 60, 63]


# --------------------------------------------------------------------------------------
# nothing for nothing

SQUARE_AND_CIRCLE = ("square", "circle")
SQUARE_AND_TRIANGLE = ("square", "triangle")
TWICE = "--training.updates_per_rollout=2"
UNWEIGHTED = "--objective.kl_position_weight=0"
# Shapes, overrides, whether the anchor lies behind; passes of the anchor and of the
# update, of 4 each.
LEFT_OUT = {
    "no-spread": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=none"], False, (0, 2)),
    "unweighted-kl": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=fixed", UNWEIGHTED], True, (4, 2)),
    "estimated-kl": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=stepwise"], False, (0, 4)),
    "dropped": (SQUARE_AND_TRIANGLE, ["--objective.kl_mode=dual"], True, (2, 2)),
    "twice-updated": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=none", TWICE], False, (0, 3)),
    "twice-updated-kl": (SQUARE_AND_CIRCLE, [TWICE], False, (0, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_has_no_gradient_takes_no_pass_and_changes_no_bit(
    name: str, tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, overrides, behind, expected = LEFT_OUT[name]
    words = [*videos_of(tmp_path, *shapes), "--rollout.num_steps=2"]
    config = tiny_run(*words, *overrides)

    def train() -> tuple[dict[str, float], list[Tensor], dict[str, int]]:
        with monkeypatch.context() as patch:
            trainer = build_trainer(config)
            if behind:
                move_weights(trainer)
            counts = passes(trainer, patch)
            record = trainer.iterate()
        state = [
            t.clone() for group in trainer.tensors().values() for t in group.values()
        ]
        return (
            {k: v for k, v in record.items() if not k.startswith("time/")},
            state,
            counts,
        )

    record, state, counts = train()
    assert (counts["anchor"], counts["update"]) == expected
    monkeypatch.setattr(
        Replay,
        "_passes",
        lambda self, scored, wanted, positions: [
            (b, p) for b in range(len(scored.trajectories)) for p in positions
        ],
    )
    everything = train()
    assert everything[2]["update"] == 4
    assert all(torch.equal(a, b) for a, b in zip(state, everything[1], strict=True))
    assert record == everything[0]


def test_to_measure_the_kls_share_takes_no_more_passes_than_to_train(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have not moved: videos without advantages still need none."""
    words = videos_of(tmp_path, *SQUARE_AND_CIRCLE)
    trainer = build_trainer(
        tiny_run(*words, "--objective.kl_mode=fixed", "--training.kl_share_every=1")
    )
    counts = passes(trainer, monkeypatch)
    # at its minimum, which takes no pass to know
    assert trainer.iterate()["kl/grad_share"] == 0.0
    assert counts["update"] == 2 * 4


def test_the_second_update_of_a_rollout_is_differentiated_where_the_first_has_led(
    tiny_run: MakeRun,
) -> None:
    found = []
    for guidance in ("paired", "split"):
        words = (
            *STRONG_KL,
            TWICE,
            "--optimizer.learning_rate=0.2",
            "--objective.clip_range=0.5",
        )
        record = untimed(
            build_trainer(tiny_run(*words, f"--training.guidance={guidance}")).iterate()
        )
        found.append(record)
    assert found[0]["ratio/max_deviation"] > 1e-3
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-7)


# --------------------------------------------------------------------------------------
# estimates of the gradient

# A weight of the KL terms at which they are a good part of the gradient.
STRONG_KL = [
    "--kl_weight.minimum=0.5",
    "--kl_weight.maximum=0.5",
    "--objective.kl_velocity_weight=0.7",
]
EXACT = [
    "--rollout.micro_batch_size=1",
    "--rollout.num_generations=4",
    "--optimizer.max_grad_norm=1e9",
]


class Estimates:
    """Gradients and metrics of one rollout of a trainer, by what is drawn; in float64,
    with the anchor behind.
    """

    def __init__(self, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = build_trainer(config)
        use_smooth_velocity(self.trainer, monkeypatch)
        move_weights(self.trainer)
        self.trainer.objective.begin(0, 0)
        self.drawn = list(self.trainer.objective.kl_factors)
        self.num_steps = len(self.drawn)

    def scored(self, factors: Sequence[float] | None = None) -> ScoredRollout:
        """The rollout, always the same, with a draw of positions for the KL; None means
        all.
        """
        trainer = self.trainer
        trainer.objective.begin(0, 0)
        trainer.objective.kl_factors = factors or [1.0] * self.num_steps
        return trainer._score(*trainer._rollout())[0]

    def gradient(self, scored: ScoredRollout) -> tuple[Tensor, dict[str, float]]:
        """Of all ranks."""
        trainer = self.trainer
        positions = range(len(scored.all_orders[0]))
        trainer.objective.measure(scored)
        terms = trainer.objective.accumulate(scored, positions, 0)
        terms, fault = gather_terms(scored, terms, positions, trainer.world)
        assert fault is None
        trainer.engine.clip_gradients()
        found = torch.cat([p.grad.flatten() for p in trainer.parameters.values()])  # type: ignore[union-attr]
        trainer.engine.zero_grad()
        trainer.objective.verify(terms, 0)
        return found, trainer.objective.statistics(terms)[0]

    def over_positions(self) -> tuple[Tensor, Tensor, list[dict[str, float]]]:
        """Gradients (draws, parameters) by which half of the positions the KL counts
        at, the whole, and metrics.
        """
        whole, metrics = self.gradient(self.scored())
        count = self.num_steps // 2
        draws = [
            [
                self.num_steps / count if position in drawn else 0.0
                for position in range(self.num_steps)
            ]
            for drawn in itertools.combinations(range(self.num_steps), count)
        ]
        assert self.drawn in draws
        found = [self.gradient(self.scored(factors)) for factors in draws]
        return (
            torch.stack([gradient for gradient, _ in found]),
            whole,
            [metrics, *(m for _, m in found)],
        )


@pytest.mark.parametrize(
    ("update", "sde_type", "kl_mode"),
    [
        ("two_phase", "sage_exact", "fixed"),
        ("two_phase", "cps", "dual"),
        ("single_pass", "sage_grpo", "dual"),
    ],
)
def test_the_kl_at_a_share_of_the_steps_is_unbiased(
    update: str,
    sde_type: str,
    kl_mode: str,
    tiny_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mean over all draws is the whole gradient, and so is that of the KL which the
    controller watches.
    """
    config = tiny_run(
        *EXACT,
        *STRONG_KL,
        "--rollout.num_steps=3",
        f"--training.update={update}",
        f"--rollout.sde_type={sde_type}",
        f"--objective.kl_mode={kl_mode}",
        "--objective.kl_position_fraction=0.5",
    )
    found, whole, (metrics, *drawn) = Estimates(config, monkeypatch).over_positions()
    assert relative(found.mean(0), whole) < 1e-10
    assert relative(found[0], whole) > 1e-3
    assert sum(m["kl/position"] for m in drawn) / len(drawn) == pytest.approx(
        metrics["kl/position"], rel=1e-6
    )
    assert all(m["ratio/mean"] == 1.0 for m in drawn)


@pytest.mark.parametrize("update", ["two_phase", "single_pass"])
def test_a_share_of_every_videos_steps_is_unbiased(
    update: str, tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Videos draw for themselves and their gradients add up, so it is enough that all
    draw alike.
    """
    given = [
        *EXACT,
        *STRONG_KL,
        "--rollout.num_steps=3",
        f"--training.update={update}",
        "--objective.kl_mode=dual",
    ]
    estimates = Estimates(tiny_run(*given), monkeypatch)
    whole, _ = estimates.gradient(estimates.scored())
    part = Estimates(tiny_run(*given, "--training.timestep_fraction=0.7"), monkeypatch)
    found = []
    for drawn in itertools.combinations(range(3), 2):
        for module in (grpo, single_pass):
            monkeypatch.setattr(
                module, "trained_steps", lambda *_, drawn=drawn: list(drawn)
            )
        found.append(part.gradient(part.scored())[0])
    assert relative(torch.stack(found).mean(0), whole) < 1e-10
    assert relative(found[0], whole) > 1e-3


TRAIN_ON = ["--training.best_and_worst=1", "--rollout.num_generations=4"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["--objective.kl_mode=dual", "--rollout.num_steps=2"],
        [
            "--objective.kl_mode=stepwise",
            "--rollout.micro_batch_size=2",
            "--rollout.num_steps=2",
        ],
        ["--training.timestep_fraction=0.5", "--training.updates_per_rollout=2"],
    ],
    ids=["dual", "in-twos", "half-the-steps"],
)
def test_the_gradient_is_the_mean_over_the_chosen_videos(
    overrides: list[str], tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each video's gradient alone, from a run that trains all, and the KL is measured
    on the chosen videos.
    """
    given = [*EXACT, *STRONG_KL, *overrides]
    every = Estimates(tiny_run(*given), monkeypatch)
    scored = every.scored()
    order = sorted(
        range(4), key=lambda video: (-float(scored.all_advantages[video]), video)
    )
    chosen = [order[0], order[3]]
    alone = []
    for video in chosen:
        alone.append(
            every.gradient(replace(scored, all_trained=torch.arange(4) == video))
        )
    some = Estimates(tiny_run(*given, *TRAIN_ON), monkeypatch)
    fewer = some.scored()
    assert torch.equal(fewer.all_advantages, scored.all_advantages)
    found, metrics = some.gradient(fewer)
    assert relative(found, sum(gradient for gradient, _ in alone) / 2) < 1e-10  # type: ignore[arg-type]
    for key in ("loss", "kl/position", "kl/velocity"):
        assert metrics[key] == pytest.approx(
            sum(m[key] for _, m in alone) / 2, rel=1e-6, abs=1e-12
        )
    assert relative(found, every.gradient(scored)[0]) > 1e-3


@pytest.mark.parametrize("update", ["two_phase", "single_pass"])
def test_the_anchor_is_measured_where_the_kl_counts(
    update: str, tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 videos of 4 steps, one at a time: 4 forwards of the anchor instead of 16, and 4
    second backward passes.
    """
    config = tiny_run(
        "--rollout.micro_batch_size=1",
        f"--training.update={update}",
        "--objective.kl_position_fraction=0.25",
    )
    trainer = build_trainer(config)
    move_weights(trainer)
    counts = passes(trainer, monkeypatch)
    pulled: list[int] = []
    pull = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd,
        "grad",
        lambda *given, **options: (pulled.append(len(given)), pull(*given, **options))[
            1
        ],
    )
    trainer.iterate()
    if update == "two_phase":
        assert counts == {"rollout": 16, "anchor": 4, "update": 16}
    else:
        assert counts == {"rollout": 20, "anchor": 0, "update": 0}
        # For c_1 a cotangent and a product, and for c_2 where it counts.
        assert len(pulled) == 2 * (16 + 4)


# --------------------------------------------------------------------------------------
# its halves

HALVES = [
    "--rollout.batch_size=8",
    "--rollout.num_steps=2",
    "--forward_process.levels=2",
    "--evaluation.every=0",
    "--evaluation.num_prompts=null",
]
OF_UPDATE = {
    "two_phase": ["--objective.kl_mode=none"],
    "single_pass": ["--objective.kl_mode=none"],
    "forward_process": ["--objective.kl_mode=none", "--rollout.sde_type=ode"],
}


def gradient_and_signal(
    trainer: Trainer, scored: ScoredRollout
) -> tuple[Tensor, float | None]:
    """Of a rollout whose update is not made."""
    trainer.objective.accumulate(scored, range(len(scored.orders[0])), 0)
    trainer.engine.clip_gradients()
    gradient = torch.cat(
        [p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None]
    )
    trainer.engine.zero_grad()
    return gradient, trainer.engine.signal


def rollout_of(trainer: Trainer) -> ScoredRollout:
    """A rollout of the present weights, scored."""
    trainer.objective.begin(trainer.update, trainer.rollouts)
    with trainer.objective.sampling():
        rollout = trainer._rollout()
    scored, _ = trainer._score(*rollout)
    trainer.objective.measure(scored)
    return scored


@pytest.mark.parametrize("update", OF_UPDATE)
def test_the_signal_is_the_cosine_of_the_gradients_of_two_halves(
    tiny_run: MakeRun, update: str
) -> None:
    """Without advantages in the other half there is a half's own gradient, in a rollout
    that is the same.
    """
    words = [
        *HALVES,
        *OF_UPDATE[update],
        f"--training.update={update}",
        "--optimizer.max_grad_norm=1e9",
    ]
    trainer = build_trainer(tiny_run(*words))
    gradients = []
    signals = []
    for kept in (slice(0, 8), slice(0, 4), slice(4, 8)):
        scored = rollout_of(trainer)
        assert scored.second_half == scored.middle == 4
        advantages = torch.zeros_like(scored.all_advantages)
        advantages[kept] = scored.all_advantages[kept]
        gradient, signal = gradient_and_signal(
            trainer, replace(scored, all_advantages=advantages)
        )
        gradients.append(gradient)
        signals.append(signal)
    whole, first, second = gradients
    assert relative(first + second, whole) < 1e-5
    expected = float(torch.nn.functional.cosine_similarity(first, second, dim=0))
    assert (
        signals == [pytest.approx(expected, abs=1e-5), None, None]
        and 0.01 < abs(expected) < 0.999
    )


@pytest.mark.parametrize("update", OF_UPDATE)
def test_the_signal_changes_no_number(
    tiny_run: MakeRun, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for told in (True, False):
        if not told:
            monkeypatch.setattr(
                trainer_module, "second_half", lambda config, ranks: None
            )
        trainer = build_trainer(
            tiny_run(*HALVES, *OF_UPDATE[update], f"--training.update={update}")
        )
        row = untimed(trainer.iterate())
        assert (row.pop("grad/signal", None) is not None) == told
        found.append((row, [p.detach() for p in trainer.parameters.values()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_the_halves_are_told_apart_where_that_costs_no_pass(tiny_run: MakeRun) -> None:
    """Groups of two in micro-batches of two, unless it says otherwise."""

    def first(*words: str, ranks: int = 1) -> int | None:
        return second_half(
            tiny_run("--rollout.batch_size=4", "--rollout.micro_batch_size=2", *words),
            ranks,
        )

    assert first() == 2 and first(ranks=2) == 4
    # Of six videos in two micro-batches the second begins in the second group of three.
    in_threes = ["--rollout.batch_size=6", "--rollout.micro_batch_size=3"]
    assert first(*in_threes) is None and first(*in_threes, ranks=2) == 6
    together = "--rollout.micro_batch_size=4"
    assert first("--training.update=single_pass", together) == 2
    for alone in (
        together,
        "--rollout.num_generations=4",
        "--training.updates_per_rollout=2",
        "--training.mode=full",
        "--distributed.zero_stage=2",
    ):
        assert first(alone) is None, alone


def test_a_rank_knows_where_its_second_half_begins() -> None:
    parts = [torch.arange(2, 6), torch.arange(5, 8), torch.arange(3)]
    for at, middles in ((4, [2, 0, 3]), (None, [None] * 3)):
        assert [shared_out(rows[None], at).middle for rows in parts] == middles
