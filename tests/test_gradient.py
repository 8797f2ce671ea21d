"""What the update of a rollout computes, and that what it leaves out changes nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.config.schema import RunConfig
from sage_fast.gradient import TwoPhaseGradient
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import ScoredRollout
from sage_fast.run.run import build_trainer
from sage_fast.trainer import Trainer
from tests.tiny.velocity_field import move_weights

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
