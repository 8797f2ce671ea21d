"""What FP8 products (`model.fp8`) do to samples and to the KL of the toy world, emulated on the CPU.

python -m benchmarks fp8              print the tables of docs/policy.md; minutes on one CPU core
python -m benchmarks fp8 --write      and put them into the page
"""

from collections.abc import Sequence

from benchmarks.cache import ROOT, compared, sample, write_tables
from benchmarks.report import markdown
from sage_fast.config.load import load_config
from sage_fast.run.run import build_trainer
from sage_fast.trainer import Trainer

FP8 = "--model.fp8=true"
TRAINED = ("--objective.kl_mode=fixed", "--rollout.batch_size=32", "--evaluation.every=0", FP8)


def samples(prompts: int) -> str:
    """Reward and distance of the same videos without and with FP8 products on the steps without noise."""
    found = [sample(options, prompts) for options in ([], [FP8])]
    rows = [[name, *compared(row, found[0])] for name, row in zip(("false", "true"), found, strict=True)]
    return markdown(["`model.fp8`", "reward", "against false", "distance", "against false"], rows)


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


def divergence() -> str:
    """The position KL before and after the first update, to the same anchor in both precisions."""
    trainer = build_trainer(load_config(ROOT / "configs/toy_cpu.yaml", TRAINED))
    before = [position_kl(trainer, fp8) for fp8 in (False, True)]
    trainer.policy.fp8 = False
    trainer.iterate()
    after = [position_kl(trainer, fp8) for fp8 in (False, True)]
    trainer.reward.close()
    rows = [[name, *(f"{value:.1e}" for value in row)] for name, row in (("0", before), ("1", after))]
    table = markdown(["updates", "KL to the anchor", "with the anchor in FP8"], rows)
    floor, moved = before[1], after[0]
    return f"{table}\nThe rounding's own KL, {floor:.1e}, is {floor / moved:.1f} times what one update moves.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    return write_tables(argv, "fp8", __doc__, lambda prompts: {"samples": samples(prompts), "divergence": divergence()})
