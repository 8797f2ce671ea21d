"""Joining the processes of a run."""

import os
from datetime import timedelta

import torch
from torch import distributed as dist

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.distributed.failure.selfcheck import check_identities
from sage_fast.distributed.launch import meeting_place
from sage_fast.distributed.world import ALONE, World, set_group_timeouts


def start_world(config: RunConfig, device: torch.device) -> World:
    """Join the processes that the launcher has started; `ALONE` where it started none.

    Args:
        config: the run; its `distributed` section has the degrees and timeouts.
        device: this rank's device; collectives of its tensors are NCCL's on a GPU and gloo's on a CPU.

    Raises:
        ConfigError: the degrees do not fit the number of processes, or ranks are not alike.
    """
    settings = config.distributed
    size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        replicate, shard, sp = settings.degrees(size, config.training.mode)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if "RANK" not in os.environ:
        return ALONE
    from torch.distributed.device_mesh import init_device_mesh

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    seconds = settings.startup_timeout_seconds
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **meeting_place(seconds))
    # Before there are groups: ranks that were told different degrees would make different ones.
    check_identities(config, device)
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
    set_group_timeouts(seconds)  # torch gives those of a mesh its default
    return world
