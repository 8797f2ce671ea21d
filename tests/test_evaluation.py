"""The paired test, by hand and against simulation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_fast.config.schema import RunConfig
from sage_fast.evaluation import (
    Evaluation,
    describe_worse,
    paired_test,
    paired_tests,
    plus_minus,
    scored_in_both,
    yes_no_score,
)
from sage_fast.records import PromptEmbeds, Sample
from sage_fast.rollout import (
    VideoScoring,
    initial_latents,
    noise_keys,
    policy_velocity,
    sample_trajectory,
)
from sage_fast.run.run import build_trainer
from sage_fast.sde import sigma_schedule, transition_table
from tests.made_runs import lose_scores


def test_by_hand() -> None:
    test = paired_test([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    assert (test.before, test.after, test.mean, test.wins, test.count) == (
        1.0,
        3.0,
        2.0,
        1.0,
        3,
    )
    assert test.stderr == pytest.approx(1 / math.sqrt(3))
    assert test.standard_errors == pytest.approx(2 * math.sqrt(3))
    same = paired_test([1.0, 2.0], [1.0, 2.0])
    assert same.standard_errors == 0.0 and same.wins == 0.0


def test_the_interval_is_of_95_percent_and_of_all_its_resamples() -> None:
    generator = torch.Generator().manual_seed(1)
    difference = torch.randn(300, generator=generator, dtype=torch.float64)
    test = paired_test([0.0] * 300, difference.tolist(), resamples=1200, seed=3)
    rows = torch.randint(300, (1200, 300), generator=generator.manual_seed(3))
    drawn = difference[rows].mean(1).sort().values
    # Between the 30th and the 31st from either end.
    assert drawn[29] <= test.low <= drawn[30] and drawn[-31] <= test.high <= drawn[-30]
    assert test.high - test.low == pytest.approx(2 * 1.96 * test.stderr, rel=0.1)


def test_wins_follow_the_direction_of_a_score(tmp_path: Path) -> None:
    before = [3.0, 3.0, 3.0, 3.0]
    after = [1.0, 2.0, 4.0, 3.0]
    assert paired_test(before, after).wins == 0.25
    down = paired_test(before, after, lower_is_better=True)
    assert (down.wins, down.mean, down.lower_is_better) == (0.5, -0.5, True)
    columns = {"VQ": before, "distance": before}
    stored = Evaluation(
        prompts=list("abcd"),
        scores=columns,
        reward=before,
        lower_is_better=["distance"],
    )
    stored.save(tmp_path / "e.json")
    assert Evaluation.load(tmp_path / "e.json") == stored == stored.only(range(4))
    assert stored.only([0, 2]).lower_is_better == ["distance"]


@pytest.mark.parametrize(
    ("mean", "stderr", "text"),
    [
        (0.16012, 0.0554, "+0.160 ± 0.055"),
        (-3.0, 12.3, "-3 ± 12"),
        (2.34e-7, 1.24e-7, "+2.34e-07 ± 1.24e-07"),
        (0.0, 0.0, "+0 ± 0"),
    ],
)
def test_a_difference_has_the_digits_that_its_error_leaves(
    mean: float, stderr: float, text: str
) -> None:
    assert plus_minus(mean, stderr) == text


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ({0: 0.0, 10: -0.3}, None),
        ({0: 0.0, 10: -0.5, 20: -0.29}, None),
        (
            {0: 0.0, 10: 0.4, 20: -0.31, 30: -0.29, 40: -0.31, 50: -0.5},
            "worse than at update 0 since update 40: paired gain -0.50 ± 0.10 at "
            "update 50; the best is update 10, +0.4",
        ),
        (
            {0: 0.0, 10: -0.31},
            "worse than at update 0 since update 10: paired gain -0.31 ± 0.10 at "
            "update 10; the best is update 0, +0",
        ),
    ],
)
def test_a_run_is_worse_where_its_last_gain_is_3_standard_errors_below_zero(
    gains: dict[int, float], said: str | None
) -> None:
    assert (
        describe_worse({update: (gain, 0.1) for update, gain in gains.items()}) == said
    )


def test_a_score_of_zeros_and_ones_says_what_shows_the_prompt() -> None:
    def scored(*lower: str, **shown: list[float]) -> Evaluation:
        return Evaluation(
            prompts=["a", "b"],
            scores={},
            reward=[0.0] * 2,
            lower_is_better=list(lower),
            shown=shown,
        )

    first = scored(VQ=[0.0, 1.0], aligned=[0.0, 1.0])
    second = scored(aligned=[1.0, 1.0])
    assert (
        yes_no_score(first, second) == "aligned"
        and yes_no_score(first, scored()) is None
    )
    assert (
        yes_no_score(scored("bad", bad=[0.0, 1.0]), scored("bad", bad=[0.0, 1.0]))
        is None
    )
    assert Evaluation.from_dict(asdict(first)) == first and second.only([1]).shown == {
        "aligned": [1.0]
    }


def test_pairs_are_the_prompts_that_were_scored_in_both() -> None:
    before = Evaluation(
        prompts=["a", "c", "d"],
        scores={"VQ": [1.0, 3.0, 4.0]},
        reward=[1.0, 3.0, 4.0],
        left_out=[1],
    )
    after = Evaluation(
        prompts=["a", "b", "d"],
        scores={"VQ": [2.0, 5.0, 7.0]},
        reward=[2.0, 5.0, 7.0],
        left_out=[2],
    )
    first, last = scored_in_both(before, after)
    assert first.prompts == last.prompts == [
        "a",
        "d",
    ] and first.left_out == last.left_out == [1, 2]
    assert (first.reward, last.scores["VQ"]) == ([1.0, 4.0], [2.0, 7.0])
    assert paired_tests(before, after)["VQ"].mean == 2.0
    assert before.only({0, 1, 3}).left_out == [1, 2] == before.only({0, 3}).left_out
    for older, newer in (([], ["VQ"]), (["VQ"], [])):
        pair = (
            replace(before, lower_is_better=older),
            replace(after, lower_is_better=newer),
        )
        assert paired_tests(*pair)["VQ"].lower_is_better
    alone = Evaluation(prompts=["a"], scores={}, reward=[0.0], left_out=[1, 2, 3])
    for other, said in (
        (replace(after, noises=2), "not of the same prompts and noises"),
        (replace(after, prompts=["x", "y", "z"]), "not of the same prompts"),
        (alone, r"1 prompt\(s\) were scored in both"),
    ):
        with pytest.raises(ValueError, match=said):
            paired_tests(before, other)


def test_a_score_that_is_yes_or_no_for_every_video_is_shown(
    tiny_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = VideoScoring.gather
    added = {
        "right": torch.tensor([0, 1, 1, 0]).double(),
        "nearly": torch.tensor([0, 1, 0.5, 0]).double(),
        "often": torch.tensor([2, 1, 1, 1]).double(),
    }

    def with_more(self: VideoScoring, count: int) -> tuple[dict[str, Tensor], Tensor]:
        scores, failed = gather(self, count)
        return scores | added, failed

    monkeypatch.setattr(VideoScoring, "gather", with_more)
    words = ["--evaluation.num_prompts=2", "--evaluation.noises=2"]
    shown = build_trainer(tiny_run(*words)).evaluate().shown
    assert {name: shown.get(name) for name in added} == {
        "right": [0, 1],
        "nearly": None,
        "often": None,
    }


@pytest.mark.parametrize("text", ["", '{"prompts": ["a"], "scores": {}, "reward": []}'])
def test_a_file_that_is_no_complete_evaluation_is_named(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "update-000000.json"
    file.write_text(text)
    with pytest.raises(
        ValueError, match=r"update-000000\.json is not a complete evaluation"
    ):
        Evaluation.load(file)


def test_the_evaluation_during_training_has_a_size_of_its_own(
    tiny_run: Callable[..., RunConfig],
) -> None:
    trainer = build_trainer(tiny_run("--evaluation.height=32", "--evaluation.width=24"))
    videos: dict[int, Tensor] = {}
    evaluation = trainer.evaluate(videos.__setitem__)
    assert videos[0].shape[-2:] == (32, 24) and len(evaluation.reward) == 4
    assert trainer.evaluate() == evaluation


def test_every_prompt_is_drawn_from_its_own_text_and_noises(
    tiny_run: Callable[..., RunConfig],
) -> None:
    """Two noises of a batch of two prompts are the mean of what the noises give alone."""
    words = (
        "--rollout.guidance_scale=3",
        "--evaluation.num_prompts=3",
        "--evaluation.batch_size=2",
    )
    trainer = build_trainer(tiny_run(*words, "--evaluation.noises=2"))
    asked: list[Tensor] = []
    velocity = trainer.policy.velocity

    def watched(
        latents: Tensor, sigma: Tensor, prompts: Sequence[PromptEmbeds]
    ) -> Tensor:
        asked.extend(p.text for p in prompts)
        return velocity(latents, sigma, prompts)

    trainer.policy.velocity = watched  # type: ignore[method-assign]
    videos: list[int] = []
    scores = trainer.evaluate(lambda number, video: videos.append(number))
    assert sorted(videos) == [0, 1, 2], "the first of each prompt"
    steps = trainer.config.evaluation_steps
    first, second, third = (trainer.embed(p.text).text for p in trainer.eval_prompts)
    expected = (
        [first, second] * steps + [third, first] * steps + [second, third] * steps
    )
    assert all(
        torch.equal(found, text) for found, text in zip(asked, expected, strict=True)
    )
    assert scores.noises == 2 and len(scores.reward) == 3
    sigmas = sigma_schedule(steps, trainer.config.rollout.shift)
    table = transition_table("ode", sigmas, 0.0)
    drawn = []
    for member in (0, 1):
        for prompt in trainer.eval_prompts:
            sample = Sample(
                prompt=prompt, embeds=trainer.embed(prompt.text), member=member
            )
            keys = noise_keys([sample], trainer.config.evaluation.seed, update=0)
            initial = initial_latents(keys, trainer.evaluation_latent_shape)
            latents = sample_trajectory(
                policy_velocity(trainer.policy, [sample]),
                [sample],
                keys,
                table,
                initial,
            ).final
            drawn.append(
                float(
                    trainer.reward.overall(
                        trainer.reward.score(trainer.decoder.decode(latents), [sample])
                    )
                )
            )
    means = [(drawn[row] + drawn[row + 3]) / 2 for row in range(3)]
    # a batch of two rounds a byte otherwise
    assert scores.reward == pytest.approx(means, abs=2e-3)
    assert len(set(drawn)) == 6


def test_a_prompt_with_a_noise_that_failed_is_left_out(
    tiny_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts with two noises each; a mean over fewer would not pair."""
    words = ["--evaluation.num_prompts=3", "--evaluation.noises=2"]
    trainer = build_trainer(tiny_run(*words))
    whole = trainer.evaluate()
    lose_scores(monkeypatch, [4])
    assert trainer.evaluate() == whole.only({0, 2})


def test_the_noise_of_an_evaluation_is_that_of_its_seed(
    tiny_run: Callable[..., RunConfig],
) -> None:
    first, same, other = (
        build_trainer(tiny_run(*words)).evaluate().reward
        for words in ((), ("--seed=0",), ("--evaluation.seed=5",))
    )
    assert first == same != other
