"""What the feature cache (`rollout.cache_threshold`) does to samples of the toy world.

    python -m benchmarks cache              print the table of docs/policy.md; two minutes on one CPU core
    python -m benchmarks cache --write      and put it into the page

Every row samples the same videos from the same noise, so that a difference has the error of its pairs.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import markdown, renewed
from sage_fast.config.files import write_text
from sage_fast.config.load import load_config
from sage_fast.data import group_members
from sage_fast.models.toy.manifold import manifold_for
from sage_fast.records import Sample
from sage_fast.rewards.gather import gather_scores
from sage_fast.rollout import (
    VideoScoring,
    initial_latents,
    micro_batches,
    noise_keys,
    policy_velocity,
    rollout_table,
    sample_trajectory,
)
from sage_fast.run.run import build_trainer

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/policy.md"
RECIPE = ("--rollout.num_steps=20", "--rollout.sde_window.size=4", "--rollout.sde_window.start=4")
THRESHOLDS = (0.0, 0.05, 0.1, 0.2)
PROMPTS, MEMBERS = 24, 4
"""Of the evaluation, and videos of each, which are one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Videos of one configuration. reward, distance: (V,); skipped: share of the forwards outside the window."""

    reward: Tensor
    distance: Tensor
    skipped: float


def sample(options: Sequence[str], prompts: int) -> Samples:
    """Videos of the evaluation's first prompts by the toy's base model."""
    config = load_config(ROOT / "configs/toy_cpu.yaml", [*RECIPE, *options])
    trainer = build_trainer(config)
    table, policy = rollout_table(config.rollout, 0), trainer.policy
    scoring = VideoScoring(decoder=trainer.decoder, reward=trainer.reward, on_failure="stop")
    manifold = manifold_for(config.video.num_frames, config.video.height, config.video.width)
    distances, members = [], group_members(trainer.eval_prompts[:prompts], MEMBERS)
    samples = [Sample(prompt=p, embeds=trainer.embed(p.text), member=member) for p, member in members]
    for number, batch in enumerate(micro_batches(samples, MEMBERS)):
        keys = noise_keys(batch, config.evaluation.seed, 0)
        initial = initial_latents(keys, trainer.latent_shape)
        trajectory = sample_trajectory(policy_velocity(policy, batch, table), batch, keys, table, initial)
        videos = scoring.submit(trajectory, first=number * MEMBERS, turn=0)
        distances.append(manifold.distance(torch.stack([video for _, video in videos])))
    columns, _, _ = gather_scores(scoring.pending, len(samples), trainer.world)
    trainer.reward.close()
    skipped, forwards = policy.reuse.take_counts() if policy.reuse else (0, 1)
    return Samples(
        reward=trainer.reward.overall(columns), distance=torch.cat(distances).double(), skipped=skipped / forwards
    )


def table(thresholds: Sequence[float] = THRESHOLDS, prompts: int = PROMPTS) -> str:
    """Reward and distance by threshold, with standard errors; the first one is what the others are compared with."""
    found = [sample([f"--rollout.cache_threshold={threshold}"], prompts) for threshold in thresholds]
    rows = [
        [f"{threshold:g}" if threshold else "off", f"{row.skipped:.0%}", *compared(row, found[0])]
        for threshold, row in zip(thresholds, found, strict=True)
    ]
    head = ["`cache_threshold`", "forwards skipped", "reward", "against off", "distance", "against off"]
    return markdown(head, rows)


def compared(row: Samples, first: Samples) -> list[str]:
    """Cells of reward and distance, each followed by its difference to the first row's."""
    cells = []
    for name in ("reward", "distance"):
        values, reference = getattr(row, name), getattr(first, name)
        cells += [_mean(values), _mean(values - reference, sign="+") if row is not first else ""]
    return cells


def _mean(values: Tensor, sign: str = "") -> str:
    return f"{float(values.mean()):{sign}.4f} ± {float(values.std() / len(values) ** 0.5):.4f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    return write_tables(argv, "cache", __doc__, lambda prompts: {"samples": table(prompts=prompts)})


def write_tables(
    argv: Sequence[str] | None, kind: str, about: str | None, make: Callable[[int], Mapping[str, str]]
) -> int:
    """Command line of a page's tables: print them and, with --write, rebuild the page's blocks of that kind.

    Args:
        make: tables by block, from a number of prompts.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {kind}", description=(about or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put what is printed into docs/policy.md")
    parser.add_argument("--prompts", type=int, default=PROMPTS, metavar="N", help="of the evaluation; default: 24")
    options = parser.parse_args(argv)
    made = make(options.prompts)
    print("\n".join(made.values()), end="")
    if options.write:
        page = renewed(PAGE.read_text("utf-8"), kind, made.__getitem__)
        write_text(PAGE, page)
    return 0
