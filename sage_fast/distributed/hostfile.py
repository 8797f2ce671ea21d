"""What torchrun needs to know on each node, from a hostfile: `python -m sage_fast.distributed.hostfile HOSTFILE`.

    # hostfile, as DeepSpeed and Open MPI read it
    node01 slots=8
    node02 slots=8

The first host is the one where the processes meet. Printed are lines for a shell's `eval`:

    NNODES=2
    NODE_RANK=0
    NPROC_PER_NODE=8
    MASTER_ADDR=node01
"""

import argparse
import re
import shlex
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_fast.config.errors import ConfigError
from sage_fast.config.text_files import read_text


class HostfileError(ValueError):
    """The hostfile cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Host:
    """A line of the file. Example: `Host("node01", 8)`"""

    name: str
    slots: int | None
    """Processes on this host; None where the line does not say."""


@dataclass(frozen=True, kw_only=True)
class NodeLaunch:
    """What torchrun is told on one node."""

    nnodes: int
    node_rank: int
    nproc_per_node: int
    master_addr: str

    def shell(self) -> str:
        """Assignments for `eval`."""
        values = {
            "NNODES": self.nnodes,
            "NODE_RANK": self.node_rank,
            "NPROC_PER_NODE": self.nproc_per_node,
            "MASTER_ADDR": self.master_addr,
        }
        return "\n".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file, in its order. Comments, empty lines and Open MPI's `max_slots=` are passed over.

    Raises:
        HostfileError: the file is missing, empty, has a line that cannot be read or a host twice.
    """
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise HostfileError(f"the hostfile {str(path)!r} cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise HostfileError(f"the hostfile cannot be read: {error}") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *options = words
        slots = None
        for option in options:
            match = re.fullmatch(r"(slots|max_slots|max-slots)=([0-9]{1,6})", option)
            if match is None or "=" in name or int(match[2]) < 1:
                raise HostfileError(f'{path}:{number}: {line.strip()!r} cannot be read; write "HOST slots=GPUS"')
            if match[1] == "slots":
                slots = int(match[2])
        if name in [host.name for host in hosts]:
            raise HostfileError(f"{path}:{number}: {name} stands there twice; give all its GPUs in one line")
        hosts.append(Host(name, slots))
    if not hosts:
        raise HostfileError(f'{path} names no host; write a line "HOST slots=GPUS" for each')
    return hosts


def plan_node(hosts: Sequence[Host], names: Collection[str], gpus: int | None = None) -> NodeLaunch:
    """What the node that answers to `names` is to start.

    Args:
        hosts: all nodes.
        names: names and addresses of this one.
        gpus: processes per node where the file does not say.

    Raises:
        HostfileError: this node is none of the hosts, or they do not have the same number of slots.
    """
    slots = {gpus if host.slots is None else host.slots for host in hosts}
    if None in slots:
        raise HostfileError('some hosts have no number of GPUs; write "HOST slots=GPUS", or give --slots')
    if len(slots) > 1:
        counts = ", ".join(f"{host.name} slots={gpus if host.slots is None else host.slots}" for host in hosts)
        raise HostfileError(f"the hosts have different numbers of slots ({counts}); torchrun wants one for all")
    short = {name.split(".")[0] for name in names if not _is_address(name)}
    mine = [
        number
        for number, host in enumerate(hosts)
        if host.name in names or (not _is_address(host.name) and host.name.split(".")[0] in short)
    ]
    if len(mine) != 1:
        known = "none" if not mine else "several"
        raise HostfileError(
            f"{known} of the hosts {', '.join(host.name for host in hosts)} is this node, which answers to "
            f"{', '.join(sorted(names))}; write the name that `hostname` prints here, or give --node_rank"
        )
    return NodeLaunch(nnodes=len(hosts), node_rank=mine[0], nproc_per_node=slots.pop() or 1, master_addr=hosts[0].name)


def own_names() -> set[str]:
    """Names and addresses of this node."""
    names = {socket.gethostname(), socket.getfqdn()}
    for name in list(names):
        try:
            names |= {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
        except OSError:
            continue
    # A name that resolves to the loopback device says nothing: so does every other node's.
    return {name for name in names if not name.startswith("127.") and name not in ("::1", "localhost")}


def _is_address(name: str) -> bool:
    return ":" in name or re.fullmatch(r"[\d.]+", name) is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the assignments; 2 with a message on stderr when the file cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_fast.distributed.hostfile",
        description="Print what torchrun needs to know on this node, as shell assignments.",
    )
    parser.add_argument("hostfile", type=Path)
    parser.add_argument("--slots", type=int, help="processes per node, where the file does not say")
    parser.add_argument("--node_rank", type=int, help="which line this node is, from 0; default: found by its name")
    options = parser.parse_args(arguments)
    try:
        hosts = read_hostfile(options.hostfile)
        names = own_names()
        if options.node_rank is not None:
            if not 0 <= options.node_rank < len(hosts):
                raise HostfileError(f"--node_rank is {options.node_rank}, but there are {len(hosts)} hosts")
            names = {hosts[options.node_rank].name}
        print(plan_node(hosts, names, options.slots).shell())
    except HostfileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
