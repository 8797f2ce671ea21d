"""How the GPUs of a plan share the work: degrees, who talks to whom, and through which
fabric.

Ranks are numbered as in `sage_fast.distributed.world`, (replica * shard + position) *
sp + share, and eight are a node.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig, check_batch
from sage_fast.config.sections import DistributedConfig, RolloutConfig, check_heads

NODE_SIZE = 8
"""GPUs of a node that NVLink connects."""

CHANNELS = 32
NETWORK_CHANNELS = 2
"""Channels of a communicator, and of an exchange with a rank of another node. NCCL
takes two per NVLink as a power of two: 32 were seen between each two of eight H100s
(NVIDIA/nccl, issue 1685); two per peer is its default over a network. Other GPUs are
assumed to have as many.
"""

CONNECTION = 12 * 2**20
"""Bytes of GPU memory for one peer and channel, to receive and to send: the 10 MiB and
2 MiB that the issue lists. The former is NCCL_BUFFSIZE of 4 MiB, 4.7 MiB of protocol
LL128 and 0.5 MiB of LL (defaults in src/init.cc), rounded up.
"""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that take part in a collective.

    ranks: how many. nodes: most nodes that one such group lies on. local: fewest of its
    ranks on a node that has any, which is the number of network adapters that carry
    what leaves that node.

    Example: the 16 ranks that share weights over two nodes are `Group(ranks=16,
    nodes=2, local=8)`.
    """

    ranks: int
    nodes: int
    local: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of a run. `Layout()` is one GPU.

    Example: `Layout(replicate=8, shard=4, sp=2)` are 64 GPUs: 32 videos at a time,
    weights shared by 8 ranks.
    """

    replicate: int = 1
    shard: int = 1
    sp: int = 1
    node: int = NODE_SIZE

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.sp

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of `sp` ranks, with different videos."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """Ranks over which FSDP shards the weights: the ranks of a video share them
        like others.
        """
        return self.shard * self.sp

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups that communicate, by name; of those of a name the worst case."""
        gpus = self.gpus
        sp = self.sp
        shards = self.weight_shards
        # Ranks of a video are neighbours, and so are those that share weights; replicas
        # are a stride apart.
        members = {
            "sp": [range(first, first + sp) for first in range(0, gpus, sp)],
            "weights": [
                range(first, first + shards) for first in range(0, gpus, shards)
            ],
            "replicas": [range(first, gpus, shards) for first in range(shards)],
            "all": [range(gpus)],
        }
        groups = {}
        for name, found in members.items():
            on_nodes = [
                Counter(rank // self.node for rank in ranks).values() for ranks in found
            ]
            local = min(min(counts) for counts in on_nodes)
            groups[name] = Group(
                ranks=len(found[0]), nodes=max(map(len, on_nodes)), local=local
            )
        return groups

    @property
    def communication_buffers(self) -> float:
        """Bytes that NCCL keeps on each GPU, from the first collective on; assumed,
        from its defaults.

        Each group of several ranks is a communicator, with a ring and a tree: two
        neighbours in both. An all-to-all, within `sp`, has a connection to every peer.
        NVLink SHARP's buffers are not counted.
        """
        communicators = sum(group.ranks > 1 for group in self.groups.values())
        videos = self.groups["sp"]
        to_peers = CHANNELS * (videos.local - 1) + NETWORK_CHANNELS * (
            videos.ranks - videos.local
        )
        return float(CONNECTION * (2 * CHANNELS * communicators + to_peers))


def least_gpus(section: DistributedConfig, rollout: RolloutConfig) -> int:
    """The fewest GPUs that the degrees of a configuration fit, and on which a rollout
    has complete groups.
    """
    known = (section.dp_replicate or 1) * (section.dp_shard or 1) * section.sp
    if section.dp_replicate is not None and section.dp_shard is not None:
        return known
    # A degree of null takes what is more than that.
    videos = rollout.batch_size * known // section.sp
    # The smallest multiple of `known` whose videos are a multiple of a group.
    return known * rollout.num_generations // gcd(videos, rollout.num_generations)


def plan_layout(config: RunConfig, gpus: int, heads: int, tokens: int) -> Layout:
    """The degrees of a run on `gpus` GPUs.

    Args:
        heads: attention heads of the model.
        tokens: video tokens of a sample.

    Raises:
        ConfigError: the degrees or the batch do not fit the number of GPUs, the heads
            or the tokens.
    """
    section = config.distributed
    rollout = config.rollout
    if section.zero_stage is not None:
        raise ConfigError(
            f"distributed.zero_stage is {section.zero_stage}, and the plan knows how "
            "FSDP2 shards: --distributed.zero_stage=null."
        )
    try:
        replicate, shard, sp = section.degrees(gpus, config.training.mode)
    except ValueError as error:
        raise ConfigError(f"{error} For a plan, --gpus says how many.") from error
    check_heads(sp, heads)
    if tokens < sp:
        raise ConfigError(
            f"distributed.sp is {sp}, but a video has {tokens} tokens, fewer than the "
            "ranks that would share them. Set it to 1, or make the video larger."
        )
    check_batch(rollout.batch_size, replicate * shard, rollout.num_generations)
    return Layout(replicate=replicate, shard=shard, sp=sp)
