"""What every rank is doing, as one rank knows it, and which of them hold the others up. Nothing here communicates.

Ranks work in step: all of them stop soon after one has. So the ones to name are those that have made the least progress
and are not waiting for others themselves.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# States of a rank besides the text of the error it failed with.
RUNNING, FINISHED, FOLLOWED = "running", "finished", "ended after another rank"

MOST_NAMED = 4
"""Ranks that a message describes one by one."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What a rank tells the others.

    Example: `Line(beat=412, counter=96, phase="rollout", done=3, total=8, subject="prompt 12: 'a red fox'",
    where="hunyuan15.py:301 in forward", host="node03 pid:[4026531836]", pid=4711)`
    """

    beat: int = 0
    """Counts the lines: a rank that lives changes it."""
    counter: int = 0
    """Counts steps of progress."""
    phase: str = "start"
    done: int = 0
    total: int = 0
    subject: str = ""
    where: str = ""
    """Innermost line of this package that the main thread is in."""
    waiting: bool = False
    """Whether the main thread is in a collective."""
    state: str = RUNNING
    """RUNNING, FINISHED, FOLLOWED, or the error with which the rank ended."""
    host: str = ""
    """The node, as far as process numbers mean the same there."""
    pid: int = 0

    def doing(self, where: bool = True) -> str:
        """Phase, subject and place as a message has them."""
        step = f" {min(self.done + 1, self.total)}/{self.total}" if self.total > 1 else ""
        notes = [note for note in (self.subject, self.where if where else "") if note]
        return f"phase {self.phase}{step}" + (f" ({'; '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class _Seen:
    """A line and when, by the clock of the rank that reads it, it last changed and last showed progress."""

    line: Line
    heard: float
    moved: float


class RankTable:
    """The last line of every rank.

    Args:
        rank, host: who reads; a rank is not judged by itself, and asks whether a process exists on its own node alone.
        patience: seconds after which a silent rank of this node is asked for.
        unheard: seconds after which a silent rank anywhere counts as dead. (A long call that holds Python's global lock
            silences a rank that lives.)
    """

    def __init__(self, rank: int, host: str, *, patience: float, unheard: float) -> None:
        self.rank, self.host = rank, host
        self.patience, self.unheard = patience, unheard
        self._seen: dict[int, _Seen] = {}

    def update(self, lines: Mapping[int, Line], now: float) -> None:
        """Take over what was read at time `now`, in seconds of any steady clock."""
        for rank, line in lines.items():
            seen = self._seen.get(rank)
            if seen is None:
                self._seen[rank] = _Seen(line, now, now)
            elif seen.line.beat != line.beat:
                self._seen[rank] = _Seen(line, now, now if line.counter != seen.line.counter else seen.moved)

    def __getitem__(self, rank: int) -> Line:
        return self._seen[rank].line

    def __contains__(self, rank: int) -> bool:
        return rank in self._seen

    def failed(self, since: float | None = None) -> list[int]:
        """Ranks that ended with an error of their own, and have been silent since a time."""
        known = (RUNNING, FINISHED, FOLLOWED)
        return [
            rank
            for rank, seen in self._seen.items()
            if rank != self.rank and seen.line.state not in known and (since is None or seen.heard < since)
        ]

    def dead(self, now: float) -> list[int]:
        """Ranks that ended without a word."""
        return [
            rank
            for rank, seen in self._seen.items()
            if rank != self.rank and (self._gone(seen, now) or self._unheard_of(seen, now))
        ]

    def late(self, now: float, timeout: float) -> list[int]:
        """The ranks that hold the others up, once they have made no progress for the timeout."""
        behind = self.furthest_behind()
        return behind if any(now - self._seen[rank].moved > timeout for rank in behind) else []

    def furthest_behind(self) -> list[int]:
        """Running ranks that do not wait in a collective, or all where all do; of these those with least progress."""
        running = {rank: seen.line for rank, seen in self._seen.items() if seen.line.state == RUNNING}
        working = {rank: line for rank, line in running.items() if not line.waiting} or running
        least = min((line.counter for line in working.values()), default=0)
        return [rank for rank, line in working.items() if line.counter == least]

    def describe(self, culprits: Sequence[int], now: float) -> str:
        """One sentence per rank that holds the run up, and who waits."""
        sentences = [self._describe_one(rank, now) for rank in culprits[:MOST_NAMED]]
        if len(culprits) > MOST_NAMED:
            sentences.append(f"The same holds for {ranks_in_words(culprits[MOST_NAMED:])}.")
        others = [r for r, seen in self._seen.items() if r not in culprits and seen.line.state == RUNNING]
        if others and culprits:
            waits = "waits" if len(others) == 1 else "wait"
            sentences.append(
                f"{ranks_in_words(others).capitalize()} {waits} for {'it' if len(culprits) == 1 else 'them'}."
            )
        return " ".join(sentences) or "No rank has told what it is doing."

    def _describe_one(self, rank: int, now: float) -> str:
        seen = self._seen[rank]
        line = seen.line
        process = f"process {line.pid} on {line.host.split(' ')[0]}"
        if line.state not in (RUNNING, FINISHED, FOLLOWED):
            end = "" if line.state.endswith((".", "!", "?")) else "."
            return f"Rank {rank} failed in {line.doing(where=False)}: {line.state}{end}"
        if self._gone(seen, now):
            return f"Rank {rank} is dead ({process}); it was in {line.doing()}."
        if self._unheard_of(seen, now):
            return f"Rank {rank} ({process}) was last heard of {now - seen.heard:.0f} s ago, in {line.doing()}."
        return f"Rank {rank} has been in {line.doing()} for {now - seen.moved:.0f} s."

    def _gone(self, seen: _Seen, now: float) -> bool:
        """Whether the process of a rank of this node no longer exists."""
        line = seen.line
        here = line.host == self.host and line.state == RUNNING
        return here and now - seen.heard > self.patience and not process_exists(line.pid)

    def _unheard_of(self, seen: _Seen, now: float) -> bool:
        return seen.line.state == RUNNING and now - seen.heard > self.unheard


def ranks_in_words(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    numbers = sorted(ranks)
    runs = [
        [number for _, number in run]
        for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def process_exists(pid: int) -> bool:
    """Whether a process of this node runs; one that has ended and was not collected yet does not."""
    try:
        # "pid (name) state ...", and the name may hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not Path("/proc/self").exists()  # without /proc nothing is known, and the rank is waited for
