"""What FP8 products (`model.fp8: no_grad`) do to velocities, samples and the KL of the toy world, emulated on the CPU.

python -m benchmarks fp8              print the tables of docs/policy.md; minutes on one CPU core
python -m benchmarks fp8 --write      and put them into the page
"""

import argparse
from collections.abc import Sequence

import torch

from benchmarks.cache import PROMPTS, RECIPE, ROOT, compared, sample, write
from benchmarks.report import markdown
from sage_fast.config.load import load_config
from sage_fast.run.run import build_trainer
from sage_fast.trainer import Trainer

FP8 = "--model.fp8=no_grad"
TRAINED = ("--objective.kl_mode=fixed", "--rollout.batch_size=32", "--evaluation.every=0", FP8)
UPDATES = (0, 1)


def samples(prompts: int = PROMPTS) -> str:
    """Reward and distance of the same videos without and with FP8 products on the steps without noise."""
    found = [sample(options, prompts) for options in ([], [FP8])]
    head = ["`model.fp8`", "reward", "against none", "distance", "against none"]
    return markdown(
        head, [[name, *compared(row, found[0])] for name, row in zip(("none", "no_grad"), found, strict=True)]
    )


def velocities() -> str:
    """Relative error of the base model's velocity at the states of its own samples, by step."""
    trainer = build_trainer(load_config(ROOT / "configs/toy_cpu.yaml", [*RECIPE, "--rollout.batch_size=32", FP8]))
    trainer.gradient.begin(0.0, None, trainer._kl_factors())
    (trajectory,) = trainer._rollout()
    trainer.reward.close()
    embeds = [s.embeds for s in trajectory.samples]
    rows = []
    for step in (0, 5, 10, 15, 19):
        at = trajectory.latents[step], trajectory.table.sigmas[[step] * len(embeds)].float(), embeds
        with torch.no_grad():
            exact = trainer.policy.velocity(*at)
        error = (trainer.policy.untrained_velocity(*at) - exact).norm() / exact.norm()
        rows.append([str(step), f"{trajectory.table.sigmas[step]:.3f}", f"{error:.2%}"])
    return markdown(["step", "noise level", "error of the velocity"], rows)


def position_kl(trainer: Trainer, fp8: bool) -> float:
    """Mean position KL of a rollout to the anchor, whose velocities are in FP8 or not. Nothing is trained."""
    trainer.policy.fp8 = fp8
    weight = trainer.kl_weight.weight
    trainer.gradient.begin(weight, trainer.anchor, trainer._kl_factors())
    scored = trainer._score(trainer._rollout(), {})
    trainer.gradient.measure_anchor(scored)
    terms = trainer.gradient.accumulate(scored, range(len(scored.orders[0])), weight)
    trainer.engine.zero_grad()
    return float(terms.kl_position.mean())


def divergence(updates: Sequence[int] = UPDATES) -> str:
    """The position KL after a number of updates, to the same anchor in both precisions."""
    trainer = build_trainer(load_config(ROOT / "configs/toy_cpu.yaml", TRAINED))
    rows = []
    for count in updates:
        trainer.policy.fp8 = False
        while trainer.update < count:
            trainer.iterate()
        exact, rounded = (position_kl(trainer, fp8) for fp8 in (False, True))
        rows.append([str(count), f"{exact:.2e}", f"{rounded:.2e}"])
    trainer.reward.close()
    return markdown(["updates", "KL to the anchor", "with the anchor in FP8"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fp8", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put them into docs/policy.md")
    options = parser.parse_args(argv)
    made = {"velocities": velocities(), "samples": samples(), "divergence": divergence()}
    print("\n".join(made.values()), end="")
    if options.write:
        write("fp8", made.__getitem__)
    return 0
