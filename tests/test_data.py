"""Order of prompts and steps: functions of the seed and a counter. What each rank
trains.
"""

import math
from dataclasses import fields, replace

import pytest
import torch

from sage_fast.data import (
    PromptSchedule,
    best_and_worst,
    deal,
    make_groups,
    split_evenly,
    step_order,
    uniform,
)
from sage_fast.noise import NoiseKey, gaussian
from sage_fast.records import Prompt, PromptEmbeds

PROMPTS = [Prompt(text=f"prompt {i}", index=i) for i in range(5)]


def indices(schedule: PromptSchedule, start: int, count: int) -> list[int]:
    return [p.index for p in schedule.take(start, count)]


def test_every_epoch_visits_every_prompt_in_an_order_that_needs_no_history() -> None:
    whole = indices(PromptSchedule(PROMPTS, seed=3, shuffle=True), 0, 20)
    epochs = [whole[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert any(epoch != epochs[0] for epoch in epochs)
    assert whole == [
        indices(PromptSchedule(PROMPTS, seed=3, shuffle=True), k, 1)[0]
        for k in range(20)
    ]
    assert indices(PromptSchedule(PROMPTS, seed=4, shuffle=True), 0, 20) != whole
    assert indices(PromptSchedule(PROMPTS, seed=3, shuffle=False), 3, 4) == [3, 4, 0, 1]


def test_members_of_a_repeated_prompt_are_numbered_on() -> None:
    embeds = PromptEmbeds(text=torch.zeros(1, 2), glyph=torch.zeros(0, 2))
    asked: list[int] = []

    def embed(prompt: Prompt) -> PromptEmbeds:
        asked.append(prompt.index)
        return embeds

    def members(numbers: range) -> list[tuple[int, int]]:
        samples = make_groups([PROMPTS[1], PROMPTS[0], PROMPTS[1]], embed, 2, numbers)
        return [(s.prompt.index, s.member) for s in samples]

    assert members(range(6)) == [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (1, 3)]
    asked.clear()
    assert members(range(3, 6)) == [(0, 1), (1, 2), (1, 3)] and asked == [0, 1], (
        "what is sampled elsewhere is not read"
    )


@pytest.mark.parametrize("field", [field.name for field in fields(NoiseKey)])
def test_steps_levels_and_noise_are_functions_of_every_field_of_a_key(
    field: str,
) -> None:
    key = NoiseKey(seed=1, update=2, prompt_index=3, sample_index=4)
    other = replace(key, **{field: 9})
    for draw in (
        lambda k: step_order(k, list(range(20)), 1.0, True),
        lambda k: uniform(k, 4).tolist(),
        lambda k: gaussian([k], step=0, shape=(4,)).tolist(),
    ):
        assert draw(key) == draw(replace(key)) != draw(other)


def test_fraction_keeps_at_least_one_step() -> None:
    key = NoiseKey(0, 0, 0, 0)
    assert len(step_order(key, [0, 1, 2, 3], 0.5, True)) == 2
    assert len(step_order(key, [0, 1, 2, 3], 0.01, True)) == 1
    assert len(step_order(key, [0, 1, 2, 3], 0.99, True)) == 3
    assert step_order(key, [0, 1, 2, 3], 0.5, False) == [0, 1]
    assert sorted(step_order(key, [1, 2, 5, 8], 1.0, True)) == [1, 2, 5, 8]


def test_split_evenly_covers_everything_once() -> None:
    for count, parts in [(8, 1), (8, 2), (7, 3), (3, 3)]:
        ranges = split_evenly(count, parts)
        assert [i for r in ranges for i in r] == list(range(count))
        assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    ("ranks", "videos", "group", "count", "size"),
    [(8, 2, 16, 4, 1), (64, 3, 24, 4, 1), (8, 8, 16, 4, 2), (64, 24, 24, 4, 4)],
)
def test_the_slowest_rank_trains_the_mean(
    ranks: int, videos: int, group: int, count: int, size: int
) -> None:
    """Rounded up to whole micro-batches; those that nobody trains move nowhere."""
    for seed in range(5):
        scores = torch.rand(
            ranks * videos // group,
            group,
            generator=torch.Generator().manual_seed(seed),
        )
        due = best_and_worst(scores, count).view(ranks, -1, size).any(dim=2)
        dealt = deal(due)
        assert (
            torch.equal(dealt, dealt.sort(dim=1).values)
            and len(dealt.unique()) == dealt.numel()
        )
        trained = due.flatten()[dealt].sum(dim=1)
        mean = float(due.sum()) / ranks
        assert int(trained.sum()) == int(due.sum()) and int(
            trained.max()
        ) == dealt.shape[1] == math.ceil(mean)
        assert size > 1 or int(trained.max()) <= 1.1 * mean
        # A rank gives away what it has above its share, and takes what it lacks.
        sampled = due.shape[1]
        here = (dealt // sampled == torch.arange(ranks)[:, None]).sum(dim=1)
        assert bool((here >= due.sum(dim=1).clamp(max=math.ceil(mean))).all())
        away = dealt[dealt // sampled != torch.arange(ranks)[:, None]]
        assert bool(due.flatten()[away].all())


def test_ranks_keep_what_they_train_where_it_is_even() -> None:
    due = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0]], dtype=torch.bool)
    assert deal(due).tolist() == [[0, 2], [5, 6]]
    # One moves; the last rank fills up with one that is not trained.
    assert deal(
        torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 1]], dtype=torch.bool)
    ).tolist() == [[0, 1], [2, 4], [6, 8]]
    assert deal(torch.ones(2, 3, dtype=torch.bool)).tolist() == [[0, 1, 2], [3, 4, 5]]
