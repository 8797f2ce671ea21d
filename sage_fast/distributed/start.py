"""The processes of a run, as torchrun has started them and describes them in the
environment of each.

torch and this file read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and
TORCHELASTIC_*. torch is imported where it is needed, because every command imports this
file.
"""

import contextlib
import logging
import os
import resource
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from sage_fast.config.errors import ConfigError, printable

if TYPE_CHECKING:
    import torch

    from sage_fast.config.sections import DistributedConfig
    from sage_fast.distributed.world import World

logger = logging.getLogger(__name__)


def rank() -> int:
    """This process among all of the run; 0 where no launcher has started it."""
    return _number("RANK", 0)


def world_size() -> int:
    """Number of processes of the run."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    """A whole number of the environment. SystemExit where it is another text: who reads
    it may be telling an error.
    """
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        sys.exit(
            f"error: the environment variable {name} is {text!r}; a launcher sets it "
            "to a number. Unset it."
        )
    return int(text)


def rank_device(name: str) -> "torch.device":
    """The device of this rank for `model.device`; a GPU becomes the current one.

    `auto` and `cuda` are the GPU of this rank's number on its node, or the only one
    that it sees; `auto` is the CPU where there is no GPU. On a CPU nothing is changed,
    threads included.

    Raises:
        ConfigError: more processes than GPUs, or a device torch cannot use.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type != "cuda":
            # A device that torch knows by name but cannot use raises here.
            torch.empty(0, device=device)
            return device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.device is {name!r}, which torch cannot use here: {error}. Use "
            "auto or cpu."
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError(
            f"model.device is {name!r}, but torch sees no GPU on "
            f"{os.uname().nodename}. Use cpu, or see that the "
            "driver and a CUDA build of torch are installed on every node."
        )
    count = torch.cuda.device_count()
    local = _number("LOCAL_RANK", 0)
    if ":" not in name:
        # A scheduler that binds GPUs to tasks shows each task its own, as number 0.
        # `start_world` finds two processes that have the same one.
        bound = count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
        device = torch.device("cuda", 0 if bound else local)
    if device.index >= count:
        raise ConfigError(
            f"{os.uname().nodename} has {count} usable GPU(s), but {device} was asked "
            "for: every process needs "
            f"its own. Start at most {count} per node, as by torchrun "
            f"--nproc_per_node={count}, or set model.device "
            "to cpu."
        )
    torch.cuda.set_device(device)
    return device


def check_restartable(resume: str) -> None:
    """Refuse restarts by torchrun that would not go on with the run.

    By default torchrun's agent keeps one store through all restarts, and a process that
    meets there may be sent to the address of one that has died (pytorch issue 135712).
    And a process cannot tell that it is a second one: where a node is replaced,
    torchrun starts the same words again and its count of restarts stays 0.

    Args:
        resume: of the configuration.

    Raises:
        ConfigError: torchrun may restart the processes, and would let them share one
            store, or not go on with the run.
    """
    restarts = _number("TORCHELASTIC_MAX_RESTARTS", 0)
    if restarts and resume != "auto":
        raise ConfigError(
            f"torchrun was started with --max-restarts={restarts}, but with --resume "
            f"{resume} restarted processes "
            "would not go on with the run. Give --resume auto, which begins a new run "
            "where there is none; to begin "
            "elsewhere, leave --max-restarts out until the first checkpoint is there."
        )
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            f"torchrun was started with --max-restarts={restarts}, but restarted "
            "processes would wait forever in the store of those before. Set the "
            "environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, as "
            "configs/launch/torchrun.sh does, or leave "
            "--max-restarts out."
        )


def start_world(
    distributed: "DistributedConfig",
    mode: Literal["lora", "full"],
    device: "torch.device",
    configuration: Mapping[str, Any],
) -> "World":
    """Join the processes that the launcher has started; `SINGLE_PROCESS` where it
    started none.

    Each group that training uses has communicated when this returns: a network that
    does not carry it is found in a minute, not after the model, the prompts and the
    first rollout.

    Args:
        distributed: degrees and timeouts.
        mode: what is trained; it decides degrees that are left open.
        device: this rank's; collectives of its tensors run over NCCL on a GPU and over
            gloo on a CPU.
        configuration: the whole configuration as nested dicts, which must be the same
            on every rank.

    Raises:
        ConfigError: the degrees do not fit the number of processes, the ranks differ,
            or a restart would not go on.
    """
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from sage_fast.config.schema import by_dotted_key
    from sage_fast.distributed.failure import check_same_everywhere, software
    from sage_fast.distributed.world import SINGLE_PROCESS, World, set_group_timeouts

    size = world_size()
    try:
        replicate, shard, sp = distributed.degrees(size, mode)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # After the degrees, which must fit a single process too.
    if "RANK" not in os.environ:
        return SINGLE_PROCESS
    check_restartable(str(configuration.get("resume", "auto")))
    # gloo connects every rank with every other one, twice: more than the usual 1,024
    # descriptors with 512 ranks.
    with contextlib.suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    seconds = distributed.startup_timeout_seconds
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    own = software()
    for key, value in by_dotted_key(configuration).items():
        own[f"config {key}"] = repr(value)
    # Before there are groups: ranks that were given different degrees would make
    # different ones.
    check_same_everywhere(own, device)
    world = World(
        rank=dist.get_rank(),
        size=size,
        dp_replicate=replicate,
        dp_shard=shard,
        sp=sp,
        mesh=init_device_mesh(
            device.type,
            (replicate, shard, sp),
            mesh_dim_names=("dp_replicate", "dp_shard", "sp"),
        ),
        fsdp_mesh=init_device_mesh(
            device.type, (replicate, shard * sp), mesh_dim_names=("replicate", "shard")
        ),
    )
    assert world.mesh is not None and world.fsdp_mesh is not None
    # Only while the groups are tried: the start's own timeout allows for loading a
    # model.
    set_group_timeouts(distributed.timeout_seconds)
    for group in (None, world.sp_group, *world.fsdp_mesh.get_all_groups()):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    set_group_timeouts(seconds)  # torch gives the groups of a mesh its default
    return world


def configure_logging() -> None:
    """Log to stderr, with the time: rank 0 from INFO on, the others warnings and
    errors, with their rank.

    The environment variable LOGLEVEL is the level of every rank, and also that of
    torch.

    Raises:
        ConfigError: LOGLEVEL is not a level.
    """
    level = "INFO"
    who = ""
    if rank() > 0:
        level = "WARNING"
        who = f"[rank {rank()}] "
    level = os.environ.get("LOGLEVEL") or level
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"LOGLEVEL is {level!r}. Use DEBUG, INFO, WARNING or ERROR.")
    layout = f"%(asctime)s {who}%(levelname)s %(message)s"
    logging.basicConfig(level=level, format=layout, datefmt="%Y-%m-%d %H:%M:%S")


def report_error(message: str) -> None:
    """Print an error that ends this process, with its rank before it where there are
    several.
    """
    who = f"[rank {rank()}] " if world_size() > 1 else ""
    print(printable(who + message), file=sys.stderr, flush=True)


def end_process(status: int) -> NoReturn:
    """Leave now, without waiting for threads, other ranks or the GPU; child processes
    are ended too.

    After a failure the ordinary way out may wait for collectives that nobody will
    answer.
    """
    # here, because every command imports this file
    from multiprocessing import active_children

    for child in active_children():
        child.kill()
    # `os._exit` flushes nothing.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
