"""Short names of pluggable parts, resolved only when a run asks for them.

Everything that is specific to one model family or one reward is reached through these
tables (or through a `package.module:attribute` of the user's own), so the trainer
imports none of it. `PARTS` has every key of the configuration that names such a part.
"""

import importlib
import traceback
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from sage_fast.config.errors import ConfigError

MODEL_FAMILIES = {
    "toy": "sage_fast.models.toy.components:Toy",
    "toy_words": "sage_fast.models.toy.words:Words",
    "hunyuan15": "sage_fast.models.hunyuan15.hunyuan15:HunyuanVideo15",
    "wan": "sage_fast.models.wan.wan:Wan",
    "wan_experts": "sage_fast.models.wan.experts:WanPair",
}
"""`model.family` -> `ModelFamily`."""

TRANSFORMERS = {
    "HunyuanVideo15Transformer3DModel": "hunyuan15",
    "WanTransformer3DModel": "wan",
    "WanExperts": "wan_experts",
}
"""Class of a transformer -> the family whose code computes with it; the first one is
the default.
"""

UPDATES = {
    "two_phase": "sage_fast.objectives.grpo:TwoPhase",
    "single_pass": "sage_fast.objectives.single_pass:SinglePass",
    "forward_process": "sage_fast.objectives.forward_process:ForwardProcess",
}
"""`training.update` -> `Objective`."""

SAMPLERS = dict.fromkeys(
    (
        "sage_grpo",
        "sage_exact",
        "dance_grpo",
        "flow_grpo",
        "flow_grpo_wan",
        "cps",
        "ode",
    ),
    "sage_fast.sde:transition_table",
)
"""`rollout.sde_type` -> a function as `transition_table` is one."""

ADVANTAGES = dict.fromkeys(
    ("sum", "per_reward"), "sage_fast.objective:weighted_advantages"
)
"""`advantage.normalization` -> the advantages of a batch; `weighted_advantages` says
how it calls one of the user's own.
"""

TRACKERS = {
    "tensorboard": "sage_fast.run.metrics:TensorBoard",
    "wandb": "sage_fast.run.metrics:WeightsAndBiases",
}
"""`logging.report_to` -> `Tracker`."""

REWARDS = {
    "toy": "sage_fast.rewards.toy:ToyReward",
    "videoalign": "sage_fast.rewards.videoalign:VideoAlignReward",
    "clip_score": "sage_fast.rewards.clip:CLIPScore",
    "pick_score": "sage_fast.rewards.clip:PickScore",
    "ocr": "sage_fast.rewards.ocr:OcrReward",
}

PARTS: dict[str, dict[str, str]] = {
    "model.family": MODEL_FAMILIES,
    "training.update": UPDATES,
    "rollout.sde_type": SAMPLERS,
    "advantage.normalization": ADVANTAGES,
    "reward.rewards": REWARDS,
    "reward.evaluation": REWARDS,
    "logging.report_to": TRACKERS,
}
"""Dotted key -> its short names. What else stands there is `package.module:attribute`,
which a run directory is trusted with (`check_trust`) before it is imported.
"""

REGISTERED: dict[str, Any] = {}
"""Objects that this process has entered by `register`, by name."""

SCORES = {
    "toy": ("VQ", "MQ", "TA", "aligned", "manifold_distance"),
    "videoalign": ("VQ", "MQ", "TA"),
    "clip_score": ("CLIPScore",),
    "pick_score": ("PickScore",),
    "ocr": ("OCR", "OCR_right"),
}
"""The scores of those rewards."""


def register(found: Any, taken: Collection[str] = ()) -> str:
    """Enter an object of this process, and return the name under which `resolve` finds
    it: `module:qualified name`.

    Of an object that is neither a function nor a class it is the name of its class. A
    number follows where it is that of another object among those `taken`.
    """
    named = found if hasattr(found, "__qualname__") else type(found)
    name = first = f"{named.__module__}:{named.__qualname__}"
    numbers = count(2)
    while name in taken and REGISTERED[name] is not found:
        name = f"{first}_{next(numbers)}"
    REGISTERED[name] = found
    return name


def check_name(name: str, table: Mapping[str, str], key: str) -> None:
    """ConfigError that names `key`, for what is neither in the table nor a
    `package.module:attribute`.
    """
    if name not in table and ":" not in name:
        raise ConfigError(
            f"{key} is {name!r}, but it must be {' or '.join(table)} or "
            "package.module:name."
        )


def resolve(name: str, table: dict[str, str], key: str) -> Any:
    """The object behind a short name, a name that this process has entered, or a
    `package.module:attribute`.

    Raises:
        ConfigError: the name is unknown, or importing its module failed;
            the message names `key`.
    """
    if name in REGISTERED:
        return REGISTERED[name]
    check_name(name, table, key)
    target = table.get(name, name)
    module_name, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        # `sage-fast` does not look into the folder it is called from.
        if target == name:
            hint = " If it is a file of your own, set PYTHONPATH to its folder."
        else:
            hint = ""
        raise ConfigError(
            f"{key} is {name!r}, but importing {module_name!r} failed: {error}.{hint}"
        ) from error
    except (Exception, SystemExit) as error:
        # A module of the user's own may fail in any way, or end the process.
        raise ConfigError(
            f"{key} is {name!r}, but importing {module_name!r} failed: "
            f"{describe(error)}."
        ) from error


def describe(error: BaseException) -> str:
    """Type, message and place of an error in code that is not this project's."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    )


def outside_names(names: Iterable[str], table: Mapping[str, str]) -> list[str]:
    """Names of user code."""
    return [name for name in names if ":" in name and name not in table.values()]
