"""A run loses nothing, whatever a file system does to it.

Two checkpoints are written while, at every single file-system call, the process is
killed or the call fails. The run is then resumed, and has to end with what an
undisturbed run ends with, bit for bit: weights, optimizer, averaged weights, anchor,
adapter, metrics and evaluations.

The cases of a test share the calls. Of calls of one kind, such as the renaming of a
checkpoint, the last goes wrong, in one of the cases. With SAGE_TEST_ALL_FAULTS=1 every
call goes wrong in every case, which takes six times as long (`make test-faults`).
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sage_fast.checkpoint.folder import list_checkpoints, verify_checkpoint
from sage_fast.models.toy.components import TRANSFORMER_CONFIG
from tests import made_runs
from tests.conftest import TINY, TINY_RUN, write_tiny_model
from tests.invariants.faults import WARM_UP, FaultServer, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ERRORS = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EACCES)
SAVING = ("foreground", "background")


ALL = "SAGE_TEST_ALL_FAULTS" in os.environ


def kind(event: str) -> str:
    """Operation and path of a call without numbers and random names: "rename
    /checkpoints/update-#".
    """
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", event)


def calls(events: Sequence[str], case: int, cases: int) -> Iterable[int]:
    """Numbers of the file-system calls that go wrong in one of the cases of a test.

    Args:
        events: the calls of an undisturbed run. The last of a kind meets the most files
            that are there already.
    """
    if ALL:
        return itertools.count(1)
    return sorted(
        {kind(event): number for number, event in enumerate(events, 1)}.values()
    )[case::cases]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    with FaultServer(tmp_path_factory.mktemp("server")) as running:
        yield running


class Trial:
    """Runs of one small configuration in one folder after another."""

    def __init__(self, server: FaultServer, scratch: Path, saving: str) -> None:
        self.server = server
        self.folder = scratch / "run"
        model = scratch / "model"
        model.mkdir()
        write_tiny_model(model, TRANSFORMER_CONFIG | TINY | {"num_layers": 1})
        tree = TINY_RUN | {
            "output_dir": str(self.folder),
            "model": {"path": str(model), "device": "cpu"},
            "rollout": TINY_RUN["rollout"] | {"num_steps": 2, "guidance_scale": 1.0},
            "lora": {"rank": 1, "target_modules": ["attn.to_q"]},
            "objective": {"kl_mode": "dual"},
            "training": {"num_updates": 2, "ema_decay": 0.5, "anchor_interval": 1},
            "evaluation": TINY_RUN["evaluation"] | {"num_prompts": 2, "num_samples": 0},
            "checkpoint": {
                "every": 1,
                "keep_last": 2,
                "asynchronous": saving == "background",
            },
        }
        file = scratch / "run.yaml"
        file.write_text(json.dumps(tree))
        self.command = ["train", str(file), "--resume", "auto"]
        assert self.run(at=WARM_UP).status == 0
        shutil.rmtree(self.folder)
        self.undisturbed = self.run(reads=True)
        assert self.undisturbed.status == 0, self.undisturbed.output
        self.wanted = numbers(self.folder)
        reads = ("read", "list")
        self.undisturbed_writes = [
            call for call in self.undisturbed.events if not call.startswith(reads)
        ]

    def run(self, **fault: Any) -> Outcome:
        return self.server.run(self.command, self.folder, **fault)

    def differences(self) -> list[str]:
        """Names of results in which the run in the folder differs from an undisturbed
        one.
        """
        found = numbers(self.folder)
        names = sorted(found.keys() | self.wanted.keys())
        return [name for name in names if found.get(name) != self.wanted.get(name)]

    def problem(self, outcome: Outcome, *, resumes: bool = False) -> str:
        """The fault in how a command ended, or in how its run goes on; empty without
        one.
        """
        if outcome.status == 0:
            if resumes and "Going on from" not in outcome.output:
                return "it began again"
            return ", ".join(self.differences())
        if (
            "Traceback" in outcome.output
            or "error: " not in outcome.output
            or outcome.status < 0
        ):
            return (
                f"it did not say why it ended with {outcome.status}: "
                f"{outcome.output[-600:]}"
            )
        return self.go_on()

    def go_on(self) -> str:
        """Resume a run that ended early. Returns the fault in how it goes on; empty
        without one.
        """
        saved = bool(list_checkpoints(self.folder / "checkpoints"))
        outcome = self.run()
        if outcome.status != 0:
            return (
                f"the resumed run ended with {outcome.status}: {outcome.output[-600:]}"
            )
        if saved and "Going on from" not in outcome.output:
            return "the resumed run began again"
        return ", ".join(self.differences())


def numbers(run: Path) -> dict[str, Any]:
    """Everything that a run computed, by name: digests of tensor files, and JSON
    without times and memory.
    """
    found: dict[str, Any] = {"metrics": []}
    if (run / "metrics.jsonl").exists():
        found["metrics"] = made_runs.numbers(run)
    for pattern in (
        "evaluation/*.json",
        "checkpoints/*.json",
        "checkpoints/update-*/shards/__*",
    ):
        for file in run.glob(pattern):
            found[str(file.relative_to(run))] = hashlib.sha256(
                file.read_bytes()
            ).hexdigest()
    # whose header is in another order every time
    for file in run.glob("checkpoints/update-*/lora/*.safetensors"):
        found[str(file.relative_to(run))] = {
            name: value.tolist() for name, value in load_file(file).items()
        }
    for file in run.glob("checkpoints/update-*/state.json"):
        found[str(file.relative_to(run))] = json.loads(file.read_bytes())["trainer"]
    return found


def content(folder: Path) -> str:
    """Digest of all names and bytes in a folder."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        found.update(f"{file.relative_to(folder)}\n".encode())
        found.update(
            hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest()
        )
    return found.hexdigest()


Report = Callable[[str, dict[int, str], dict[int, str]], None]


@pytest.fixture
def report(capfd: pytest.CaptureFixture[str]) -> Report:
    """Says how many calls of which kind were tried, and fails with those that lost
    something.
    """

    def say(what: str, events: dict[int, str], failures: dict[int, str]) -> None:
        of_kind = Counter(event.split()[0] for event in events.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in of_kind.most_common())
        with capfd.disabled():
            print(
                f"\n{what}: {len(events) - len(failures)} of {len(events)} without "
                f"loss ({kinds})",
                file=sys.stderr,
            )
        text = "\n".join(
            f"{number}: {events[number]}: {problem}"
            for number, problem in failures.items()
        )
        assert not failures, (
            f"{what}: {len(failures)} of {len(events)} file-system calls\n{text}"
        )

    return say


@pytest.mark.parametrize("saving", SAVING)
def test_a_kill_at_any_file_system_call_loses_nothing(
    server: FaultServer, tmp_path: Path, report: Report, saving: str
) -> None:
    """A killed process leaves its files and nothing else, so copies of the folder stand
    for one run per kill.
    """
    trial = Trial(server, tmp_path, saving)
    copies = tmp_path / "copies"
    copies.mkdir()
    shutil.rmtree(trial.folder)
    names = trial.run(copies=copies).events
    assert len(names) > 100 and not trial.differences()
    # at the first there is no folder
    left = {number: copies / str(number) for number in range(2, len(names) + 1)}
    contents = {number: content(folder) for number, folder in left.items()}
    # of calls that leave the same, the last
    states = {digest: number for number, digest in contents.items()}
    events: dict[int, str] = {}
    failures: dict[int, str] = {}
    chosen = itertools.takewhile(
        lambda number: number <= len(names),
        calls(names, SAVING.index(saving), len(SAVING)),
    )
    for number in sorted(
        {states[contents[number]] for number in chosen if number in contents}
    ):
        shutil.rmtree(trial.folder)
        left[number].rename(trial.folder)
        events[number] = names[number - 1]
        if problem := trial.go_on():
            failures[number] = problem
    report(f"killed, saving in the {saving}", events, failures)


@pytest.mark.parametrize(
    ("saving", "shift"),
    [("foreground", 0), ("background", 1), ("foreground", 2), ("background", 3)],
)
def test_an_error_of_any_file_system_call_stops_the_run_clearly_or_changes_nothing(
    server: FaultServer, tmp_path: Path, report: Report, saving: str, shift: int
) -> None:
    """With SAGE_TEST_ALL_FAULTS each call fails with another error in each of the four
    cases.
    """
    trial = Trial(server, tmp_path, saving)
    events: dict[int, str] = {}
    failures: dict[int, str] = {}
    for number in calls(trial.undisturbed_writes, shift, len(ERRORS)):
        shutil.rmtree(trial.folder, ignore_errors=True)
        error = ERRORS[(number // len(ERRORS) + shift) % len(ERRORS)]
        outcome = trial.run(at=number, error=error)
        if len(outcome.events) < number:
            break
        events[number] = outcome.events[number - 1]
        if problem := trial.problem(outcome):
            failures[number] = f"{errno.errorcode[error]}: {problem}"
    assert max(events) > 100
    report(f"errors, saving in the {saving}, shift {shift}", events, failures)


@pytest.mark.parametrize("shift", range(2))
def test_an_error_while_resuming_never_begins_again(
    server: FaultServer, tmp_path: Path, report: Report, shift: int
) -> None:
    """Of a run with one checkpoint of two; calls that read fail as well."""
    trial = Trial(server, tmp_path, "foreground")
    shutil.rmtree(trial.folder)
    second = next(
        n
        for n, event in enumerate(trial.undisturbed.events, 1)
        if "update-000002" in event
    )
    assert trial.run(at=second, reads=True).status == -signal.SIGKILL
    begun = shutil.copytree(trial.folder, tmp_path / "begun")
    (first,) = list_checkpoints(begun / "checkpoints")
    resumed = trial.run(reads=True)
    assert not trial.problem(resumed, resumes=True)
    events: dict[int, str] = {}
    failures: dict[int, str] = {}
    for number in calls(resumed.events, shift, 2):
        shutil.rmtree(trial.folder)
        shutil.copytree(begun, trial.folder)
        error = (errno.EACCES, errno.ESTALE)[(number // 2 + shift) % 2]
        outcome = trial.run(at=number, error=error, reads=True)
        if len(outcome.events) < number:
            break
        events[number] = outcome.events[number - 1]
        verify_checkpoint(trial.folder / "checkpoints" / first.name)
        if problem := trial.problem(outcome, resumes=True):
            failures[number] = f"{errno.errorcode[error]}: {problem}"
    assert max(events) > 50
    report(f"errors while resuming, shift {shift}", events, failures)
