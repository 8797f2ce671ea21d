"""Runs beside each other: which are one arm, how their final scores differ, and a page
that is complete in itself.
"""

import json
import re
from pathlib import Path

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.evaluation import OVERALL, REWARD, Evaluation
from sage_fast.run.directory import RunDirectory
from sage_fast.tools.comparison import compare_runs, group_into_arms, to_text
from tests.browser import Page
from tests.made_runs import PROMPTS, make_run

CPS = "--rollout.sde_type=cps"
# Final rewards of 6 prompts: cps is 1 better in seed 0, 2 better in seed 1, on every
# prompt.
SAGE_FINALS = ([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
CPS_FINALS = ([v + 1 for v in SAGE_FINALS[0]], [v + 2 for v in SAGE_FINALS[1]])


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two seeds of two samplers; the seeds of the second in the other order."""
    return [
        *(
            make_run(tmp_path / f"sage-{seed}", seed=seed, final=SAGE_FINALS[seed])
            for seed in (0, 1)
        ),
        *(
            make_run(tmp_path / f"cps-{seed}", CPS, seed=seed, final=CPS_FINALS[seed])
            for seed in (1, 0)
        ),
    ]


def test_runs_that_differ_in_their_seed_and_place_are_one_arm(runs: list[Path]) -> None:
    arms = group_into_arms([RunDirectory(folder) for folder in runs])
    assert [(arm.name, arm.apart) for arm in arms] == [
        ("sage", "rollout.sde_type=sage_grpo"),
        ("cps", "rollout.sde_type=cps"),
    ]
    assert [[run.seed for run in arm.runs] for arm in arms] == [[0, 1], [0, 1]]
    line = arms[0].line("reward/mean")
    assert line.x == [1, 2, 3, 4] and line.y[0] == pytest.approx(0.105)
    assert line.spread[0] == pytest.approx(0.01 / 2**0.5)


def test_a_batch_size_makes_another_arm_though_a_resumed_run_may_change_it(
    tmp_path: Path,
) -> None:
    folders = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", "--rollout.batch_size=64", seed=1),
    ]
    arms = group_into_arms([RunDirectory(folder) for folder in folders])
    assert [(arm.name, arm.apart) for arm in arms] == [
        ("a", "rollout.batch_size=128"),
        ("b", "rollout.batch_size=64"),
    ]


def test_the_paired_test_is_over_seeds_and_prompts(runs: list[Path]) -> None:
    comparison = compare_runs(runs)
    assert comparison.update == 4
    found = {d.column: d for d in comparison.differences}
    assert found.keys() == {REWARD, OVERALL, "VQ", "MQ", "TA"}
    effect = found[REWARD].effect
    assert effect.mean == pytest.approx(1.5) and effect.num_seeds == 2
    assert effect.stderr == pytest.approx(0.5)  # seeds differ by 1, prompts not at all
    assert (
        found[REWARD].p == pytest.approx(0.2048, abs=1e-3)
        and found[REWARD].verdict == "not told apart"
    )
    assert found["VQ"].effect.mean == pytest.approx(0.5)
    assert comparison.means["cps"][REWARD] == pytest.approx(1.75)
    assert "cps is not told apart from sage" in to_text(comparison)


def test_what_limits_a_comparison_is_said(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", seed=0)
    other = make_run(
        tmp_path / "b", CPS, seed=5, final=[1.0, 1.1, 0.9, 1.0, 1.2, 0.8], updates=4
    )
    comparison = compare_runs([one, other])
    assert (
        "has no seed of" in comparison.notes[0]
        and "says nothing of other seeds" in comparison.notes[1]
    )
    assert comparison.differences[0].verdict == "higher"
    # A prompt that no reward could score in one of them is left out of all.
    scores = other / "evaluation/update-000004.json"
    whole = Evaluation.load(scores)
    whole.only({0, 1, 2, 4, 5}).save(scores)
    seeds = [
        make_run(tmp_path / f"{arm}-7", *words, seed=7)
        for arm, words in (("a", ()), ("b", (CPS,)))
    ]
    lacking = compare_runs([one, other, *seeds])
    assert (
        lacking.differences[0].effect.num_seeds == 1
        and "left out of the differences" in lacking.notes[0]
    )
    whole.save(scores)
    same = compare_runs(
        [one, make_run(tmp_path / "same", "--objective.equalizer=false")]
    )
    assert "same has the reward of a on every prompt." in to_text(same)
    for file in (other / "evaluation").glob("update-000004.json"):
        file.unlink()
    comparison = compare_runs([one, other])
    assert (
        comparison.update is None
        and "no evaluation after update 0 in common" in comparison.notes[0]
    )
    with pytest.raises(ConfigError, match="not of the same prompts"):
        compare_runs(
            [
                one,
                make_run(tmp_path / "c", CPS, prompts=[f"other {i}" for i in range(6)]),
            ]
        )


def test_rewards_of_other_weights_are_not_compared(tmp_path: Path) -> None:
    doubled = [f"--reward.weights.{name}=2" for name in ("VQ", "MQ", "TA")]
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", *doubled, final=[9] * 6)]
    comparison = compare_runs(runs)
    found = {difference.column for difference in comparison.differences}
    assert found == {OVERALL, "VQ", "MQ", "TA"} == comparison.means["b"].keys()
    text = to_text(comparison)
    assert "reward.weights differ" in text and "higher" not in text
    # A score of weight 0 adds nothing to the reward.
    zero = make_run(tmp_path / "c", "--reward.weights.aligned=0", CPS)
    assert compare_runs([runs[0], zero]).differences[0].column == REWARD


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("--rollout.num_steps=4", "evaluation.num_steps"),
        ("--evaluation.seed=5", "evaluation.seed"),
        ("--rollout.guidance_scale=2", "rollout.guidance_scale"),
        ("--evaluation.height=32", "evaluation.height"),
    ],
)
def test_videos_that_were_made_otherwise_are_no_effect_of_the_training(
    word: str, key: str, tmp_path: Path
) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", word)]
    assert f"differ in {key}, so" in compare_runs(runs).notes[0]


def test_a_key_that_an_older_release_lacks_is_no_difference(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", CPS)]
    file = runs[1] / "config.yaml"
    file.write_text(file.read_text().replace("  solver: euler\n", ""))
    assert "evaluation.solver" not in RunDirectory(runs[1]).settings
    for order in (runs, runs[::-1]):
        assert not [n for n in compare_runs(order).notes if "differ in" in n]


def test_steps_that_the_evaluation_has_of_its_own_are_the_same_in_both(
    tmp_path: Path,
) -> None:
    runs = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", "--rollout.num_steps=4", "--evaluation.num_steps=8"),
    ]
    assert not [note for note in compare_runs(runs).notes if "differ in" in note]


def test_means_of_other_prompts_are_said(tmp_path: Path) -> None:
    few = make_run(tmp_path / "b", CPS, prompts=PROMPTS[:4], final=[0.0] * 4)
    notes = compare_runs([make_run(tmp_path / "a"), few]).notes
    assert "left out of the differences" in notes[0]


def test_the_command_writes_one_page_and_its_numbers(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "compared"
    assert main(["compare", *map(str, runs), "--output_dir", str(output)]) == 0
    assert "2 seeds, reward 1.75" in capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {
        "comparison.html",
        "comparison.json",
    }
    page = (output / "comparison.html").read_text("utf-8")
    # two rewards, a KL, its share, a gradient norm
    titles = re.findall(r"<figcaption>([^<]+)</figcaption>", page)
    assert titles[:2] == ["reward in evaluations", "reward while training"]
    assert len(titles) == 5 and not [title for title in titles if "/" in title]
    assert not Page(page).fetched
    tree = json.loads((output / "comparison.json").read_text("utf-8"))
    assert tree["differences"][0]["effect"]["mean"] == pytest.approx(1.5)
