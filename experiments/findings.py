"""A measured number with what it was made with, and many of them as JSON lines."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sage_fast.config.files import replacing
from sage_fast.config.schema import tried_settings
from sage_fast.config.sections import digest

COST = "core_seconds"
"""Quantity of an experiment's cost: seconds of one core, for all its arms and seeds."""

PER_PROMPT = "final_"
"""Begins the quantities whose parts are prompts, the same ones for every arm and seed.
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One number of a study.

    Attributes:
        experiment: key in the table.
        quantity: what was measured.
        arm: of what, such as a sampler.
        seed: None for what has none.
        n: samples, prompts or steps behind it.
        stderr: of the value within its seed, None where it is exact or follows from the
            seeds.
        parts: numbers behind it, such as one per step, update or prompt.
        settings: digest of the configuration.
        version, torch, commit: of the code.

    Example: `Finding(experiment="fig4", quantity="spread", arm="sage_grpo", seed=0,
    value=36.1, n=8, settings="1f0c")`
    """

    experiment: str
    quantity: str
    arm: str
    value: float
    seed: int | None = None
    n: int = 1
    stderr: float | None = None
    parts: tuple[float, ...] = ()
    settings: str = ""
    version: str = ""
    torch: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Findings:
    """The numbers of a study, by experiment, quantity, arm and seed."""

    rows: Sequence[Finding]

    def select(
        self, experiment: str, quantity: str, arm: str | None = None
    ) -> list[Finding]:
        """The rows of one quantity, of one arm or of all."""
        return [
            row
            for row in self.rows
            if row.experiment == experiment
            and row.quantity == quantity
            and arm in (None, row.arm)
        ]

    def by_seed(
        self, experiment: str, quantity: str, arm: str
    ) -> dict[int | None, Finding]:
        """The rows of one quantity and arm by their seed."""
        return {row.seed: row for row in self.select(experiment, quantity, arm)}

    def mean(self, experiment: str, quantity: str, arm: str) -> float:
        """Mean over the seeds. KeyError where nothing was measured."""
        values = [row.value for row in self.select(experiment, quantity, arm)]
        if not values:
            raise KeyError(f"{experiment}: no {quantity} of {arm}")
        return fmean(values)

    def parts(self, experiment: str, quantity: str, arm: str) -> tuple[float, ...]:
        """Parts of the first row. KeyError where nothing was measured."""
        rows = self.select(experiment, quantity, arm)
        if not rows:
            raise KeyError(f"{experiment}: no {quantity} of {arm}")
        return rows[0].parts

    def arms(self, experiment: str, quantity: str, prefix: str = "") -> list[str]:
        """Measured arms whose names begin with the prefix, in the order of the file."""
        return [
            arm
            for arm in dict.fromkeys(r.arm for r in self.select(experiment, quantity))
            if arm.startswith(prefix)
        ]

    def seeds(self, experiment: str) -> list[int]:
        """Seeds that an experiment has, ascending."""
        return sorted(
            {
                row.seed
                for row in self.rows
                if row.experiment == experiment and row.seed is not None
            }
        )


def write_findings(path: Path, rows: Iterable[Finding]) -> None:
    """One line per number, or for all seeds of one that has no parts. OSError when the
    file cannot be written.
    """
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        tree = {
            key: value
            for key, value in asdict(row).items()
            if value not in (None, (), "")
        }
        tree["value"] = float(f"{row.value:.6g}")
        if row.parts:
            tree["parts"] = [float(f"{part:.6g}") for part in row.parts]
        shared = json.dumps(
            {key: value for key, value in tree.items() if key not in ("seed", "value")}
        )
        if row.parts or row.seed is None:
            lines[f"{shared} {len(lines)}"] = tree
        else:
            line = lines.setdefault(shared, tree | {"seed": [], "value": []})
            line["seed"].append(tree["seed"])
            line["value"].append(tree["value"])
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps(tree, allow_nan=False) + "\n" for tree in lines.values()
        )


def read_findings(path: Path) -> Findings:
    """The inverse of `write_findings`."""
    rows = []
    for line in path.read_text("utf-8").splitlines():
        tree = json.loads(line)
        tree["parts"] = tuple(tree.get("parts", ()))
        seeds = tree.pop("seed", None)
        values = tree.pop("value")
        if not isinstance(values, list):
            seeds = [seeds]
            values = [values]
        rows += [
            Finding(**tree, seed=seed, value=value)
            for seed, value in zip(seeds, values, strict=True)
        ]
    return Findings(rows)


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Eight characters that differ for configurations that differ in more than place,
    machine and seed.
    """
    return digest(tried_settings(settings))[:8]


def made_with(environment: Mapping[str, Any]) -> dict[str, str]:
    """The part of a description of the environment that a finding carries."""
    packages = environment.get("packages") or {}
    return {
        "version": environment.get("sage_fast") or "",
        "torch": packages.get("torch") or "",
        "commit": environment.get("commit") or "",
    }


def unsteadiness(curve: Sequence[float]) -> float:
    """Standard deviation of a curve from one update to the next, without its trend: of
    its differences over sqrt 2.
    """
    steps = [after - before for before, after in pairwise(curve)]
    return stdev(steps) / 2**0.5 if len(steps) > 1 else 0.0
