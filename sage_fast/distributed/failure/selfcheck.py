"""What must hold before many processes train as one, checked once at the start of a run.

A difference here would not stop a run: it would train on something else than the user believes. So every check fails
closed, and names what differs on which ranks. All ranks raise the same message.
"""

import hashlib
import platform
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed as dist

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import by_dotted_key
from sage_fast.distributed.failure.rank_table import ranks_in_words
from sage_fast.noise import NoiseKey, gaussian

if TYPE_CHECKING:
    from sage_fast.distributed.world import World

# torch 2.13 has other names for some collectives, which 2.11 lacks.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)

T = TypeVar("T")

SECONDS_TO_SEE_A_FILE = 20.0
"""How long a file of rank 0 may take to be seen: network file systems answer from a cache for a while."""
MOST_SHOWN = 4

# Packages that can change a number or a speed; those not installed are left out.
PACKAGES = (
    "torch",
    "triton",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "numpy",
    "av",
    "deepspeed",
    "flash-attn",
    "xformers",
    "torchvision",
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What one rank is: values that must agree (`config`, `software`), and a device that must not."""

    config: Mapping[str, str]
    """The resolved configuration, by dotted key, with values as they print."""
    software: Mapping[str, str]
    """Versions, and a digest of this package's source."""
    device: str
    """The GPU; empty on a CPU."""


def check_identities(configuration: Mapping[str, Any], device: torch.device) -> None:
    """Every rank has the same configuration and software and a GPU of its own. Collective, over the default group.

    Called before the groups of the mesh are made, whose shape the configuration decides; no-op on one process.

    Args:
        configuration: nested dicts, as `to_dict` makes them.

    Raises:
        ConfigError: what differs, and on which ranks.
    """
    if not dist.is_initialized():
        return
    settings = {key: repr(value) for key, value in by_dotted_key(configuration).items()}
    own = Identity(config=settings, software=software(), device=device_identity(device))
    identities: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(identities, own)
    differences = compare([i.config for i in identities])
    if differences:
        raise ConfigError(
            f"The ranks have different configurations: {'; '.join(differences)}. Start every process with the same "
            "files and overrides; a YAML file may be another one on another node."
        )
    differences = compare([i.software for i in identities])
    if differences:
        raise ConfigError(
            f"The ranks run different software: {'; '.join(differences)}. Use one environment that all nodes see, or "
            "install the same versions on each."
        )
    shared = [ranks for name, ranks in _by_value([i.device for i in identities]).items() if name and len(ranks) > 1]
    if shared:
        raise ConfigError(
            f"{'; '.join(ranks_in_words(ranks).capitalize() for ranks in shared[:MOST_SHOWN])} share one GPU. Start as "
            "many processes per node as it has GPUs, and see that CUDA_VISIBLE_DEVICES shows every process its own or "
            "all of them."
        )


def check_world(
    world: "World",
    directory: Path,
    device: torch.device,
    noise: Sequence[str] = (),
    inputs: Mapping[str, str] | None = None,
) -> None:
    """Ranks communicate rightly, see one run directory, have read the same and draw the noise they should. Collective.

    Args:
        world: the processes, with their groups; on one process nothing is checked.
        directory: the run's.
        device: this rank's; its collectives are those that training uses.
        noise: `noise_digests` of the videos that this rank samples first.
        inputs: digests of what this rank has read from files, by the configuration's keys.

    Raises:
        ConfigError: what is wrong, and on which ranks.
    """
    if world.mesh is None:
        return
    check_collectives(world, device)
    check_shared_folder(world, directory)
    check_inputs(world, inputs or {})
    check_noise(world, noise)


def check_collectives(world: "World", device: torch.device) -> None:
    """Every collective that training uses gives the right numbers on the groups that it uses. ConfigError.

    A group that nothing is sent over, such as that of `dp_shard` alone, is not asked: NCCL would keep memory for it.
    """
    assert world.mesh is not None and world.fsdp_mesh is not None
    asked: dict[str, tuple[dist.ProcessGroup | None, tuple[Check, ...]]] = {
        "all ranks": (dist.group.WORLD, (sums, gathers)),
        "the ranks of a video (sp)": (world.mesh.get_group("sp"), (exchanges, gathers)),
        "the shards of the weights": (world.fsdp_mesh.get_group("shard"), (gathers, scatters_sums)),
        "the replicas of the weights": (world.fsdp_mesh.get_group("replicate"), (sums,)),
    }
    # Every group is asked on every rank before the answers are compared: nobody leaves the others in a collective.
    wrong = [
        f"{check.__name__.replace('_', ' ')} over {name}"
        for name, (group, checks) in asked.items()
        for check in checks
        if not check(group, device)
    ]
    answers = world.gather(wrong)
    failed = [rank for rank, answer in enumerate(answers) if answer]
    if failed:
        raise ConfigError(
            f"Collectives of {device.type} tensors give wrong numbers: {'; '.join(answers[failed[0]])}, as seen by "
            f"{ranks_in_words(failed)}. A GPU, an interconnect or a driver is at fault. Leave that node out, or find "
            "the path with NCCL_DEBUG=INFO and by NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1."
        )


Check = Callable[[dist.ProcessGroup | None, torch.device], bool]


def sums(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether an all-reduce is the sum over the group."""
    value = torch.full((3,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(value, group=group)
    return value.tolist() == [float(sum(rank + 1 for rank in dist.get_process_group_ranks(group)))] * 3


def gathers(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether an all-gather brings every member's tensor to its place."""
    members = dist.get_process_group_ranks(group)
    value = torch.full((2,), float(dist.get_rank()), device=device)
    result = torch.empty(2 * len(members), device=device)
    dist.all_gather_into_tensor(result, value, group=group)
    return result.tolist() == [float(rank) for rank in members for _ in range(2)]


def scatters_sums(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether a reduce-scatter leaves every member the sum of its own part."""
    members = dist.get_process_group_ranks(group)
    parts = torch.arange(len(members), dtype=torch.float32, device=device) + 10.0 * dist.get_rank()
    result = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(result, parts, group=group)
    return result.item() == len(members) * dist.get_rank(group) + 10.0 * sum(members)


def exchanges(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether an all-to-all brings every member's part for this rank, in the order of the members."""
    members = dist.get_process_group_ranks(group)
    own = dist.get_rank()
    parts = torch.tensor([1000.0 * own + rank for rank in members], device=device)
    result = torch.empty_like(parts)
    dist.all_to_all_single(result, parts, group=group)
    return result.tolist() == [1000.0 * rank + own for rank in members]


# ---------------------------------------------------------------------------------------------- files, noise


def check_shared_folder(world: "World", folder: Path) -> None:
    """A file that rank 0 writes into the run's directory is seen by all. ConfigError. Nothing is left behind."""
    token = f".seen-by-all-{secrets.token_hex(8)}"
    failure, created = "", not folder.exists()
    if world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).touch()
        except OSError as error:
            failure = f"output_dir {str(folder)!r} cannot be written by rank 0: {error}. Choose another folder."
    name, failure = world.broadcast((token, failure))
    if failure:
        raise ConfigError(failure)
    deadline = time.monotonic() + SECONDS_TO_SEE_A_FILE
    while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    answers = world.gather((seen, socket.gethostname()))
    if world.is_main:
        (folder / token).unlink()
        if created and not any(folder.iterdir()):
            folder.rmdir()
    blind = [rank for rank, (sees, _) in enumerate(answers) if not sees]
    if blind:
        hosts = ", ".join(sorted({answers[rank][1] for rank in blind})[:MOST_SHOWN])
        raise ConfigError(
            f"output_dir {str(folder)!r} is not the same folder on every node: what rank 0 writes is not seen by "
            f"{ranks_in_words(blind)} (on {hosts}). Put it on a file system that all nodes share; checkpoints need it."
        )


def check_inputs(world: "World", inputs: Mapping[str, str]) -> None:
    """Every rank starts from the same weights and prompts; a path may name other files on another node. ConfigError."""
    differences = compare([{key: digest[:12] for key, digest in own.items()} for own in world.gather(inputs)])
    if differences:
        raise ConfigError(
            f"The ranks have read different files (their digests): {'; '.join(differences)}. Put them on a file system "
            "that all nodes share, or copy them to the nodes again."
        )


def noise_digests(keys: Sequence[NoiseKey]) -> list[str]:
    """What tells the noise of one video from that of another: digests of their first numbers at step 0."""
    return [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in gaussian(keys, 0, (16,))] if keys else []


def check_noise(world: "World", noise: Sequence[str]) -> None:
    """Ranks of one video draw the same noise, and no two videos of the first rollout draw the same. ConfigError."""
    everywhere = world.gather(list(noise))
    for first in range(0, world.size, world.sp):
        members = range(first, first + world.sp)
        if any(everywhere[rank] != everywhere[first] for rank in members):
            raise ConfigError(
                f"{ranks_in_words(members).capitalize()} share the tokens of the same videos (distributed.sp "
                f"{world.sp}), but draw different noise. They must run the same code with the same seed."
            )
    owners: dict[str, list[int]] = {}
    for rank in range(0, world.size, world.sp):
        for digest in everywhere[rank]:
            owners.setdefault(digest, []).append(rank)
    twice = [ranks for ranks in owners.values() if len(ranks) > 1]
    if twice:
        raise ConfigError(
            f"{len(twice)} video(s) of the first rollout would be sampled more than once from the same noise, on "
            f"{ranks_in_words(sorted({rank for ranks in twice for rank in ranks}))}. Noise is a function of the seed, "
            "the prompt's index and the number in its group: two prompts of data.prompts have the same index, or ranks "
            "have been given the same videos."
        )


# ---------------------------------------------------------------------------------------------- what a rank is


def software() -> dict[str, str]:
    """Versions of what computes, and a digest of this package's Python files."""
    found = [find_spec(name) for name in ("sage_fast", "sage_kernels")]
    roots = [Path(spec.origin).parent for spec in found if spec is not None and spec.origin]
    return {
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        **package_versions(),
        "source": source_digest(roots),
    }


def source_digest(roots: Sequence[Path]) -> str:
    """Digest of names and content of the Python files under some folders, wherever those are: 12 hex digits."""
    digest = hashlib.sha256()
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{root.name}/{file.relative_to(root).as_posix()}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def device_identity(device: torch.device) -> str:
    """The GPU that a device is, wherever and under whatever number it is seen; "" for a CPU, which may be shared."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def compare(values: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys in which ranks differ, as "key: 1 (ranks 0-2), 2 (rank 3)"; some of them where there are many."""
    keys = sorted({key for value in values for key in value})
    differences = []
    for key in keys:
        by_value = _by_value([value.get(key, "missing") for value in values])
        if len(by_value) > 1:
            # The common value first.
            groups = sorted(by_value.items(), key=lambda item: -len(item[1]))[:MOST_SHOWN]
            differences.append(f"{key}: " + ", ".join(f"{value} ({ranks_in_words(ranks)})" for value, ranks in groups))
    if len(differences) > MOST_SHOWN:
        return [*differences[:MOST_SHOWN], f"and {len(differences) - MOST_SHOWN} more"]
    return differences


def _by_value(values: Sequence[T]) -> dict[T, list[int]]:
    """Which ranks have which value."""
    result: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        result.setdefault(value, []).append(rank)
    return result


def package_versions() -> dict[str, str]:
    """Installed versions of the packages in ``PACKAGES``, by name."""
    return {name: version for name in PACKAGES if (version := version_of(name)) is not None}


def version_of(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
