"""A rank that dies, hangs or fails takes all down in time, and the message names it, its phase and its prompt."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from sage_fast.config.errors import RankFailure
from sage_fast.distributed.failure import rank_table
from sage_fast.distributed.failure.rank_table import FINISHED, FOLLOWED, Line, RankTable, ranks_in_words
from sage_fast.distributed.failure.watchdog import Watchdog, is_communication_error, use_steady_timeout
from sage_fast.distributed.launch import connect_store, end_process, rank, report_error
from tests.distributed.ranks import try_ranks

pytestmark = pytest.mark.slow

SIZE, INTERVAL, TIMEOUT = 3, 0.2, 2.0


@pytest.fixture
def agent() -> Iterator[int]:
    """Port of a store that outlives the ranks, as torchrun's agent hosts one."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield store.port
    del store


@dataclass(frozen=True)
class Ended:
    """How the ranks ended, what all of them printed, and how long after the fault the last one was gone."""

    codes: list[object]
    printed: str
    seconds: float


def run(function: Callable[..., None], folder: Path, port: int | None, *arguments: object) -> Ended:
    results = try_ranks(in_a_run, SIZE, function, folder, port, arguments, timeout=20)
    fault = folder / "fault"
    seconds = time.monotonic() - float(fault.read_text()) if fault.exists() else 0.0
    return Ended([code for _, code in results], (folder / "printed").read_text(), seconds)


def in_a_run(function: Callable[..., None], folder: Path, port: int | None, arguments: tuple[object, ...]) -> None:
    """What the command line does around a run."""
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 2)
    if port is not None:
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    nonce = folder.name
    try:
        store, directory = connect_store(5.0), folder / "watchdog"
        with Watchdog(
            rank(), SIZE, store, timeout=TIMEOUT, nonce=nonce, interval=INTERVAL, directory=directory
        ) as watchdog:
            function(watchdog, *arguments)
    except (RankFailure, ValueError) as error:
        report_error(f"error: {error}")
        end_process(1)
    end_process(0)


def note_fault(watchdog: Watchdog) -> None:
    assert watchdog.directory is not None
    (watchdog.directory.parent / "fault").write_text(str(time.monotonic()))


def train(watchdog: Watchdog, updates: int, culprit: int, phase: str, fault: Callable[[], None]) -> None:
    """Updates of three phases with a collective in each; the culprit meets its fault in one phase of the third."""
    for update in range(updates):
        for name in ("rollout", "reward", "update"):
            watchdog.progress(name, update % 4, 4)
            watchdog.working_on(f"prompt {update}: 'a red fox {rank()}'")
            time.sleep(0.05)
            if update == 2 and rank() == culprit and name == phase:
                time.sleep(2 * INTERVAL)  # long enough for the last line to be written
                note_fault(watchdog)
                fault()
            dist.all_reduce(torch.ones(1))


def hang() -> None:
    time.sleep(60)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("the reward is not finite.")


def go_on() -> None:
    pass


@pytest.mark.parametrize(("culprit", "phase"), [(1, "rollout"), (0, "reward")])
def test_a_hanging_rank_is_named_and_all_end(tmp_path: Path, agent: int, culprit: int, phase: str) -> None:
    ended = run(train, tmp_path, agent, 100, culprit, phase, hang)
    assert ended.codes == [1, 1, 1]
    others = ranks_in_words({0, 1, 2} - {culprit}).capitalize()
    assert f"Rank {culprit} has been in phase {phase} 3/4 (prompt 2: 'a red fox {culprit}')" in ended.printed
    assert f"{others} wait for it." in ended.printed
    assert ended.printed.count("error: ") == 1
    assert "test_watchdog.py" in (tmp_path / "watchdog" / f"stacks_rank_{culprit}.txt").read_text()
    assert TIMEOUT - 1 < ended.seconds < TIMEOUT + 8


@pytest.mark.parametrize(("culprit", "phase"), [(2, "update"), (0, "rollout")])
def test_a_killed_rank_is_named_and_all_end(tmp_path: Path, agent: int, culprit: int, phase: str) -> None:
    ended = run(train, tmp_path, agent, 100, culprit, phase, kill)
    assert sorted(map(str, ended.codes)) == ["-9", "1", "1"]
    assert f"Rank {culprit} is dead (process " in ended.printed
    assert f"it was in phase {phase} 3/4 (prompt 2: 'a red fox {culprit}')" in ended.printed
    assert ended.seconds < 8
    assert ended.printed.count("error: ") == 1


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_whose_watchdog_is_stuck_too_is_ended_by_the_others(tmp_path: Path, agent: int) -> None:
    ended = run(train, tmp_path, agent, 100, 1, "update", freeze)
    assert ended.codes == [1, -9, 1]
    assert "Rank 1 has been in phase update 3/4" in ended.printed
    assert ended.seconds < TIMEOUT + 8


def die_under_torchrun(watchdog: Watchdog) -> None:
    """Rank 1 dies, and the others are told to end, as torchrun does a moment later."""
    assert watchdog.directory is not None
    pids = watchdog.directory.parent / "pids"
    with pids.open("a") as file:
        file.write(f"{os.getpid()}\n")
    dist.barrier()
    watchdog.progress("reward", 0, 2)
    time.sleep(2 * INTERVAL)
    if rank() == 1:
        others = [int(pid) for pid in pids.read_text().split() if int(pid) != os.getpid()]
        if os.fork() == 0:
            os.closerange(3, 1000)  # the connections are those of the rank, and close when it dies
            time.sleep(0.15)
            for other in others:
                os.kill(other, signal.SIGTERM)
            os._exit(0)
        kill()
    dist.barrier()


def test_who_is_told_to_end_still_says_why(tmp_path: Path, agent: int) -> None:
    ended = run(die_under_torchrun, tmp_path, agent)
    assert ended.codes == [1, -9, 1]
    assert "Rank 1 is dead" in ended.printed and "phase reward 1/2" in ended.printed


def wait_alone(watchdog: Watchdog) -> None:
    """A rank dies while the others wait where no error comes from: what NCCL does to its peers."""
    watchdog.progress("rollout", 0, 2)
    time.sleep(3 * INTERVAL)
    if rank() == 1:
        note_fault(watchdog)
        kill()
    time.sleep(60)


def test_a_killed_rank_is_found_where_no_collective_fails(tmp_path: Path, agent: int) -> None:
    ended = run(wait_alone, tmp_path, agent)
    assert ended.codes == [1, -9, 1]
    assert "Rank 1 is dead" in ended.printed and "phase rollout 1/2" in ended.printed
    assert not (tmp_path / "watchdog").exists()  # the stacks of those who wait tell nothing
    assert ended.seconds < 8


def test_a_failed_rank_speaks_for_itself(tmp_path: Path, agent: int) -> None:
    ended = run(train, tmp_path, agent, 100, 1, "reward", fail)
    assert ended.codes == [1, 1, 1]
    assert "[rank 1] error: the reward is not finite." in ended.printed
    assert "Rank 1 failed in phase reward 3/4 (prompt 2: 'a red fox 1'): ValueError: the reward is not" in ended.printed


def test_the_rank_that_hosts_the_store_dies(tmp_path: Path) -> None:
    """As under srun: with the store the table is gone, but what it said last is remembered."""
    ended = run(train, tmp_path, None, 100, 0, "rollout", kill)
    assert ended.codes == [-9, 1, 1]
    # Its store may outlive its main thread for a moment, in which the others see that the process has ended.
    assert re.search(
        r"Rank 0(, which hosts the store, is gone\. It| is dead .*; it) was in phase rollout 3/4 \(prompt 2",
        ended.printed,
    )


@pytest.mark.parametrize("hosted", [True, False])
def test_a_sound_run_ends_in_silence(tmp_path: Path, agent: int, hosted: bool) -> None:
    ended = run(train, tmp_path, agent if hosted else None, 4, 1, "rollout", go_on)
    assert ended.codes == [0, 0, 0]
    assert ended.printed == ""


def start_slowly(watchdog: Watchdog) -> None:
    watchdog.timeout = 60.0
    watchdog.progress("start")
    time.sleep(TIMEOUT)
    use_steady_timeout(watchdog, 1.0)
    time.sleep(0 if rank() else 60)


def test_the_start_may_take_longer_and_what_follows_may_not(tmp_path: Path, agent: int) -> None:
    ended = run(start_slowly, tmp_path, agent)
    assert ended.codes == [1, 0, 0]
    assert "Rank 0 has been in phase start (test_watchdog.py" not in ended.printed
    assert "Rank 0 has been in phase start for" in ended.printed


def lower(seconds: float) -> float:
    """How long a collective that nobody joins waits after the timeout was lowered."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sage_fast.distributed.failure.watchdog.SLACK", 0.0)
        use_steady_timeout(Watchdog(rank(), 2, None, timeout=60.0), seconds)
    start = time.monotonic()
    if rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        assert is_communication_error(caught.value)
    else:
        time.sleep(seconds + 1)
    end_process(0 if time.monotonic() - start < 10 else 3)


def test_process_groups_wait_no_longer_than_the_steady_timeout() -> None:
    assert try_ranks(lower, 2, 0.5, timeout=20) == [("gone", 0), ("gone", 0)]


def test_what_nccl_has_recorded_is_kept_beside_the_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = Watchdog(3, 8, None, timeout=1.0, directory=tmp_path / "failure")
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"trace", raising=False)
    for variable, kept in (("0", False), ("2000", True)):
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", variable)
        watchdog._dump()
        assert (tmp_path / "failure" / "nccl_trace_rank_3").exists() == kept
    assert (tmp_path / "failure" / "nccl_trace_rank_3").read_bytes() == b"trace"


def test_an_error_of_the_model_is_no_error_of_communication() -> None:
    assert not is_communication_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_communication_error(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_communication_error(dist.DistBackendError("NCCL error"))
    gloo = "[.../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    assert is_communication_error(RuntimeError(gloo))


# ---------------------------------------------------------------------------------------------- the table


def table(*lines: Line, now: float = 0.0) -> RankTable:
    result = RankTable(0, "here", patience=1.5, unheard=60.0)
    result.update(dict(enumerate(lines)), now)
    return result


BUSY = Line(beat=1, counter=7, phase="rollout", total=8, host="there x", pid=1, subject="prompt 3: 'a fox'")


def test_who_waits_in_a_collective_is_not_late() -> None:
    seen = table(replace(BUSY, counter=9), replace(BUSY, counter=8), replace(BUSY, counter=5, waiting=True))
    assert seen.late(10.0, timeout=20.0) == []
    assert seen.late(21.0, timeout=20.0) == [1]


def test_all_are_named_when_all_wait() -> None:
    seen = table(*[replace(BUSY, waiting=True)] * 6)
    text = seen.describe(seen.late(31.0, timeout=30.0), 31.0)
    assert text.startswith("Rank 0 has been in phase rollout 1/8 (prompt 3: 'a fox') for 31 s. Rank 1 has")
    assert text.endswith("The same holds for ranks 4-5.")


def test_progress_begins_the_time_anew_and_a_beat_does_not() -> None:
    seen = table(BUSY, BUSY)
    seen.update({0: replace(BUSY, beat=2), 1: replace(BUSY, beat=2)}, 15.0)
    assert seen.late(21.0, timeout=20.0) == [0, 1]
    seen.update({1: replace(BUSY, beat=3, counter=8)}, 20.0)
    assert seen.late(21.0, timeout=20.0) == [0]
    seen.update({0: replace(BUSY, beat=3, counter=8)}, 20.5)
    assert seen.late(21.0, timeout=20.0) == []


def test_a_rank_of_another_node_is_dead_when_it_was_not_heard_of_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_table, "process_exists", lambda pid: pid != 99)
    here = Line(beat=1, host="here", pid=99)
    seen = table(here, replace(BUSY, pid=99), here, replace(here, pid=98))
    assert seen.dead(1.0) == []
    assert seen.dead(2.0) == [2]  # on this node, and its process is gone
    assert seen.dead(61.0) == [1, 2, 3]
    assert "Rank 1 (process 99 on there) was last heard of 61 s ago, in phase rollout" in seen.describe([1], 61.0)
    assert seen.describe([2], 61.0).startswith("Rank 2 is dead (process 99 on here); it was in phase start.")


def test_who_has_finished_is_neither_dead_nor_late() -> None:
    seen = table(replace(BUSY, state=FINISHED), replace(BUSY, state=FOLLOWED), BUSY)
    assert seen.dead(59.0) == [] and seen.failed() == []
    assert seen.late(100.0, timeout=20.0) == [2]


def test_a_failed_rank_is_given_time_to_end_the_others_collectives() -> None:
    seen = table(BUSY, replace(BUSY, state="RewardError: no answer"), now=5.0)
    assert seen.failed() == [1]
    assert seen.failed(since=5.0) == [] and seen.failed(since=6.0) == [1]
    assert seen.describe([1], 9.0) == (
        "Rank 1 failed in phase rollout 1/8 (prompt 3: 'a fox'): RewardError: no answer. Rank 0 waits for it."
    )


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_a_process_that_ended_and_was_not_collected_does_not_exist() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not rank_table.process_exists(child)
    os.waitpid(child, 0)
    assert rank_table.process_exists(os.getpid())
