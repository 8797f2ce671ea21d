"""Rewards that are given samples: whole groups, columns of the prompt file, pictures
and latents; and judges, which evaluations alone call.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sage_fast.config.errors import ConfigError
from sage_fast.config.load import check_trust, load_config
from sage_fast.config.registry import REWARDS
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import EvaluationConfig, RewardConfig, RolloutConfig
from sage_fast.records import Prompt, PromptEmbeds, RolloutRecord, Sample
from sage_fast.rewards.base import RewardSample
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.server import RewardServer
from sage_fast.run.prompt_files import read_prompts
from sage_fast.run.run import build_trainer
from tests.distributed.ranks import run_ranks, train, write_run
from tests.rewards.support import VIDEOS, here

MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ["examples.group_rank:GroupRank", "examples.column_colour:ColumnColour"]
COLOURS = "prompt,colour\n" + "".join(
    f"a {colour} {shape} moving left,{colour}\n"
    for colour in ("red", "green", "blue")
    for shape in ("circle", "square")
)


class Seen:
    """Keeps what it was given, and scores the sum of latents and picture."""

    READS = ("latents", "picture")
    calls: list[list[RewardSample]] = []  # noqa: RUF012  for the tests

    def score_samples(self, samples: Sequence[RewardSample]) -> dict[str, list[float]]:
        self.calls.append(list(samples))
        return {"seen": [_sum(s.latents) + _sum(s.picture) for s in samples]}


def _sum(values: Any) -> float:
    return 0.0 if values is None else float(np.asarray(values, np.float64).sum())


class Ranks:
    """Place of a video in its group; fails on a group with a bad word."""

    WHOLE_GROUPS = True

    def score_samples(self, samples: Sequence[RewardSample]) -> dict[str, list[float]]:
        if any("bad" in sample.prompt for sample in samples):
            raise RuntimeError("no place")
        means = [(s.group, float(s.video.float().mean())) for s in samples]
        return {
            "rank": [float(sum(m[0] == o[0] and m > o for o in means)) for m in means]
        }


class ByBatch(Ranks):
    """The same, without saying so."""

    WHOLE_GROUPS = False


class Pairs(Ranks):
    """The same, of groups of two."""

    def score_samples(self, samples: Sequence[RewardSample]) -> dict[str, list[float]]:
        assert set(Counter(sample.group for sample in samples).values()) == {2}
        return super().score_samples(samples)


class Unreadable(Ranks):
    READS = ("frames",)


def of_groups(**texts: Sequence[int]) -> list[Sample]:
    """Samples whose groups have these numbers, by prompt."""
    embeds = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))
    return [
        Sample(prompt=Prompt(text=text, index=g), embeds=embeds, member=m, group=g)
        for text, groups in texts.items()
        for m, g in enumerate(groups)
    ]


def composite(
    *names: str, weights: dict[str, float], **section: Any
) -> CompositeReward:
    config = RewardConfig(rewards=list(names), weights=weights, **section)
    return CompositeReward.from_config(config)


@pytest.fixture
def served(
    started: Callable[[ThreadingHTTPServer], str],
) -> Callable[[list[str]], str]:
    """Serve rewards of this process, and give the address."""

    def start(names: list[str]) -> str:
        spec = {"rewards": {name: {} for name in names}, "targets": REWARDS}
        return started(RewardServer(spec))

    return start


def train_here(file: str, words: list[str]) -> Any:
    """As `train`, with this repository in the path of a child of `reward.python`."""
    os.environ["PYTHONPATH"] = str(ROOT)
    return train(file, words)


@pytest.mark.slow
def test_examples_score_alike_at_any_micro_batch_on_any_rank_and_by_any_transport(
    tiny_model: Path, tmp_path: Path, served: Callable[[list[str]], str]
) -> None:
    (tmp_path / "colours.csv").write_text(COLOURS)
    prompts = {"prompts": str(tmp_path / "colours.csv")}
    file = write_run(
        tiny_model,
        tmp_path,
        data=prompts,
        rollout={"batch_size": 32, "num_generations": 8},
        evaluation=prompts | {"noises": 2, "batch_size": 4},
        training={"num_updates": 1},
        reward={"rewards": EXAMPLES, "weights": {"win_rate": 1.0, "colour": 1.0}},
    )
    alone, all_at_once = (f"--rollout.micro_batch_size={size}" for size in (1, 32))
    of_two = ["--rollout.batch_size=16", "--rollout.micro_batch_size=1"]
    found = [
        run_ranks(train_here, ranks, file, words)[0]
        for ranks, words in (
            (1, [alone]),
            (1, [all_at_once, f"--reward.url={served(EXAMPLES)}"]),
            (2, of_two),
            (2, [*of_two, f"--reward.python={sys.executable}"]),
            (2, ["--distributed.sp=2", alone]),
        )
    ]
    first, (rollout,), _ = found[0]
    assert rollout.scores["win_rate"].std() > 0 < rollout.scores["colour"].std()
    torch.testing.assert_close(
        rollout.scores["win_rate"].mean(1), torch.full((4,), 0.5).double()
    )
    for records, (other,), _ in found[1:]:
        for name, scores in rollout.scores.items():
            # a byte of a video may round otherwise in another batch
            atol = 0.0 if name == "win_rate" else 0.01
            torch.testing.assert_close(other.scores[name], scores, rtol=0, atol=atol)
        assert records[-1] == pytest.approx(first[-1], abs=0.01)


def test_a_layout_that_splits_a_group_is_refused() -> None:
    reward = composite(f"{__name__}:Ranks", weights={"rank": 1.0})
    rollout = RolloutConfig(batch_size=6, num_generations=4)
    evaluation = EvaluationConfig(every=1, batch_size=6, noises=2)
    reward.check_layout(rollout, evaluation, 1)
    with pytest.raises(ConfigError, match=r"^rollout\.batch_size is 6 on each of 2"):
        reward.check_layout(rollout, evaluation, 2)
    rollout = replace(rollout, batch_size=8)
    reward.check_layout(rollout, evaluation, 2)
    with pytest.raises(ConfigError, match=r"all evaluation\.noises = 4 videos"):
        reward.check_layout(rollout, replace(evaluation, noises=4), 2)


@pytest.mark.parametrize("size", [1, 4])
def test_a_group_is_scored_whole_at_any_micro_batch(
    size: int, tiny_run: MakeRun
) -> None:
    words = [f"--reward.rewards=[{__name__}:Pairs]", "--reward.weights={rank: 1.0}"]
    words.append(f"--rollout.micro_batch_size={size}")
    trainer = build_trainer(tiny_run(*words))
    records: list[RolloutRecord] = []
    trainer.on_rollout = records.append
    trainer.iterate()
    assert records[0].scores["rank"].sort().values.tolist() == [[0, 1], [0, 1]]


def test_a_group_fails_as_a_whole_and_alone() -> None:
    reward = composite(f"{__name__}:Ranks", weights={"rank": 1.0})
    samples = of_groups(good=[1, 1], bad=[2])
    scores, failed = reward.score_or_mark(VIDEOS, samples)
    assert failed.tolist() == [False, False, True]
    assert sorted(scores["rank"][:2].tolist()) == [0.0, 1.0]


@pytest.mark.parametrize(("name", "told"), [("Ranks", False), ("ByBatch", True)])
def test_a_group_is_scored_again_whole(
    name: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reward = composite(f"{__name__}:{name}", weights={"rank": 1.0})
    reward.compare_next()
    reward.score(VIDEOS, of_groups(a=[1, 1], b=[2]))
    reward.compare_last()
    assert ("in its batch" in caplog.text) is told


def test_a_reward_gets_what_it_reads_here_and_by_a_server(
    tmp_path: Path, served: Callable[[list[str]], str]
) -> None:
    Image.new("RGB", (20, 16), (1, 2, 3)).save(tmp_path / "a.png")
    (tmp_path / "p.csv").write_text("prompt,image,count\na fox,a.png,2\n")
    (prompt,) = read_prompts(tmp_path / "p.csv")
    latents = torch.randn(2, 3, 2, 2)
    given = [
        replace(sample, prompt=prompt, latents=latents)
        for sample in of_groups(x=[4, 4, 5])
    ]
    name = f"{__name__}:Seen"
    Seen.calls.clear()
    scores = [
        composite(name, weights={"seen": 1.0}, url=url).score(VIDEOS, given)
        for url in (None, served([name]))
    ]
    assert torch.equal(scores[0]["seen"], scores[1]["seen"])
    for call in Seen.calls:
        assert [(s.group, s.member) for s in call] == [(4, 0), (4, 1), (5, 2)]
        for sample in call:
            assert (sample.prompt, sample.columns) == ("a fox", {"count": "2"})
            assert sample.video is None and torch.equal(sample.latents, latents)
            assert sample.picture.shape == (3, 16, 20) and sample.picture[2, 0, 0] == 3


def test_nothing_is_decoded_for_rewards_that_read_no_video(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"--reward.rewards=[{__name__}:Seen]", "--reward.weights={seen: 1.0}"]
    trainer = build_trainer(tiny_run(*words))
    monkeypatch.setattr(trainer.decoder, "decode", None)
    Seen.calls.clear()
    metrics = trainer.iterate()
    ((first, *_),) = Seen.calls
    assert first.latents.shape == trainer.latent_shape and first.video is None
    assert metrics["reward/seen_std"] > 0 and "time/decode" not in metrics


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"READS is \['frames'\], but it must be"):
        composite(f"{__name__}:Unreadable", weights={"rank": 1.0})


# --------------------------------------------------------------------------------------
# judges


JUDGE = here("brightness")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "served"])
def test_a_judge_scores_evaluations_alone(
    elsewhere: bool, tiny_run: MakeRun, served: Callable[[list[str]], str]
) -> None:
    words = [f"--reward.evaluation=[{JUDGE}]"]
    if elsewhere:
        words.append(f"--reward.url={served(['toy', JUDGE])}")
    trainer = build_trainer(tiny_run(*words))
    names = [*trainer.evaluate().scores, *trainer.iterate()]
    assert "brightness" in names and "VQ" in names
    assert not [name for name in names if "reward/brightness" in name]
    assert "brightness" in trainer.evaluate().scores


def test_a_weight_of_a_judge_is_refused(tiny_run: MakeRun) -> None:
    words = [f"--reward.evaluation=[{JUDGE}]", "--reward.weights={brightness: 2.0}"]
    trainer = build_trainer(tiny_run(f"--reward.rewards=[{here('falling')}]", *words))
    with pytest.raises(
        ConfigError, match=r"reward\.weights\.brightness is 2, .* Remove"
    ):
        trainer.evaluate()


def test_a_judge_of_somebody_else_is_not_imported_without_trust(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    config = tiny_run(f"--reward.evaluation=[{JUDGE}]")
    with pytest.raises(ConfigError, match=r"under reward\.evaluation.*--trust-config"):
        check_trust(config, tmp_path, named=())
    check_trust(config, tmp_path, named=(JUDGE,))


def test_options_of_a_judge_stay_with_other_rewards_and_go_with_other_judges(
    tmp_path: Path,
) -> None:
    file = tmp_path / "judge.yaml"
    file.write_text(
        f'reward: {{evaluation: ["{JUDGE}"], options: {{"{JUDGE}": {{fps: 3}}}}}}'
    )
    more = ["--reward.rewards=[ocr]", "--reward.weights={OCR: 1.0}"]
    options = load_config(["toy_cpu", file], more).reward.options
    assert options == {JUDGE: {"fps": 3}}
    (tmp_path / "none.yaml").write_text("reward: {evaluation: []}")
    files = ["toy_cpu", file, tmp_path / "none.yaml"]
    assert load_config(files).reward.options == {}
