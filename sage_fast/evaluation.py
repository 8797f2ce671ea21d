"""Paired evaluation: the same prompts and the same noise, before and after training."""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from pathlib import Path

import torch
from torch import Tensor

from sage_fast.config.errors import RewardError
from sage_fast.config.files import loads, write_text
from sage_fast.config.sections import EvaluationConfig
from sage_fast.records import Prompt, Trajectory
from sage_fast.rewards.base import describe_batch
from sage_fast.rollout import Sampler, VideoScoring, micro_batches

REWARD = "Reward"
"""Name in tables of the weighted sum of the scores, which was trained on."""

OVERALL = "Overall (VQ + MQ + TA)"
"""Name in tables of the plain sum of these three, which papers report whatever was
trained on.
"""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores of one evaluation.

    Attributes:
        prompts: P texts.
        scores: name -> P floats.
        reward: P floats, their weighted sum.
        noises: videos of each prompt, of which the floats are means.
        solver: as in `EvaluationConfig`.
        left_out: numbers, among all P + len(left_out) prompts of the evaluation, of
            those that no reward could score; the lists are of the others.
        lower_is_better: names of the scores that fall as videos get better; of the
            others more is better.
        shown: the scores that are 0 or 1 for every video, of the first one of each
            prompt, which is the one that is shown.

    Example: `Evaluation(prompts=["a red circle moving left"], scores={"VQ": [-0.2]},
    reward=[-0.2])`
    """

    prompts: list[str]
    scores: dict[str, list[float]]
    reward: list[float]
    noises: int = 1
    solver: str = "euler"
    left_out: list[int] = field(default_factory=list)
    lower_is_better: list[str] = field(default_factory=list)
    shown: dict[str, list[float]] = field(default_factory=dict)

    @property
    def noise(self) -> str:
        """The noise of a pair of evaluations, for people."""
        if self.noises == 1:
            return "same noise"
        return f"the same {self.noises} noises of each"

    @classmethod
    def from_dict(cls, tree: object) -> "Evaluation":
        """The evaluation that `asdict` has made JSON of. ValueError for anything else."""
        try:
            evaluation = cls(**tree)  # type: ignore[arg-type]
            columns = [*evaluation.scores.values(), *evaluation.shown.values()]
            for column in [evaluation.reward, *columns]:
                if len(column) != len(evaluation.prompts):
                    raise TypeError("lists of different lengths")
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not the scores of an evaluation ({error})") from error
        return evaluation

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_text(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Evaluation":
        """Read what `save` wrote. ValueError names a file that holds something else, or
        a part of it.
        """
        try:
            return cls.from_dict(loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path} is not a complete evaluation: {error}") from error

    def columns(self) -> dict[str, list[float]]:
        """Columns of tables: the reward, the overall where its three scores are there,
        and every score.
        """
        columns = {REWARD: self.reward}
        if {"VQ", "MQ", "TA"} <= self.scores.keys():
            parts = (self.scores[name] for name in ("VQ", "MQ", "TA"))
            columns[OVERALL] = [sum(values) for values in zip(*parts, strict=True)]
        return columns | self.scores

    def numbers(self) -> list[int]:
        """For each scored prompt, its number among all."""
        missing = set(self.left_out)
        return [i for i in range(len(self.prompts) + len(missing)) if i not in missing]

    def by_number(self, column: Sequence[float]) -> dict[int, float]:
        """A column of numbers by the number of the prompt among all."""
        return dict(zip(self.numbers(), column, strict=True))

    def only(self, numbers: Collection[int]) -> "Evaluation":
        """The scores of some prompts, by their numbers among all."""
        kept = [number in numbers for number in self.numbers()]
        dropped = set(self.numbers()) - set(numbers)

        def part(columns: dict[str, list[float]]) -> dict[str, list[float]]:
            return {
                name: list(compress(column, kept)) for name, column in columns.items()
            }

        return replace(
            self,
            prompts=list(compress(self.prompts, kept)),
            scores=part(self.scores),
            reward=list(compress(self.reward, kept)),
            left_out=sorted({*self.left_out, *dropped}),
            shown=part(self.shown),
        )


def yes_no_score(before: Evaluation, after: Evaluation) -> str | None:
    """Name of the first score that says of a video whether it shows what was asked: 0
    or 1, more is better.
    """
    for name in before.shown:
        if name in after.shown and name not in before.lower_is_better:
            return name
    return None


def scored_in_both(
    before: Evaluation, after: Evaluation
) -> tuple[Evaluation, Evaluation]:
    """The same two evaluations, of the prompts that were scored in both, so that they
    pair.

    ValueError where they are not of the same prompts, or fewer than 2 are left.
    """
    shared = set(before.numbers()) & set(after.numbers())
    before = before.only(shared)
    after = after.only(shared)
    pairs = ("prompts", "noises", "solver")
    if any(getattr(before, name) != getattr(after, name) for name in pairs):
        raise ValueError(
            "The two evaluations are not of the same prompts and noises by "
            "the same evaluation.solver, so they cannot be paired."
        )
    if len(shared) < 2:
        raise ValueError(
            f"{len(shared)} prompt(s) were scored in both evaluations; a comparison "
            "needs at least 2."
        )
    return before, after


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """One score of two evaluations of the same prompts and noise.

    Attributes:
        before, after: means over the prompts, with standard errors.
        mean, stderr: of the differences after - before, the latter from their sample
            std.
        low, high: the 95 % bootstrap interval of the mean.
        wins, ties: shares of the prompts that score better afterwards, which is higher
            unless `lower_is_better`, or exactly the same.
        count: number of pairs.

    Example: differences 1, 2, 3 give mean 2, stderr 0.577, wins 1.0, ties 0.0, count 3.
    """

    before: float
    before_stderr: float
    after: float
    after_stderr: float
    mean: float
    stderr: float
    low: float
    high: float
    wins: float
    ties: float
    count: int
    lower_is_better: bool = False

    @property
    def standard_errors(self) -> float:
        """Mean difference in units of its standard error."""
        if self.stderr == 0:
            # All differences are the same number.
            return math.copysign(math.inf, self.mean) if self.mean else 0.0
        return self.mean / self.stderr

    @property
    def change(self) -> str:
        """Mean difference and its standard error, such as `+0.160 ± 0.055`."""
        return plus_minus(self.mean, self.stderr)

    @property
    def interval(self) -> str:
        """Mean difference and its interval, such as `+0.16, 95 % interval +0.05 to
        +0.27`.
        """
        return mean_interval(self.mean, self.stderr, self.low, self.high)

    @property
    def significant(self) -> bool:
        """The interval of the difference excludes zero, and there are enough prompts to
        trust it.
        """
        return self.count >= ENOUGH_PROMPTS and not self.low <= 0.0 <= self.high


def to_error(value: float, stderr: float, sign: str = "") -> str:
    """A number to two significant digits of its standard error, and to four digits
    where that is 0 or tiny.

    Example: `to_error(3.02417, 0.0554)` is `3.024`, and `to_error(2.34e-7, 1.2e-7,
    "+")` is `+2.34e-07`.
    """
    if not 1e-6 <= stderr < math.inf:
        return f"{value:{sign}.4g}"
    return f"{value:{sign}.{max(0, 1 - math.floor(math.log10(stderr)))}f}"


def plus_minus(mean: float, stderr: float, sign: str = "+") -> str:
    """A number and its standard error, such as `+0.160 ± 0.055`."""
    return f"{to_error(mean, stderr, sign)} ± {to_error(stderr, stderr)}"


def mean_interval(mean: float, stderr: float, low: float, high: float) -> str:
    """A difference and its 95 % interval, to the digits of its standard error."""
    mean_text, low_text, high_text = (
        to_error(value, stderr, "+") for value in (mean, low, high)
    )
    return f"{mean_text}, 95 % interval {low_text} to {high_text}"


ENOUGH_PROMPTS = 10
"""Fewest prompts for which a bootstrap interval is trusted. With fewer there are too
few distinct resampled means: the interval of two prompts that both improve always
excludes zero.
"""


def paired_test(
    before: Sequence[float],
    after: Sequence[float],
    *,
    lower_is_better: bool = False,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedTest:
    """Paired comparison of scores of the same samples.

    Each of the bootstrap's resamples draws as many pairs as there are, with
    replacement; the interval runs from the 2.5th to the 97.5th percentile of their mean
    differences (the percentile bootstrap; Efron 1979).

    Args:
        before, after: P scores each, P >= 2.
        seed: of the resampling; with the same one all scores of an evaluation are
            resampled alike.

    Raises:
        ValueError: lists of different lengths, or of fewer than 2.
    """
    count = len(before)
    if count != len(after) or count < 2:
        raise ValueError(
            "A paired test needs two equally long lists of at least 2 scores, got "
            f"{count} and {len(after)}."
        )
    b, a = (torch.tensor(scores, dtype=torch.float64) for scores in (before, after))
    difference = a - b
    generator = torch.Generator().manual_seed(seed)
    # In parts: all indices at once would take 80 MB for 1,000 prompts.
    sizes = [min(500, resamples - start) for start in range(0, resamples, 500)]
    means = [
        difference[torch.randint(count, (size, count), generator=generator)].mean(1)
        for size in sizes
    ]
    low, high = (
        torch.cat(means)
        .quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
        .tolist()
    )
    return PairedTest(
        before=float(b.mean()),
        before_stderr=float(b.std()) / math.sqrt(count),
        after=float(a.mean()),
        after_stderr=float(a.std()) / math.sqrt(count),
        mean=float(difference.mean()),
        stderr=float(difference.std()) / math.sqrt(count),
        low=low,
        high=high,
        wins=float((difference * (-1 if lower_is_better else 1) > 0).double().mean()),
        ties=float((difference == 0).double().mean()),
        count=count,
        lower_is_better=lower_is_better,
    )


def paired_tests(
    before: Evaluation,
    after: Evaluation,
    *,
    weights: Collection[str] = (),
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, PairedTest]:
    """The paired tests of the reward, the overall where there is one, and every score
    that both evaluations have.

    Args:
        weights: scores of the reward; they come before others, in this order.
        resamples, seed: of the bootstrap.

    Raises:
        ValueError: the evaluations are not of the same prompts, or share fewer than 2
            scored ones.
    """
    before, after = scored_in_both(before, after)
    first = before.columns()
    second = after.columns()
    lower = {*before.lower_is_better, *after.lower_is_better}
    # Reward and overall, which are sums of scores.
    totals = [name for name in first if name not in before.scores]
    return {
        name: paired_test(
            first[name],
            second[name],
            lower_is_better=name in lower,
            resamples=resamples,
            seed=seed,
        )
        for name in dict.fromkeys([*totals, *weights, *first])
        if name in first and name in second
    }


WORSE = -3.0
"""Standard errors of a paired gain below which a model counts as worse than the one that
it is compared with.
"""


def is_worse(gain: float, stderr: float) -> bool:
    """The verdict on a paired gain of the reward."""
    return gain < min(0.0, WORSE * stderr)


def describe_worse(gains: Mapping[int, tuple[float, float]]) -> str | None:
    """A line on a run whose last evaluation is worse than update 0: since when, by how
    much, and which update is the best; None for any other run.

    Args:
        gains: update -> (paired gain over update 0, its standard error).
    """
    since = None
    for update in sorted(gains):
        # One update that is not worse ends a series, so what is left at the end is the
        # series up to now.
        if not is_worse(*gains[update]):
            since = None
        elif since is None:
            since = update
    if since is None:
        return None
    last = max(gains)
    best = max(gains, key=lambda update: gains[update][0])
    return (
        f"worse than at update 0 since update {since}: paired gain "
        f"{plus_minus(*gains[last])} at update {last}; the best is update {best}, "
        f"{gains[best][0]:+.3g}"
    )


def headline(tests: Mapping[str, PairedTest]) -> str:
    """Two sentences on the reward: how it changed, and on how many prompts."""
    test = tests[REWARD]
    verb = "rises" if test.mean > 0 else "falls" if test.mean < 0 else "stays"
    doubt = ""
    if test.count < ENOUGH_PROMPTS:
        doubt = f", of too few prompts to tell (fewer than {ENOUGH_PROMPTS})"
    elif not test.significant:
        doubt = ", which a difference of zero would explain too"
    return (
        f"{REWARD} {verb} from {to_error(test.before, test.stderr)} to "
        f"{to_error(test.after, test.stderr)}: {test.interval}{doubt}. The trained "
        f"model scores higher on {test.wins:.0%} of {test.count} prompts."
    )


def direction_label(name: str, lower_is_better: bool) -> str:
    """The name of a score in tables and plots: with an arrow where lower is better."""
    return f"{name} \N{DOWNWARDS ARROW}" if lower_is_better else name


def format_comparison(tests: Mapping[str, PairedTest]) -> str:
    """Paired tests as a small table for a terminal."""
    lines = [
        f"{'score':<24}{'before':>10}{'after':>10}{'difference':>12}{'std. error':>12}{'in s.e.':>9}{'better':>8}"
    ]
    for name, test in tests.items():
        lines.append(
            f"{direction_label(name, test.lower_is_better):<24}{to_error(test.before, test.stderr):>10}"
            f"{to_error(test.after, test.stderr):>10}{to_error(test.mean, test.stderr, '+'):>12}"
            f"{to_error(test.stderr, test.stderr):>12}{test.standard_errors:>+9.1f}{test.wins:>8.0%}"
        )
    return "\n".join(lines)


def evaluate(
    sampler: Sampler,
    scoring: VideoScoring,
    prompts: Sequence[Prompt],
    section: EvaluationConfig,
    *,
    on_video: Callable[[int, Tensor], None] | None = None,
) -> Evaluation:
    """Generate and score `section.noises` videos per prompt.

    Collective: batches are dealt to the data-parallel ranks in turn.

    Args:
        scoring: fresh, with the ranks in `world`; its `progress` sees every batch of
            this rank. Its `on_failure` says whether a prompt that a reward fails on
            ends the evaluation or is left out.
        prompts: S of them.
        on_video: called with the number of each prompt and its first video (F, 3, H, W)
            uint8, on the rank that decoded it; videos go to files there, not to another
            rank.

    Raises:
        RewardError: a reward failed and `on_failure` is stop, or no prompt could be
            scored. On all ranks.
    """
    scoring = replace(scoring, evaluating=True, group_size=section.noises)
    world = scoring.world
    sampled: list[tuple[int, int, Trajectory]] = []
    # The first videos of all prompts come first, so a video's number is its prompt's
    # there.
    members = [
        (prompt, member) for member in range(section.noises) for prompt in prompts
    ]
    places = list(range(len(members)))
    if scoring.reward.whole_groups(evaluating=True):
        # Prompt by prompt, so that a rank has all videos of each of its prompts.
        places.sort(key=lambda place: place % len(prompts))
    ordered = [members[place] for place in places]
    batches = list(micro_batches(ordered, section.batch_size))
    rounds = range(math.ceil(len(batches) / world.dp_degree))
    for done in rounds:
        # A rank that has run out samples the first batch again and drops it: ranks that
        # share weights run in step.
        number = done * world.dp_degree + world.dp_rank
        batch = sampler.samples(batches[number if number < len(batches) else 0])
        scoring.progress("evaluation", done, len(rounds), describe_batch(batch))
        trajectory = sampler(batch)
        if number < len(batches):
            # Its first video's number among all, and its place in the ranks' turns.
            sampled.append(
                (number * section.batch_size, done * section.batch_size, trajectory)
            )
        # Ranks that share a video wait until each has one to decode.
        if len(sampled) < world.sp and done + 1 < len(rounds):
            continue
        for first, turn, trajectory in sampled:
            for number, video in scoring.add(trajectory, first=first, turn=turn):
                place = places[number]
                if on_video is not None and place < len(prompts):
                    on_video(place, video)
        sampled.clear()
    scores, failed = scoring.gather(len(members))
    usual = torch.tensor(places).argsort()
    scores = {name: column[usual] for name, column in scores.items()}
    failed = failed[usual]
    # A prompt that has lost one video is left out: its mean would be of fewer noises.
    failed = failed.view(section.noises, -1).any(0)
    if bool(failed.all()):
        raise RewardError(
            f"The reward failed on all {len(prompts)} prompts of the evaluation."
        )
    columns = {
        name: column.view(section.noises, -1)[:, ~failed]
        for name, column in scores.items()
    }
    scores = {name: column.mean(0) for name, column in columns.items()}
    # x (1 - x) is 0 for 0 and for 1 alone.
    yes_no = [
        name
        for name, column in columns.items()
        if bool((column * (1 - column) == 0).all())
    ]
    return Evaluation(
        prompts=[
            p.text for p, lost in zip(prompts, failed.tolist(), strict=True) if not lost
        ],
        scores={name: column.tolist() for name, column in scores.items()},
        reward=scoring.reward.overall(scores).tolist(),
        noises=section.noises,
        solver=section.solver,
        left_out=failed.nonzero().flatten().tolist(),
        lower_is_better=sorted(scoring.reward.lower_is_better & scores.keys()),
        shown={name: columns[name][0].tolist() for name in yes_no},
    )
