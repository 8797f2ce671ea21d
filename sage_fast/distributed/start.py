"""Joining the processes of a run."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed as dist

from sage_fast.config.distributed import DistributedConfig
from sage_fast.config.errors import ConfigError
from sage_fast.distributed.failure.selfcheck import check_identities
from sage_fast.distributed.launch import meeting_place
from sage_fast.distributed.world import ALONE, World, set_group_timeouts


def start_world(
    distributed: DistributedConfig,
    mode: Literal["lora", "full"],
    device: torch.device,
    configuration: Mapping[str, Any],
) -> World:
    """Join the processes that the launcher has started; `ALONE` where it started none.

    Args:
        distributed: degrees and timeouts.
        mode: what is trained; it decides degrees that are left open.
        device: this rank's; collectives of its tensors run over NCCL on a GPU and over gloo on a CPU.
        configuration: the whole configuration as nested dicts, which must be the same on every rank.

    Raises:
        ConfigError: the degrees do not fit the number of processes, or the ranks differ.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        replicate, shard, sp = distributed.degrees(size, mode)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if "RANK" not in os.environ:
        return ALONE
    from torch.distributed.device_mesh import init_device_mesh

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    seconds = distributed.startup_timeout_seconds
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **meeting_place(seconds))
    # Before there are groups: ranks that were given different degrees would make different ones.
    check_identities(configuration, device)
    world = World(
        rank=dist.get_rank(),
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        dp_replicate=replicate,
        dp_shard=shard,
        sp=sp,
        mesh=init_device_mesh(device.type, (replicate, shard, sp), mesh_dim_names=("dp_replicate", "dp_shard", "sp")),
        fsdp_mesh=init_device_mesh(device.type, (replicate, shard * sp), mesh_dim_names=("replicate", "shard")),
    )
    set_group_timeouts(seconds)  # torch gives the groups of a mesh its default
    return world
