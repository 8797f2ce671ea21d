"""How the processes of a run were started, and how they speak to the user as one.

torchrun describes each process in its environment, and torch reads it from there: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT. `srun` with one task per GPU describes it in variables of its
own, which `adopt_slurm` translates. Nothing here needs a process group.
"""

import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from sage_fast.config.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

logger = logging.getLogger(__name__)

SECONDS_TO_CONNECT = 2.0
SECONDS_FOR_RANK_0 = 1.5
"""How long another rank's error waits for rank 0 to report the same one."""
STARTED = time.time()
STAYS_AWAY = "sage_fast/meeting/stays_away"


def rank() -> int:
    """This process among all of the run; 0 where no launcher has started it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process among those of its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


# ---------------------------------------------------------------------------------------------- SLURM


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Describe a task of `srun` as torchrun would have; True where it did so.

    Acts where RANK is not set and the process belongs to a SLURM step of several tasks. (The shell of a batch script or
    of `salloc` belongs to none, although it has SLURM_NTASKS.) MASTER_ADDR and MASTER_PORT that are set are kept; else
    the address is the step's first node and the port follows from the job's number.

    Raises:
        ConfigError: SLURM's variables are incomplete or cannot be read.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in environment or tasks == 1:
        return False
    try:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        # SLURM numbers the tasks of a node together unless told to deal them out, which LOCAL_RANK does not mind.
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]
        node, local = int(environment["SLURM_NODEID"]), environment["SLURM_LOCALID"]
        described = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": str(tasks),
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": str(expand_counts(per_node)[node]),
            "GROUP_RANK": str(node),
        }
        job = int(environment["SLURM_JOB_ID"])
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"This is a SLURM step of {tasks} tasks, but its environment cannot be read ({type(error).__name__}: "
            f"{error}). Start the run by srun with one task per GPU, or one torchrun per node; "
            "configs/launch/slurm.sbatch is an example."
        ) from error
    described |= {
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        # The range is above the registered ports and below those that the system gives out.
        "MASTER_PORT": environment.get("MASTER_PORT") or str(12000 + job % 20000),
    }
    environment.update(described)
    return True


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: "node[03-05,09],login1" -> "node03".

    `scontrol show hostnames` is asked where it is installed; it knows forms that are not parsed here.
    """
    import subprocess  # here, because every command imports this file

    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=20
        )
        names = answer.stdout.split()
    except (OSError, subprocess.SubprocessError):
        names = expand_hosts(nodes)
    return names[0]


def expand_hosts(nodes: str) -> list[str]:
    """Names in a SLURM node list: "node[01-03,07],gpu1" -> ["node01", "node02", "node03", "node07", "gpu1"].

    Raises:
        ValueError: brackets that are not closed, or a range that is none.
    """
    # A comma separates hosts only outside brackets.
    words = [word for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes) if word]
    if ",".join(words) != nodes:
        raise ValueError(f"the node list {nodes!r} cannot be read")
    hosts: list[str] = []
    for word in words:
        hosts += _expand_host(word)
    return hosts


def _expand_host(word: str) -> list[str]:
    bracket = re.search(r"\[([^\]]*)\]", word)
    if bracket is None:
        return [word]
    head, tail = word[: bracket.start()], word[bracket.end() :]
    numbers: list[str] = []
    for part in bracket[1].split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if bounds is None:
            raise ValueError(f"{part!r} in the node list {word!r} is neither a number nor a range")
        first, last = bounds[1], bounds[2] or bounds[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [name for number in numbers for name in _expand_host(head + number + tail)]


def expand_counts(counts: str) -> list[int]:
    """SLURM's tasks per node: "8(x2),4" -> [8, 8, 4]."""
    result: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{part!r} in {counts!r} is no number of tasks")
        result += [int(match[1])] * int(match[2] or 1)
    return result


# ---------------------------------------------------------------------------------------------- device, restarts


def rank_device(name: str) -> "torch.device":
    """The device of this rank for `model.device`; a GPU becomes the current one.

    `auto` and `cuda` are the GPU of this rank's number on its node, or the only one that it sees; `auto` is the CPU
    where there is no GPU. On a CPU nothing is changed, threads included.

    Raises:
        ConfigError: more processes than GPUs, one GPU named for several processes, or a device torch cannot use.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.empty(0, device=device)
            return device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.device is {name!r}, which torch cannot use here: {error}. Use auto or cpu."
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError(
            f"model.device is {name!r}, but torch sees no GPU on {os.uname().nodename}. Use cpu, or see that the "
            "driver and a CUDA build of torch are installed on every node."
        )
    count, local = torch.cuda.device_count(), local_rank()
    names_one = ":" in name
    if names_one and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"model.device is {name!r}, but every process needs a GPU of its own. Use auto or cuda; "
            "CUDA_VISIBLE_DEVICES limits which GPUs are taken."
        )
    if not names_one:
        # A scheduler that binds GPUs to tasks shows each task its own, as number 0. Whether two tasks were bound to
        # the same one is asked by the self-check.
        bound = count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
        device = torch.device("cuda", 0 if bound else local)
    if device.index >= count:
        raise ConfigError(
            f"{os.uname().nodename} has {count} GPU(s) to give, but {device} was asked for: every process needs one "
            f"of its own. Start at most {count} per node, as by torchrun --nproc_per_node={count}, or set model.device "
            "to cpu."
        )
    torch.cuda.set_device(device)
    return device


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has restarted the processes, or SLURM has requeued the job."""
    return sum(int(environment.get(key, "0")) for key in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def effective_resume(resume: str, environment: Mapping[str, str] = os.environ) -> str:
    """`resume` of the configuration; in a restarted job `none` and `restart` become `auto`, for the run has begun."""
    restarts = restart_count(environment)
    if resume not in ("none", "restart") or not restarts:
        return resume
    logger.info("Restart %d of this job: going on with the run, as with --resume auto.", restarts)
    return "auto"


# ---------------------------------------------------------------------------------------------- speaking as one


def configure_logging() -> None:
    """Log to stderr: everything from rank 0; warnings and errors from the others, with their rank before them."""
    level, who = (logging.INFO, "") if rank() == 0 else (logging.WARNING, f"[rank {rank()}] ")
    logging.basicConfig(level=level, format=f"{who}%(levelname)s %(message)s", stream=sys.stderr)


def report_error(message: str) -> None:
    """Print an error that ends this process, once for all ranks that meet the same one.

    Rank 0 prints at once. Another rank waits a moment for rank 0 to report the same message, and prints it with its
    rank before it when that does not happen and no other rank has printed it. Messages are compared in the store of
    the launcher, so that this works before a process group exists and after one has broken. Where no store answers, as
    under `srun` before the processes have met, rank 0 and the first rank of every other node print; once they have met
    (so that what hosts the store is gone), every rank does.
    """
    me = rank()
    text = message if me == 0 else f"[rank {me}] {message}"
    if world_size() == 1 or _is_first_to_report(message):
        print(text, file=sys.stderr, flush=True)


def _is_first_to_report(message: str) -> bool:
    import torch.distributed as dist

    me, key = rank(), f"sage_fast/error/{restart_count()}/{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    try:
        store = connect_store(SECONDS_TO_CONNECT)
        if me == 0:
            return store.add(key, 1) == 1
        deadline = time.monotonic() + SECONDS_FOR_RANK_0
        while time.monotonic() < deadline:
            if store.check([key]):
                return False
            time.sleep(0.1)
        return store.add(key, 1) == 1
    except dist.DistError:
        return me == 0 or local_rank() == 0 or dist.is_initialized()


def connect_store(timeout_seconds: float) -> "TCPStore":
    """A connection of its own to the store that the processes meet in.

    Under torchrun the agent of the first node hosts it, and it outlives every process of the run; else rank 0 does. The
    connection that torch.distributed has must not be shared with a thread: an operation that waits holds it.

    Raises:
        torch.distributed.DistError: nobody answers within the timeout.
    """
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]  # torch does not say that it exports it
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )


def stay_away() -> None:
    """Tell ranks that may wait in `meeting_place` that this one has ended with an error and will not come.

    Its launcher ends the others of its node; those of other nodes would wait for the timeout.
    """
    from torch import distributed as dist

    if dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    try:
        store = connect_store(SECONDS_TO_CONNECT)
        # The first one is the cause.
        if _who_stays_away(store) is None:
            store.set(STAYS_AWAY, f"{rank()} {time.time()}")
    except dist.DistError:
        return


def _who_stays_away(store: "TCPStore") -> int | None:
    """The rank that has said so in this attempt: torchrun ends all processes before it starts new ones."""
    if not store.check([STAYS_AWAY]):
        return None
    absent, moment = store.get(STAYS_AWAY).decode().split()
    return int(absent) if float(moment) > STARTED else None


def meeting_place(timeout_seconds: float) -> dict[str, Any]:
    """Where `init_process_group` is to meet: its `store`, `rank` and `world_size`, or nothing for what it finds itself.

    torchrun's agent keeps one store through all restarts (pytorch issue 135712), and a process that meets there may be
    sent to the address of one that has died. So the ranks agree on a name that no earlier attempt has used: each calls
    itself by a random word, rank 0 says which words it has heard together with its own, and repeats until everybody
    has answered to the list in which they are. (The number of the restart would not do: nodes count for themselves.)

    Raises:
        ConfigError: not all ranks came within the timeout, or one has ended with an error before.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    from torch import distributed as dist

    me, size, word = rank(), world_size(), os.urandom(8).hex()
    store = connect_store(timeout_seconds)
    deadline = time.monotonic() + timeout_seconds
    keys = [f"sage_fast/meeting/{number}" for number in range(size)]
    store.set(keys[me], word)
    while True:
        if me == 0:
            present = [number for number in range(size) if store.check([keys[number]])]
            words = [answer.decode() for answer in store.multi_get([keys[number] for number in present])]
            name = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]
            store.set("sage_fast/meeting", f"{name} {' '.join(words)}")
            answered = [number for number in range(1, size) if store.check([f"sage_fast/meeting/{name}/{number}"])]
            if len(answered) == size - 1:
                store.set(f"sage_fast/meeting/{name}/complete", "")
                break
        elif store.check(["sage_fast/meeting"]):
            name, *words = store.get("sage_fast/meeting").decode().split()
            if word in words:
                store.set(f"sage_fast/meeting/{name}/{me}", "")
                # Not before: the list may still hold the word of a process that is no more.
                if store.check([f"sage_fast/meeting/{name}/complete"]):
                    break
        absent = _who_stays_away(store)
        if absent is not None:
            raise ConfigError(
                f"Rank {absent} has ended before the {size} processes met; its own message says why. Start every "
                "process with the same files and overrides, in the same environment."
            )
        if time.monotonic() > deadline:
            missing = f"{size - 1 - len(answered)} of them did not answer" if me == 0 else "not all of them answered"
            raise ConfigError(
                f"{size} processes were to meet at {os.environ['MASTER_ADDR']} within {timeout_seconds:.0f} s "
                f"(distributed.startup_timeout_seconds), but {missing}. See that every node has started its processes."
            )
        time.sleep(0.05)
    return {"store": dist.PrefixStore(f"sage_fast/{name}", store), "rank": me, "world_size": size}  # type: ignore[attr-defined]


def end_process(status: int) -> NoReturn:
    """Leave now, without waiting for threads, other ranks or the GPU; child processes are ended too.

    After a failure the ordinary way out may wait for collectives that nobody will answer.
    """
    from multiprocessing import active_children  # here, because every command imports this file

    for child in active_children():
        child.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
