"""What the update of a rollout computes, and that what it leaves out changes nothing."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.data import kl_factors
from sage_fast.gradient import TwoPhaseGradient, gather_terms
from sage_fast.objective import kl_uses
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import ScoredRollout, update_metrics
from sage_fast.run.run import build_trainer
from sage_fast.trainer import Trainer
from tests.tiny.velocity_field import move_weights, use_smooth_velocity

MakeRun = Callable[..., RunConfig]


class BrightSquares:
    """Brightness; all videos of a circle are equally good, and triangles cannot be scored."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if any("triangle" in prompt for prompt in prompts):
            raise ConnectionError("the scoring server is gone")
        circle = torch.tensor(["circle" in prompt for prompt in prompts])
        return {"brightness": videos.float().mean((1, 2, 3, 4)).masked_fill(circle, 0.5)}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))


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
    """Guided velocities by phase of the coming iterations; `none` is where the advantages are made."""
    counts = {"rollout": 0, "anchor": 0, "update": 0}
    phase, velocity, enter = "", GuidedPolicy.velocity, trainer._phase

    def entering(name: str) -> Any:
        nonlocal phase
        phase = name
        return enter(name)

    def counted(self: GuidedPolicy, *arguments: Any) -> Tensor:
        counts[phase] += 1
        return velocity(self, *arguments)

    monkeypatch.setattr(trainer, "_phase", entering)
    monkeypatch.setattr(GuidedPolicy, "velocity", counted)
    return counts


# ------------------------------------------------------------------------------------------ nothing for nothing

SQUARE_AND_CIRCLE, SQUARE_AND_TRIANGLE = ("square", "circle"), ("square", "triangle")
# Shapes, overrides, whether the anchor lies behind; passes of the anchor and of the update, of 8 each.
LEFT_OUT = {
    "no-spread": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=none"], False, (0, 4)),
    "no-spread-anywhere": (("circle", "circle"), ["--objective.kl_mode=none"], False, (0, 0)),
    "fresh-anchor": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=moving"], False, (0, 4)),
    "exact-velocity-kl": (SQUARE_AND_CIRCLE, ["--objective.kl_velocity=exact"], False, (0, 4)),
    "unweighted-kl": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=fixed", "--objective.kl_position_weight=0"], True, (8, 4)),
    "anchor-behind": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=moving"], True, (8, 8)),
    "estimated-kl": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=stepwise"], False, (0, 8)),
    "dropped": (SQUARE_AND_TRIANGLE, ["--objective.kl_mode=dual"], True, (4, 4)),
    "dropped-twice-updated": (SQUARE_AND_TRIANGLE, ["--training.updates_per_rollout=2"], True, (4, 4)),
    "twice-updated": (SQUARE_AND_CIRCLE, ["--objective.kl_mode=none", "--training.updates_per_rollout=2"], False, (0, 4)),
    "twice-updated-kl": (SQUARE_AND_CIRCLE, ["--training.updates_per_rollout=2"], False, (0, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_has_no_gradient_takes_no_pass_and_changes_no_bit(
    name: str, tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, overrides, behind, expected = LEFT_OUT[name]
    config = tiny_run(*videos_of(tmp_path, *shapes), *overrides)

    def train() -> tuple[dict[str, float], list[Tensor], dict[str, int]]:
        with monkeypatch.context() as patch:
            trainer = build_trainer(config)
            if behind:
                move_weights(trainer)
            counts = passes(trainer, patch)
            record = trainer.iterate()
        state = [t.clone() for group in trainer.tensors().values() for t in group.values()]
        return {k: v for k, v in record.items() if not k.startswith("time/")}, state, counts

    record, state, counts = train()
    assert (counts["anchor"], counts["update"]) == expected
    monkeypatch.setattr(
        TwoPhaseGradient,
        "_passes",
        lambda self, scored, wanted, positions: [(b, p) for b in range(len(scored.trajectories)) for p in positions],
    )
    everything = train()
    assert everything[2]["update"] == 8
    assert all(torch.equal(a, b) for a, b in zip(state, everything[1], strict=True))
    assert record == everything[0]


def test_ranks_that_keep_step_make_as_many_passes() -> None:
    """Two ranks with two micro-batches of two videos, three positions of which the second and third are asked for."""
    wanted = torch.zeros(8, 2, dtype=torch.bool)
    wanted[0, 1] = wanted[1, 1] = True  # rank 0: one pass
    wanted[4] = wanted[6, 0] = True  # rank 1: three
    for lockstep, first, second in (
        (False, [(0, 2)], [(0, 1), (0, 2), (1, 1)]),
        (True, [(0, 1), (0, 2), (1, 1)], [(0, 1), (0, 2), (1, 1)]),
    ):
        gradient = SimpleNamespace(engine=SimpleNamespace(lockstep=lockstep))
        found = []
        for rank in range(2):
            scored = ScoredRollout(
                trajectories=[None, None],  # type: ignore[list-item]
                orders=[[5, 3, 4]] * 4,
                own=slice(4 * rank, 4 * rank + 4),
                all_advantages=torch.ones(8),
                all_trained=torch.ones(8, dtype=torch.bool),
                all_weights=torch.ones(8, 3),
            )
            found.append(TwoPhaseGradient._passes(gradient, scored, wanted, [1, 2]))  # type: ignore[arg-type]
            nothing = TwoPhaseGradient._passes(gradient, scored, torch.zeros_like(wanted), [1, 2])  # type: ignore[arg-type]
            assert len(nothing) == (1 if lockstep else 0)
        assert found == [first, second]


# ------------------------------------------------------------------------------------------ estimates of the gradient

STRONG_KL = ["--kl_weight.minimum=0.5", "--kl_weight.maximum=0.5", "--objective.kl_velocity_weight=0.7"]
EVERY_SDE = ("sage_grpo", "sage_exact", "dance_grpo", "flow_grpo", "cps")
EVERY_KL = ("none", "fixed", "stepwise", "fixed_stepwise", "moving", "dual")


class Estimates:
    """Gradients and metrics of one rollout of a trainer, by what is drawn; in float64, with the anchor behind."""

    def __init__(self, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = build_trainer(config)
        use_smooth_velocity(self.trainer, monkeypatch)
        move_weights(self.trainer)

    def gradient(self, factors: Sequence[float] | None = None) -> tuple[Tensor, dict[str, float]]:
        """Of a draw of positions for the KL; None is all."""
        trainer = self.trainer
        num_steps = len(trainer._kl_factors())
        trainer.gradient.begin(trainer.kl_weight.weight, trainer.anchor, factors or [1.0] * num_steps)
        scored = trainer._score(trainer._rollout(), {})
        trainer.gradient.measure_anchor(scored)
        terms = trainer.gradient.accumulate(scored, range(num_steps), trainer.kl_weight.weight)
        terms, weights, fault = gather_terms(scored, terms, range(num_steps), trainer.world)
        assert fault is None
        found = torch.cat([p.grad.flatten() for p in trainer.parameters.values()])  # type: ignore[union-attr]
        trainer.engine.zero_grad()
        return found, update_metrics(terms, weights)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("update", ["two_phase", "single_pass"])
@pytest.mark.parametrize(
    ("sde_type", "kl_mode"),
    [("sage_grpo", mode) for mode in EVERY_KL if kl_uses(mode)[0]] + [(sde_type, "dual") for sde_type in EVERY_SDE[1:]],
)
def test_the_kl_at_a_share_of_the_steps_is_unbiased(
    update: str, sde_type: str, kl_mode: str, tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over all draws is the whole gradient, and so is that of the KL which the controller watches."""
    config = tiny_run(
        *STRONG_KL,
        "--rollout.micro_batch_size=1",
        f"--training.update={update}",
        f"--rollout.sde_type={sde_type}",
        f"--objective.kl_mode={kl_mode}",
        "--objective.kl_position_fraction=0.5",
    )
    estimates = Estimates(config, monkeypatch)
    whole, metrics = estimates.gradient()
    num_steps = len(estimates.trainer._kl_factors())
    count = num_steps // 2
    draws = [
        [num_steps / count if position in drawn else 0.0 for position in range(num_steps)]
        for drawn in itertools.combinations(range(num_steps), count)
    ]
    found = [estimates.gradient(factors) for factors in draws]
    assert relative(torch.stack([gradient for gradient, _ in found]).mean(0), whole) < 1e-10
    assert relative(found[0][0], whole) > 1e-3
    assert sum(m["kl/position"] for _, m in found) / len(found) == pytest.approx(metrics["kl/position"], rel=1e-6)
    assert all(m["ratio/mean"] == 1.0 for _, m in found)
    assert estimates.trainer._kl_factors() in draws


def test_every_draw_of_positions_is_as_likely() -> None:
    seen = Counter(tuple(kl_factors(7, update, 4, 0.5)) for update in range(3000))
    assert len(seen) == 6 and all(abs(count - 500) < 100 for count in seen.values())
    assert kl_factors(7, 0, 20, 0.25).count(4.0) == 5 and sum(kl_factors(7, 0, 18, 0.25)) == pytest.approx(18)
    assert kl_factors(7, 3, 20, 0.25) != kl_factors(8, 3, 20, 0.25)
    assert kl_factors(0, 0, 3, 1.0) == [1.0] * 3 and kl_factors(0, 0, 3, 0.01).count(3.0) == 1


@pytest.mark.parametrize("update", ["two_phase", "single_pass"])
def test_the_anchor_is_measured_where_the_kl_counts(
    update: str, tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 videos of 4 steps, one at a time: 4 forwards of the anchor in place of 16, and 4 second backward passes."""
    config = tiny_run(
        "--rollout.micro_batch_size=1", f"--training.update={update}", "--objective.kl_position_fraction=0.25"
    )
    trainer = build_trainer(config)
    move_weights(trainer)
    counts = passes(trainer, monkeypatch)
    pulled: list[int] = []
    pull = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *given, **options: (pulled.append(len(given)), pull(*given, **options))[1]
    )
    trainer.iterate()
    if update == "two_phase":
        assert counts == {"rollout": 16, "anchor": 4, "update": 16}
    else:
        assert counts == {"rollout": 20, "anchor": 0, "update": 0}
        # Autograd is asked for a product by three arguments, and for a cotangent by three: c_1, and c_2 where it counts.
        assert len(pulled) == 2 * (16 + 4)


def test_a_share_of_a_kl_that_is_not_there_is_refused(tiny_run: MakeRun) -> None:
    for mode in ("none", "stepwise"):
        with pytest.raises(ConfigError, match=r"objective.kl_position_fraction is 0.5, but kl_mode .* set it to 1, or"):
            tiny_run("--objective.kl_position_fraction=0.5", f"--objective.kl_mode={mode}")
    with pytest.raises(ConfigError, match=r"objective.kl_position_fraction is 0.0; it must be in \(0, 1\]"):
        tiny_run("--objective.kl_position_fraction=0")
