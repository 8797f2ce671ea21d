"""The smallest changes of a configuration that make it fit, or what could be changed of one that does."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.planning.estimate import Plan, make_plan

Change = tuple[str, Any]
"""A config key and its new value."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A configuration that computes the same, with its plan.

    Example: `Option(changes=(("training.guidance", "split"),), plan=...)`
    """

    changes: tuple[Change, ...]
    plan: Plan

    @property
    def overrides(self) -> str:
        """As words of the command line."""
        return " ".join(f"--{key}={_word(value)}" for key, value in self.changes)


def options(plan: Plan, on_gpu: bool, sizes: Mapping[str, float], most: int = 8) -> list[Option]:
    """What to change, ranked.

    Of a plan that does not fit: the sets of changes that make it fit and of which none can be left out, fewest changes
    first, then the fastest. If no set does, the one that needs least memory. Of a plan that fits: the single changes
    that save memory, the fastest first.
    """
    single = {change: option for change in _changes(plan) if (option := _try(plan, (change,), on_gpu, sizes))}
    if plan.fits:
        helping = [option for option in single.values() if _memory(option) < 0.99 * plan.memory.peak]
        return sorted(helping, key=_seconds)[:most]
    found = [option for option in single.values() if option.plan.fits]
    if not found and single:
        least = _least(plan, list(single), on_gpu, sizes)
        if not least.plan.fits:
            return [least]
    for count in range(2, 6):
        if len(found) >= most:
            break
        for changes in _combinations(list(single), count):
            if any(set(option.changes) <= set(changes) for option in found):
                continue
            option = _try(plan, changes, on_gpu, sizes)
            if option is not None and option.plan.fits:
                found.append(option)
    return sorted(found, key=lambda option: (len(option.changes), _seconds(option)))[:most]


def _least(plan: Plan, changes: list[Change], on_gpu: bool, sizes: Mapping[str, float]) -> Option:
    """All changes together, without those that save nothing."""
    chosen = dict(changes)  # of the values of a key the last one saves most
    best = _try(plan, tuple(chosen.items()), on_gpu, sizes)
    assert best is not None
    for key in list(chosen):
        fewer = {name: value for name, value in chosen.items() if name != key}
        option = _try(plan, tuple(fewer.items()), on_gpu, sizes)
        if option is not None and _memory(option) <= _memory(best):
            chosen, best = fewer, option
    return best


def _seconds(option: Option) -> float:
    return option.plan.seconds_per_video


def _memory(option: Option) -> float:
    return option.plan.memory.peak


def _changes(plan: Plan) -> Iterator[Change]:
    """Single changes that save memory and leave what is computed as it is."""
    config = plan.config
    model, rollout = config.model, config.rollout
    order = ["none", "selective", "full"] if model.forward == "fused" else ["none", "full"]
    for value in order[order.index(model.checkpointing) + 1 :]:
        yield "model.checkpointing", value
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
    if model.forward == "fused" and plan.device.link:
        if config.training.mode == "lora" and model.adaln != "offload":
            yield "model.adaln", "offload"
        if not model.offload_activations:
            yield "model.offload_activations", True


def _combinations(changes: list[Change], count: int) -> Iterator[tuple[Change, ...]]:
    """Sets of `count` changes, each of a different key."""
    keys = list(dict.fromkeys(key for key, _ in changes))
    for chosen in combinations(keys, count):
        yield from product(*([change for change in changes if change[0] == key] for key in chosen))


def _try(plan: Plan, changes: tuple[Change, ...], on_gpu: bool, sizes: Mapping[str, float]) -> Option | None:
    """The option, or None where the configuration refuses the changes."""
    try:
        config = _changed(plan.config, changes)
    except ConfigError:
        return None
    changed = make_plan(
        config,
        plan.device,
        on_gpu=on_gpu,
        gpus=plan.gpus,
        memory_gb=plan.memory_limit / 1e9,
        runtime=plan.memory.phases["rollout"].runtime,
        description=plan.description,
        sizes=sizes,
        skipped_forwards=plan.skipped_forwards,
    )
    return Option(changes=changes, plan=changed)


def _changed(config: RunConfig, changes: tuple[Change, ...]) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes:
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
