"""What to change in a configuration: the least that makes it fit, and the levers that train more per hour."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal, get_args

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.objective import kl_uses
from sage_fast.planning.estimate import Plan, make_plan
from sage_fast.planning.signal import is_measured, relative_signal

Change = tuple[str, Any]
"""A config key and its new value."""

Kind = Literal["exact", "unbiased", "biased"]
"""What a change leaves of the objective's gradient: itself, its mean, or neither."""

LEAST_GAIN = 1.005
"""A change that gives less than this factor is not worth a key."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A changed configuration with its plan.

    Example: `Option(changes=(("training.guidance", "split"),), plan=...)`
    """

    changes: tuple[Change, ...]
    plan: Plan
    kind: Kind = "exact"

    @property
    def signal(self) -> float:
        """Of a video's gradient, relative to that of the reference's full gradient; a bound unless `is_measured`."""
        return relative_signal(self.plan.config)

    @property
    def is_measured(self) -> bool:
        """Whether all factors of `signal` are; the others count as 1."""
        return is_measured(self.plan.config)

    @property
    def signal_per_second(self) -> float:
        return self.signal / (self.plan.seconds_per_video * self.plan.layout.sp)

    @property
    def overrides(self) -> str:
        """As words of the command line."""
        return " ".join(f"--{key}={_word(value)}" for key, value in self.changes)


def options(plan: Plan, most: int = 8) -> list[Option]:
    """What to change, ranked.

    Of a plan that does not fit: the sets of changes that make it fit and of which none can be left out, fewest changes
    first, then the fastest. If no set does, the one that needs least memory. Of a plan that fits: the single changes
    that save memory, the fastest first.
    """
    single = {change: option for change in _changes(plan) if (option := _try(plan, (change,)))}
    if plan.fits:
        helping = [option for option in single.values() if _memory(option) < 0.99 * plan.memory.peak]
        return sorted(helping, key=_seconds)[:most]
    found = [option for option in single.values() if option.plan.fits]
    if not found and single:
        least = _least(plan, list(single))
        if not least.plan.fits:
            return [least]
    for count in range(2, 6):
        if len(found) >= most:
            break
        for changes in _combinations(list(single), count):
            if any(set(option.changes) <= set(changes) for option in found):
                continue
            option = _try(plan, changes)
            if option is not None and option.plan.fits:
                found.append(option)
    return sorted(found, key=lambda option: (len(option.changes), _seconds(option)))[:most]


def ranked_levers(plan: Plan, most: int = 4) -> list[Option]:
    """Levers and combinations of them that fit, by predicted signal per GPU-hour: the best `most` of each kind.

    Of each set, no member can be left out for the same. Behind those of a kind come as many whose signal is not
    measured: those that would pay if the levers without a factor kept all of it.
    """
    kinds: tuple[Kind, ...] = get_args(Kind)
    found = [Option(changes=(), plan=plan)]
    for levers in product(*([None, *values] for values in _levers(plan.asked, plan.on_gpu).values())):
        chosen = [lever for lever in levers if lever is not None]
        changes = tuple(change for _, changes in chosen for change in changes)
        option = _try(plan, changes) if chosen else None
        if option is not None and option.plan.fits:
            kind = max((kind for kind, _ in chosen), key=kinds.index)
            found.append(replace(option, kind=kind))
    worth = {frozenset(option.changes): option.signal_per_second for option in found}
    useful = [
        option
        for option in found[1:]
        if all(
            worth[frozenset(option.changes)] > LEAST_GAIN * other
            for changes, other in worth.items()
            if changes < frozenset(option.changes)
        )
    ]
    useful.sort(key=lambda option: option.signal_per_second, reverse=True)
    groups = product(kinds, (True, False))
    return [
        option
        for kind, measured in groups
        for option in [o for o in useful if o.kind == kind and o.is_measured == measured][:most]
    ]


def _levers(config: RunConfig, on_gpu: bool) -> dict[str, list[tuple[Kind, tuple[Change, ...]]]]:
    """What each lever can be set to beside what it is, by its name."""
    training, rollout, model = config.training, config.rollout, config.model
    levers: dict[str, list[tuple[Kind, tuple[Change, ...]]]] = {}
    if on_gpu and model.forward == "fused" and model.checkpointing != "auto" and not model.offload_activations:
        settled = (("model.lighter_blocks", 0),) if model.lighter_blocks else ()
        levers["checkpointing"] = [("exact", (("model.checkpointing", "auto"), *settled))]
    if training.update == "two_phase":
        levers["update"] = [("exact", (("training.update", "single_pass"),))]
    fraction = "objective.kl_position_fraction"
    if kl_uses(config.objective.kl_mode)[0] and config.objective.kl_position_fraction > 0.25:
        levers["kl"] = [("unbiased", ((fraction, 0.25),))]
    if training.pairs == "all" and training.timestep_fraction == 1:
        levers["pairs"] = [
            ("unbiased", (("training.pairs", pairs), ("training.pair_fraction", share)))
            for pairs, share in (("uniform", 0.5), ("weighted", 0.5), ("weighted", 0.25))
        ]
    shared: Change = ("rollout.shared_initial_noise", True)
    if rollout.sde_window.size is None and rollout.sde_window.steps is None:
        size: Change = ("rollout.sde_window.size", max(1, rollout.num_steps // 4))
        levers["window"] = [("biased", (size,)), ("biased", (size, shared))]
    elif not rollout.shared_initial_noise:
        levers["window"] = [("biased", (shared,))]
    quarter = rollout.num_generations // 4
    if quarter and not training.train_on.count and rollout.batch_size % rollout.num_generations == 0:
        best_and_worst = (("training.train_on.best", quarter), ("training.train_on.worst", quarter))
        levers["train_on"] = [("biased", best_and_worst)]
    return levers


def _least(plan: Plan, changes: list[Change]) -> Option:
    """All changes together, without those that save nothing."""
    chosen = dict(changes)  # of the values of a key the last one saves most
    best = _try(plan, tuple(chosen.items()))
    assert best is not None
    for key in list(chosen):
        fewer = {name: value for name, value in chosen.items() if name != key}
        option = _try(plan, tuple(fewer.items()))
        if option is not None and _memory(option) <= _memory(best):
            chosen, best = fewer, option
    return best


def _seconds(option: Option) -> float:
    return option.plan.seconds_per_video


def _memory(option: Option) -> float:
    return option.plan.memory.peak


def _changes(plan: Plan) -> Iterator[Change]:
    """Single changes that save memory and leave what is computed as it is."""
    config = plan.asked
    model, rollout = config.model, config.rollout
    order = ["selective", "full"] if model.forward == "fused" else ["full"]
    for value in order[order.index(model.checkpointing) + 1 if model.checkpointing in order else 0 :]:
        yield "model.checkpointing", value
    if model.lighter_blocks:
        yield "model.lighter_blocks", 0
    if config.training.guidance == "paired" and rollout.guidance_scale != 1.0:
        yield "training.guidance", "split"
    sizes = [size for size in range(rollout.micro_batch_size - 1, 0, -1) if rollout.batch_size % size == 0]
    for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]):
        yield "rollout.micro_batch_size", size
    if plan.gathered.sharded and plan.gathered.keep != "never" and not config.distributed.cpu_offload:
        yield "distributed.keep_gathered", "never"
    if config.evaluation.every and config.evaluation.batch_size > 1:
        yield "evaluation.batch_size", max(1, config.evaluation.batch_size // 4)
    if not plan.tiled and (model.decode_limit_gib is None or model.decode_limit_gib > 8):
        yield "model.decode_memory_gib", 8.0
    if model.forward == "fused" and plan.on_gpu:
        if config.training.mode == "lora" and model.adaln != "offload":
            yield "model.adaln", "offload"
        if not model.offload_activations:
            yield "model.offload_activations", True


def _combinations(changes: list[Change], count: int) -> Iterator[tuple[Change, ...]]:
    """Sets of `count` changes, each of a different key."""
    keys = list(dict.fromkeys(key for key, _ in changes))
    for chosen in combinations(keys, count):
        yield from product(*([change for change in changes if change[0] == key] for key in chosen))


def _try(plan: Plan, changes: tuple[Change, ...]) -> Option | None:
    """The option, or None where the configuration refuses the changes."""
    try:
        config = _changed(plan.asked, changes)
    except ConfigError:
        return None
    changed = make_plan(
        config,
        plan.device,
        gpus=plan.gpus,
        memory_gb=plan.memory_limit / 1e9,
        runtime=plan.runtime,
        description=plan.description,
        sizes=plan.sizes,
        skipped_forwards=plan.skipped_forwards,
    )
    return Option(changes=changes, plan=changed)


def _changed(config: Any, changes: tuple[Change, ...]) -> Any:
    """A configuration, or a section of one, with the values of dotted keys; those of a section together."""
    own = {key: value for key, value in changes if "." not in key}
    inner: dict[str, list[Change]] = {}
    for key, value in changes:
        section, _, name = key.partition(".")
        if name:
            inner.setdefault(section, []).append((name, value))
    return replace(config, **own, **{name: _changed(getattr(config, name), tuple(c)) for name, c in inner.items()})


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
