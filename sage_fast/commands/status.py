"""Show whether runs are alive, with their update, reward and time left.

examples:
  sage-fast status runs                     every run in a folder
  sage-fast status runs/demo runs/mine
  sage-fast status runs --json              for a script
  sage-fast status runs --acknowledge       what is wrong now has been seen; it is not shown again
  watch -n 10 sage-fast status runs

state     running   it makes progress
          hangs     its process is alive but has made no progress for at least a minute and for four times its longest
                    previous pause; until the first update is done, for half an hour
          killed    its process is gone and left no error
          failed    an error has ended it, which is below the table
          stopped   on request; --resume auto continues
          finished
          unknown   it has no status, or none that can be read
          ..., worse  the last paired evaluation is more than 3 standard errors below update 0; since when, and which
                    checkpoint is the best, is below the table

Exit status: 1 if a run hangs, was killed, has failed or got worse, else 0. Nothing is
written, except by --acknowledge.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sage_fast.config.errors import ConfigError, printable

if TYPE_CHECKING:
    from sage_fast.run.run_status import RunState
USAGE = "RUN [RUN ...] [--json] [--acknowledge]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    # Named as the run directories and files of the other commands, for the words that
    # argparse leaves over.
    parser.add_argument(
        "config", nargs="+", metavar="RUN", help="run directory, or a folder of them"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the runs as a JSON list"
    )
    parser.add_argument(
        "--acknowledge",
        action="store_true",
        help="note in every run that its state has been seen; exit status 0",
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the table; 1 where a run needs somebody's attention."""
    from dataclasses import asdict

    from sage_fast.run.directory import RunDirectory
    from sage_fast.run.run_status import look_at_run

    runs = find_runs([Path(name) for name in options.config])
    if options.acknowledge:
        for run in runs:
            RunDirectory(run).acknowledged.touch()
    states = [look_at_run(run) for run in runs]
    if options.json:
        print(
            json.dumps(
                [{**asdict(state), "run": str(state.run)} for state in states], indent=1
            )
        )
    else:
        print(printable(to_text(states)))
    return int(any(state.needs_attention for state in states))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories among the paths, and those in the folders among them.

    Raises:
        ConfigError: a path is neither.
    """
    from sage_fast.run.directory import EXPORT_RECORD, RunDirectory

    def is_run(path: Path) -> bool:
        return RunDirectory(path).is_run and not (path / EXPORT_RECORD).exists()

    runs: list[Path] = []
    for path in paths:  # a shell's runs/* may match other things beside runs
        runs += [path] if is_run(path) else sorted(filter(is_run, path.glob("*/")))
    if not runs:
        given = ", ".join(map(str, paths))
        raise ConfigError(
            f"{given}: there is no run directory (with a config.yaml), and none inside."
        )
    return runs


def to_text(states: Sequence["RunState"]) -> str:
    """The table, and below it what has ended a run or what to do about it."""
    head = (
        "run",
        "state",
        "update",
        "phase",
        "reward",
        "gain",
        "left",
        "last progress",
    )
    rows = [head, *(_cells(state) for state in states)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    told = [state for state in states if not state.acknowledged]
    notes = [note for state in told if (note := _note(state))]
    return "\n".join(
        [
            *lines,
            *notes,
            *(f"{state.run}: {state.worse}" for state in told if state.worse),
        ]
    )


def _cells(state: "RunState") -> tuple[str, ...]:
    from sage_fast.run.run_status import format_seconds

    status = state.status
    if status is None:
        return (str(state.run), state.condition, *[""] * 6)
    going = state.condition in ("running", "hangs", "killed")
    if state.quiet_seconds is None:
        quiet = ""
    else:
        quiet = f"{format_seconds(state.quiet_seconds)} ago"
    return (
        str(state.run),
        f"{state.condition}, worse" if state.worse else state.condition,
        f"{status.update}/{status.num_updates}"
        if status.num_updates
        else str(status.update),
        f"{status.phase} {status.done}/{status.total}" if going else "",
        "" if status.reward is None else f"{status.reward:.4g}",
        "" if status.gain is None else f"{status.gain:+.3g}",
        format_seconds(status.seconds_left)
        if state.condition == "running" and status.seconds_left
        else "",
        quiet,
    )


def _note(state: "RunState") -> str:
    """A line on a run that needs attention."""
    from sage_fast.run.run_status import command_for

    if state.condition == "failed" and state.status is not None:
        return (
            f"{state.run}: "
            f"{(state.status.error or '').splitlines()[0] if state.status.error else 'failed'}"
        )
    if state.condition == "killed":
        command = command_for(state.run, state.status, "train", "--resume", "auto")
        return (
            f"{state.run}: the process is gone and left no error; this continues:\n  "
            f"{command}"
        )
    if state.condition == "hangs":
        return f"{state.run}: no progress, but alive: {state.holder or 'its process'}"
    return ""
