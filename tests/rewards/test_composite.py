"""Everything that may be named as a reward, and what is said when it is none."""

import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError, RewardServerError
from sage_fast.config.sections import RewardConfig
from sage_fast.distributed.world import SINGLE_PROCESS
from sage_fast.evaluation import REWARD
from sage_fast.rewards import composite as composite_module
from sage_fast.rewards.base import seed_generators
from sage_fast.rewards.composite import CompositeReward, ScoredBatch, gather_scores
from sage_fast.rewards.server import TAKEN, FunctionReward, function_score
from tests.rewards import support
from tests.rewards.support import VIDEOS, here

SAMPLES = support.samples("a", "bb", "c")
EXPECTED = support.brightness(VIDEOS, ["a", "bb", "c"]).double()


def composite(name: str, weights: dict[str, float], **options: Any) -> CompositeReward:
    return CompositeReward.from_config(
        RewardConfig(
            rewards=[here(name)],
            options={here(name): options} if options else {},
            weights=weights,
        )
    )


def test_whatever_scores_or_returns_what_scores_is_a_reward() -> None:
    """Classes and functions with options, functions that return a reward, and objects."""
    for name, options, scale in (
        ("Bright", {"scale": 2.0}, 2.0),
        ("make", {}, 1.0),
        ("OBJECT", {}, 3.0),
    ):
        scores = composite(name, {"bright": 1.0}, **options).score(VIDEOS, SAMPLES)
        torch.testing.assert_close(scores["bright"], scale * EXPECTED)
    both = composite("both", {"first": 1.0, "length": 10.0}, scale=3.0)
    scores = both.score(VIDEOS, SAMPLES)
    expected = 3 * EXPECTED + 10 * scores["length"]
    torch.testing.assert_close(both.overall(scores), expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "NEITHER",
            {},
            r"'tests.rewards.support:NEITHER' is of type int. Name a class with score\(videos",
        ),
        ("_threads", {}, "gives a float, which has no method score"),
        ("Bright", {"size": 3}, r"= \{'size': 3\} does not fit"),
        ("OBJECT", {"scale": 3}, "is an object and takes no options"),
        (
            "trl",
            {},
            r"takes \(prompts, completions, kwargs\), but a reward is called as f\(videos, prompts\)",
        ),
        (
            "alone",
            {},
            r"missing a required argument: 'videos'\. A function that scores .* f\(videos, prompts\)",
        ),
        (
            "Swapped",
            {},
            r"takes \(prompts, videos\), but a reward is called as f\(videos, prompts\)",
        ),
    ],
)
def test_what_is_no_reward_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        composite(name, {"score": 1.0}, **options)


class Returns:
    """A reward that returns a given result."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def score(self, videos: torch.Tensor, prompts: object) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            torch.ones(3),
            r"Reward 'r' returned a Tensor, but it must be {name: scores} with 3 numbers a name",
        ),
        ({"s": torch.ones(2)}, r"returned s of shape \(2,\) for 3 videos"),
        ({"s": ["a", "b", "c"]}, "returned s, which is not a tensor of numbers"),
        (
            {"s": [1.0, float("inf"), 1.0]},
            r"returned s = inf for prompt 7 \('bb'\), sample 1\.",
        ),
        (
            {"s": [1.0, 1e300, 1.0]},
            r"Reward 'r' returned s = 1e\+300 for prompt 7 \('bb'\), sample 1\.",
        ),
        (
            {"taken": [1.0, 2.0, 3.0]},
            "Two rewards return a score named 'taken'; the second is 'r'",
        ),
        (
            {"s": [10**400, 1, 1]},
            "returned s, which is not a tensor of numbers: int too large",
        ),
        (
            {"s": torch.ones(3, dtype=torch.complex64)},
            "not a tensor of numbers: it is torch.complex64",
        ),
        (
            {"s": torch.ones(3).to_sparse()},
            "returned s, which is not a tensor of numbers: .*torch.sparse_coo",
        ),
        ({0: torch.ones(3)}, "returned a score named 0. A name is a text"),
        (
            {"reward": torch.ones(3)},
            "returned a score named 'reward'. .* reward, overall, Reward stand for",
        ),
    ],
)
def test_what_a_reward_may_not_return(result: Any, message: str) -> None:
    rewards = {"first": Returns({"taken": [1.0, 2.0, 3.0]}), "r": Returns(result)}
    with pytest.raises(RewardError, match=message):
        CompositeReward(rewards, {"s": 1.0}).score(VIDEOS, SAMPLES)


def test_a_reward_declares_of_which_scores_less_is_better() -> None:
    falling = Returns({"distance": [1.0, 2.0, 3.0]})
    rewards = {"a": falling, "b": Returns({"s": [1.0, 2.0, 3.0]})}
    falling.LOWER_IS_BETTER = "distance"
    assert CompositeReward(rewards, {"s": 1.0}).lower_is_better == {"distance"}
    falling.LOWER_IS_BETTER = ("distance", "never returned")
    weighted = CompositeReward(rewards, {"s": -1.0, "distance": -2.0})
    assert weighted.lower_is_better == {"distance", "never returned", "s"}
    message = r"reward\.weights\.distance is 0\.5, .* such as -0\.5"
    with pytest.raises(ConfigError, match=message):
        CompositeReward(rewards, {"distance": 0.5})
    for wrong in (1, ("distance", 1)):
        falling.LOWER_IS_BETTER = wrong
        with pytest.raises(
            ConfigError, match="Reward 'a': LOWER_IS_BETTER is .* names"
        ):
            CompositeReward(rewards, {"s": 1.0})


def test_the_device_goes_to_rewards_that_take_one() -> None:
    names = [here("Bright"), here("brightness")]
    for options, expected in (({}, "cuda:7"), ({"device": "cpu"}, "cpu")):
        config = RewardConfig(
            rewards=names, weights={"bright": 1.0}, options={names[0]: options}
        )
        bright = CompositeReward.from_config(config, device="cuda:7").rewards[names[0]]
        assert isinstance(bright, support.Bright) and bright.device == expected


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("sys.exit", r"tried to end the process by sys\.exit\(0\)"),
        ("crash", "raised RuntimeError: out of something"),
    ],
)
def test_a_reward_cannot_end_the_run(fault: str, message: str) -> None:
    name = "Reward 'tests.rewards.support:Faulty'"
    with pytest.raises(RewardError, match=f"^{name} {message} while it was set up.$"):
        composite("Faulty", {"score": 1.0}, fault=fault, when="build")
    reward = composite("Faulty", {"score": 1.0}, fault=fault, word="bb")
    with pytest.raises(
        RewardError, match=rf"^{name} {message} on prompt 7 \('a'\), sample 0 "
    ):
        reward.score(VIDEOS, SAMPLES)
    scores, failed = reward.score_or_mark(VIDEOS, SAMPLES)
    assert failed.tolist() == [False, True, False]
    torch.testing.assert_close(scores["score"][[0, 2]], EXPECTED[[0, 2]])


def test_no_number_replaces_a_score_that_one_video_lacks() -> None:
    def named(videos: torch.Tensor, prompts: list[str]) -> Any:
        if len(prompts) > 1:
            raise ValueError("one by one, please")
        return {"s": [1.0]} | ({} if prompts == ["bb"] else {"extra": [2.0]})

    reward = CompositeReward({"r": FunctionReward(named, "named", {})}, {"s": 1.0})
    scores, failed = reward.score_or_mark(VIDEOS, SAMPLES)
    assert failed.tolist() == [False, True, False]
    assert scores["extra"].tolist() == [2.0, 0.0, 2.0]


def test_batches_without_any_score_are_failures_among_those_of_all_ranks() -> None:
    """A batch that failed whole names no score; one that lacks a score of the others is
    refused.
    """
    none = torch.zeros(2, dtype=torch.bool)
    some = torch.tensor([True, False])
    lost = ScoredBatch(numbers=[4, 1], scores={}, failed=~none)
    half = ScoredBatch(
        numbers=[0, 5], scores={"s": torch.tensor([0.0, 6.0]).double()}, failed=some
    )
    whole = ScoredBatch(
        numbers=[2, 3], scores={"s": torch.tensor([3.0, 4.0]).double()}, failed=none
    )
    for batches in ([lost, half, whole], [whole, half, lost]):
        columns, failed = gather_scores(batches, None, 6, SINGLE_PROCESS)
        assert columns["s"].tolist() == [0, 0, 3, 4, 0, 6]
        assert failed.nonzero().flatten().tolist() == [0, 1, 4]
    other = replace(whole, scores={"t": whole.scores["s"]})
    with pytest.raises(RewardError, match="every video needs the same ones"):
        gather_scores([half, other], None, 6, SINGLE_PROCESS)
    with pytest.raises(RewardError, match="On rank 0: no room"):
        gather_scores([whole], "no room", 6, SINGLE_PROCESS)


def test_a_function_called_reward_has_a_score_beside_the_reward() -> None:
    assert function_score("m:f.reward") == "reward_score"
    assert function_score("m:bright") == "bright"
    assert {REWARD, "reward", "overall"} == {*TAKEN}
    message = r"reward\.weights\.reward stands for a sum .* are called reward_score"
    with pytest.raises(ConfigError, match=message):
        CompositeReward({"r": Returns({})}, {"reward": 1.0})


def test_an_interrupt_in_a_reward_stays_one() -> None:
    reward = composite("Faulty", {"score": 1.0}, fault="interrupt", word="bb")
    with pytest.raises(KeyboardInterrupt):
        reward.score_or_mark(VIDEOS, SAMPLES)


# --------------------------------------------------------------------------------------
# scored again


def of_videos(score: Callable[[Tensor], Tensor]) -> CompositeReward:
    """A reward of the videos' brightness."""
    reward = FunctionReward(
        lambda videos, prompts: score(videos.double().mean((1, 2, 3, 4))), "bright", {}
    )
    return CompositeReward({"of": reward}, {"bright": 1.0})


class Drifting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, values: Tensor) -> Tensor:
        self.calls += 1
        return values * (1 + 0.1 * self.calls)


def compared(score: Callable[[Tensor], Tensor]) -> CompositeReward:
    """That reward after a first batch, of which a video was scored again."""
    reward = of_videos(score)
    reward.compare_next()
    torch.manual_seed(0)
    assert len(reward.score(VIDEOS, SAMPLES)["bright"]) == 3
    return reward


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            lambda values: values - values.mean(),
            r"bright \S+ in its batch and \S+ alone",
        ),
        (lambda values: values + 10 * torch.rand(len(values)), r"batch and \S+ alone"),
        (
            lambda values: values / (len(values) - 1),
            "scored again, alone: .* bright = inf",
        ),
    ],
    ids=["centred", "drawn", "not alone"],
)
def test_a_score_that_depends_on_the_others_is_told_once(
    score: Callable[[Tensor], Tensor], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    reward = compared(score)
    (told,) = caplog.messages
    assert re.search(message, told)
    reward.score(VIDEOS, SAMPLES)
    assert caplog.messages == [told]


def test_a_server_that_is_gone_at_the_end_fails_no_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = compared(lambda values: values)
    reward.rewards["of"].score = Mock(side_effect=RewardServerError("it is gone"))  # type: ignore[method-assign]
    reward.compare_last()
    assert "cannot be scored again, alone: it is gone" in caplog.text


def test_a_reward_that_drifts_is_told_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = compared(Drifting())
    caplog.clear()
    for _ in range(5):
        reward.score(VIDEOS, SAMPLES)
    reward.compare_last()
    assert re.search(r"bright \S+ when the run began and \S+ now\.", caplog.text)


@pytest.mark.parametrize("rounding", [0.0, 0.01], ids=["exact", "rounds"])
def test_a_score_of_the_video_alone_is_passed_in_silence(
    rounding: float, caplog: pytest.LogCaptureFixture
) -> None:
    reward = of_videos(lambda values: values * (1 + rounding * (len(values) == 1)))
    reward.compare_next()
    reward.score(VIDEOS[:1], SAMPLES[:1])
    reward.score(VIDEOS, SAMPLES)
    reward.compare_last()
    assert not caplog.text


def test_a_reward_that_draws_finds_its_generators_as_they_were() -> None:
    def draws(values: Tensor) -> Tensor:
        return values + torch.rand(len(values)) + random.random() + np.random.rand()

    def scores(compares: bool) -> list[Tensor]:
        seed_generators(7)
        reward = of_videos(draws)
        if compares:
            reward.compare_next()
        found = [reward.score(VIDEOS, SAMPLES)["bright"] for _ in range(3)]
        reward.compare_last()
        return [*found, torch.rand(2)]

    assert all(map(torch.equal, scores(False), scores(True)))


def test_a_call_that_does_not_end_is_told_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(composite_module, "SLOW", 0.05)
    told: list[str | None] = []

    def slow(values: Tensor) -> Tensor:
        time.sleep(0.3)
        return values

    reward = of_videos(slow)
    reward.on_hang = told.append
    reward.score(VIDEOS, SAMPLES)
    message = (
        "Reward 'of' has been running for 0 min on prompt 7 ('a'), sample 0 or one"
    )
    assert caplog.messages[0].startswith(message)
    *words, end = told
    assert len(words) > 1 and end is None
    assert all(text and "Reward 'of'" in text for text in words)
