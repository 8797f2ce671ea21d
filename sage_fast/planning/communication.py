"""Seconds in which the ranks of a video wait for its tokens and heads: Ulysses'
all-to-alls, which nothing hides.

P ranks share a video, and each sends (P - 1)/P of a buffer: within a node over NVLink,
to other nodes over the network, both at once, at the bandwidths that collectives are
reported to reach (`devices.py`). Latencies are not counted.

Other collectives are left out. FSDP's go on beside the blocks; those of adapters, of
the velocity, of Muon's matrices, of scores and of flags are together less than 0.02 %
of a video's time in every preset.
"""

from sage_fast.planning.devices import Device
from sage_fast.planning.memory import MemoryPlan
from sage_fast.planning.work import Visits, splits_branches
from sage_fast.sharding.ulysses import all_to_all_bytes


def waiting(
    held: MemoryPlan,
    visited: Visits,
    device: Device,
    *,
    evaluation_tokens: int,
    eval_batches: float,
) -> dict[str, float]:
    """Seconds by phase, per rollout and its updates, and per evaluation (`eval_batches`
    batches on a rank).
    """
    config = held.config
    rollout = config.rollout
    if held.layout.sp == 1:
        return {}
    branches = 1 if rollout.guidance_scale == 1.0 else 2
    # The forward process may sample with another guidance, so its branches are counted
    # apart.
    sampled = (1 if config.sampling_guidance == 1.0 else 2) * (
        visited.rollout + visited.pass_steps
    )
    # With split guidance and a policy that has moved, the unconditional branch is
    # computed once more.
    more = splits_branches(config) and held.costs.policy_moves
    # Passes of one branch, per video: (forwards, backwards). The repeated forwards are
    # of the unconditional branch.
    passes = {
        "rollout": (
            sampled + visited.repeated,
            branches * (visited.pass_steps + visited.second_products),
        ),
        "anchor": (branches * visited.anchor, 0.0),
        "update": ((branches + more) * visited.update, branches * visited.update),
    }
    batches = rollout.batch_size / rollout.videos_at_once
    found = {
        phase: batches
        * _seconds(held, device, held.video_tokens, rollout.videos_at_once, *counts)
        for phase, counts in passes.items()
    }
    evaluated = branches * eval_batches * config.evaluation_steps
    return found | {
        "evaluation": _seconds(
            held, device, evaluation_tokens, config.evaluation.batch_size, evaluated
        )
    }


def _seconds(
    held: MemoryPlan,
    device: Device,
    tokens: int,
    batch: int,
    forwards: float,
    backwards: float = 0.0,
) -> float:
    group = held.layout.groups["sp"]
    layers = held.description.num_layers
    # The last layer's text has no result to send.
    middle, end = (
        all_to_all_bytes(
            batch=batch,
            num_video=tokens,
            num_text=held.description.text_tokens,
            width=held.description.width,
            degree=group.ranks,
            itemsize=held.gathered.item,
            checkpointing=held.config.model.settled_checkpointing,
            last=last,
        )
        for last in (False, True)
    )
    forward, backward = (
        (layers - 1) * one + last for one, last in zip(middle, end, strict=True)
    )
    sent = forwards * forward + backwards * backward
    # It sends as much to every other rank.
    far = (
        sent * (group.ranks - group.local) / (group.ranks - 1)
        if group.nodes > 1
        else 0.0
    )
    return max((sent - far) / (device.link * 1e9), far / (device.network * 1e9))
