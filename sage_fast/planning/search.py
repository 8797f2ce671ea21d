"""Changes of a configuration that save memory and leave what is computed as it is: the least that makes it fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sage_fast.config.errors import ConfigError
from sage_fast.planning.estimate import Plan, make_plan

Change = tuple[str, Any]
"""A config key and its new value."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A changed configuration with its plan.

    Example: `Option(changes=(("training.guidance", "split"),), plan=...)`
    """

    changes: tuple[Change, ...]
    plan: Plan

    @property
    def overrides(self) -> str:
        """As words of the command line."""
        return " ".join(f"--{key}={_word(value)}" for key, value in self.changes)


def options(plan: Plan, most: int = 8) -> list[Option]:
    """Changes worth making, the fastest first.

    Of a plan that fits: the single changes that save memory. Of one that does not: the single changes that make it fit,
    or else one set of changes of which none can be left out; if even that does not fit, it needs least memory.
    """
    single = [option for change in _changes(plan) if (option := _try(plan, (change,)))]
    if plan.fits:
        helping = [option for option in single if _memory(option) < 0.99 * plan.memory.peak]
    else:
        helping = [option for option in single if option.plan.fits]
        if single and not helping:
            helping = [_together(plan, single)]
    return sorted(helping, key=lambda option: option.plan.seconds_per_video)[:most]


def _together(plan: Plan, single: list[Option]) -> Option:
    """All changes together, less those that are not needed to fit, or that save nothing where nothing fits."""
    # Of the values of a key the last one saves most.
    chosen = dict(change for option in single for change in option.changes)
    best = _try(plan, tuple(chosen.items()))
    assert best is not None
    for key in list(chosen):
        fewer = {name: value for name, value in chosen.items() if name != key}
        option = _try(plan, tuple(fewer.items()))
        if option is not None and (option.plan.fits or _memory(option) <= _memory(best)):
            chosen, best = fewer, option
    return best


def _memory(option: Option) -> float:
    return option.plan.memory.peak


def _changes(plan: Plan) -> Iterator[Change]:
    """Single changes that save memory and leave what is computed as it is."""
    config = plan.asked
    model, rollout = config.model, config.rollout
    order = ["selective", "full"] if model.forward == "fused" else ["full"]
    for value in order[order.index(model.checkpointing) + 1 if model.checkpointing in order else 0 :]:
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
    if model.forward == "fused" and plan.on_gpu and config.training.mode == "lora" and model.adaln != "offload":
        yield "model.adaln", "offload"


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
