"""Rewards in a process of their own: the same numbers, at the same time as the rollout, and no way to hang.

Where two processes must be at work at once, they wait for each other's files; no test measures a duration.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.checkpoint import checkpoint_name
from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.schema import RunConfig
from sage_fast.config.training_sections import RewardConfig
from sage_fast.records import Prompt, PromptEmbeds, Sample
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.worker import RemoteTraceback, RewardProcess, load_scorer
from sage_fast.run.interrupt import SAME_KEY_PRESS, GracefulStop
from sage_fast.run.metrics import read_metrics
from sage_fast.run.run import Run, build_trainer
from tests.made_runs import untimed
from tests.rewards import support

ROOT = Path(__file__).resolve().parents[2]
EMBEDS = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))


def config(*names: str, weights: dict[str, float] | None = None, **changes: Any) -> RewardConfig:
    rewards = [f"{support.__name__}:{name}" for name in names]
    options = {f"{support.__name__}:{name}": value for name, value in changes.pop("options", {}).items()}
    changes = {"placement": "process", "timeout_seconds": 60.0} | changes
    return RewardConfig(rewards=rewards, options=options, weights=weights or {"score": 1.0}, **changes)


def videos(batch: int, seed: int = 0) -> Tensor:
    size = (batch, 5, 3, 24, 32)
    return torch.randint(0, 256, size, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def samples(*texts: str) -> list[Sample]:
    return [Sample(prompt=Prompt(text=text, index=40 + i), embeds=EMBEDS, member=i) for i, text in enumerate(texts)]


@pytest.fixture
def started() -> Iterator[Callable[[RewardConfig], RewardProcess]]:
    """Start a worker that is ended after the test, and must then be gone."""
    workers: list[RewardProcess] = []

    def start(settings: RewardConfig) -> RewardProcess:
        workers.append(RewardProcess(settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()
        assert worker._process.exitcode is not None


def test_numbers_and_messages_are_those_of_this_process(
    started: Callable[..., RewardProcess], caplog: pytest.LogCaptureFixture
) -> None:
    names = ("brightness", "Bright", "falling", "Chatty")
    settings = config(*names, weights={"brightness": 0.3, "bright": 2.0}, queue_size=3)
    inline, worker = CompositeReward.from_config(settings), started(settings)
    assert inline.lower_is_better == worker.lower_is_better == {"falling"}
    texts = ["a red circle", 'with "quotes" and ünïcode 🙂', "x" * 100_000]
    batches = [(videos(3, seed), samples(*texts)) for seed in range(5)]
    # As a slice on its way: neither contiguous nor of a storage of its own.
    batches.append((videos(4)[1:, :, :, ::2], samples(*texts)))
    pending = [worker.submit(*batch) for batch in batches]
    for batch, answer in zip(batches, pending, strict=True):
        expected, found = inline.submit(*batch).result(), answer.result()
        assert list(expected.scores) == list(found.scores) == ["brightness", "bright", "threads", "falling", "score"]
        assert all(torch.equal(expected.scores[k], v) and v.dtype == torch.float64 for k, v in found.scores.items())
        assert torch.equal(expected.failed, found.failed) and found.seconds > 0
        assert torch.equal(inline.overall(expected.scores), worker.overall(found.scores))
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        (support.logger_name, "WARNING", "3 videos")
    ] * (2 * len(batches))


def test_a_reward_that_raises_stops_or_marks_as_inline(started: Callable[..., RewardProcess]) -> None:
    settings = config("Faulty")
    inline, worker = CompositeReward.from_config(settings), started(settings)
    batch = (videos(3), samples("good", "bad", "good"))
    with pytest.raises(RewardError) as expected:
        inline.submit(*batch)
    failing, fine = worker.submit(*batch), worker.submit(videos(1), samples("good"))
    for _ in range(2):
        with pytest.raises(RewardError) as found:
            failing.result()
        assert str(found.value) == str(expected.value)
        assert "ValueError: the scoring server is gone on prompt 40 ('good'), sample 0" in str(found.value)
    assert isinstance(found.value.__cause__, RemoteTraceback)
    assert "support.py" in str(found.value.__cause__) and "in fails" in str(found.value.__cause__)
    assert not fine.result().failed.any()  # it goes on
    marked, same = worker.submit(*batch, "drop_group").result(), inline.submit(*batch, "drop_group").result()
    assert marked.failed.tolist() == same.failed.tolist() == [False, True, False]
    assert torch.equal(marked.scores["score"], same.scores["score"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "on_failure", "how"),
    [
        ("exit", "stop", "ended with exit code 0"),
        ("kill", "drop_group", "was killed by SIGKILL, as the kernel does when memory runs out,"),
    ],
)
def test_a_worker_that_dies_is_an_error(
    started: Callable[..., RewardProcess], fault: str, on_failure: Any, how: str
) -> None:
    worker = started(config("brightness", "Faulty", options={"Faulty": {"fault": fault}}))
    before = worker.submit(videos(1), samples("good"), on_failure)
    dying = worker.submit(videos(2), samples("good", "bad"), on_failure)
    assert not before.result().failed.any()
    for _ in range(2):
        with pytest.raises(RewardError, match=rf"reward 'tests.rewards.support:Faulty' {how}.*prompt 40 \('good'\)"):
            dying.result()
    with pytest.raises(RewardError, match="Faulty"):
        worker.submit(videos(1), samples("good"))


@pytest.mark.slow
def test_a_reward_that_hangs_is_stopped(started: Callable[..., RewardProcess]) -> None:
    worker = started(config("brightness", "Faulty", options={"Faulty": {"fault": "hang"}}, timeout_seconds=8.0))
    worker._timeout = 0.3  # the start took the seconds above
    hanging = worker.submit(videos(1), samples("bad"))
    message = r"^Reward 'tests.rewards.support:Faulty' took longer than 0.3 s on prompt 40 .*reward.timeout_seconds"
    with pytest.raises(RewardError, match=message):
        hanging.result()
    assert worker._process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("raise", ConfigError, "'tests.rewards.support:Faulty' cannot be set up: the scoring server is gone"),
        ("crash", RewardError, "'tests.rewards.support:Faulty' raised RuntimeError: out of something while it was set"),
        ("sys.exit", RewardError, r"tried to end the process by sys.exit\(0\) while it was set up"),
        ("os._exit", RewardError, r"tried to end the process by os._exit\(0\) while it was set up"),
        ("exit", RewardError, "exit code 0 .* while it was set up"),
        ("hang", RewardError, "took longer than 3 s while it was set up"),
    ],
)
def test_rewards_that_cannot_be_set_up(fault: str, kind: type[Exception], message: str) -> None:
    options = {"Faulty": {"when": "build", "fault": fault}}
    seconds = 3.0 if fault == "hang" else 60.0
    with pytest.raises(kind, match=message):
        load_scorer(config("Faulty", options=options, timeout_seconds=seconds))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["sys.exit", "os._exit"])
def test_a_reward_that_exits_has_failed_and_its_process_goes_on(
    started: Callable[..., RewardProcess], fault: str
) -> None:
    worker = started(config("Faulty", options={"Faulty": {"fault": fault}}))
    with pytest.raises(RewardError, match=rf"by {fault}\(0\) on prompt 40 \('good'\), sample 0 or the video scored"):
        worker.submit(videos(2), samples("good", "bad")).result()
    assert worker.submit(videos(2), samples("good", "bad"), "drop_group").result().failed.tolist() == [False, True]


def test_a_weight_without_a_score_is_a_configuration_error(started: Callable[..., RewardProcess]) -> None:
    worker = started(config("brightness", weights={"beauty": 1.0}))
    with pytest.raises(ConfigError, match=r"reward.weights names \['beauty'\]"):
        worker.submit(videos(1), samples("good")).result()


def test_submitting_waits_while_the_queue_is_full(started: Callable[..., RewardProcess], tmp_path: Path) -> None:
    worker = started(config("Waiting", options={"Waiting": {"folder": str(tmp_path)}}, queue_size=2))
    first, second = worker.submit(videos(1), samples("a")), worker.submit(videos(1), samples("b"))
    support.wait_for(tmp_path / "came-0")
    (tmp_path / "go-1").touch()
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.append(worker.submit(videos(1), samples("c"))))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and len(worker._outstanding) == 2
    (tmp_path / "go-0").touch()
    thread.join(30)
    assert not thread.is_alive() and first.answer is not None
    (tmp_path / "go-2").touch()
    assert all(p.result().scores["score"].tolist() == [1.0] for p in [third[0], first, second])  # in any order


def test_it_goes_with_its_last_reference() -> None:
    worker = RewardProcess(config("brightness"))
    process = worker._process
    del worker
    assert process.exitcode == 0


# ------------------------------------------------------------------------------------------ the trainer with it

REWARDS = "--reward.rewards=['tests.rewards.support:{}']"
PROCESS = "--reward.placement=process"
MakeRun = Callable[..., RunConfig]


def environment() -> dict[str, str]:
    """For processes that import this package and its tests."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *sys.path])}


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["stop", "drop_group"])
def test_a_run_gives_the_same_numbers(tiny_run: MakeRun, tmp_path: Path, on_failure: str) -> None:
    """Bit by bit: metrics, evaluation and weights after an update, with a group that is dropped or without."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle moving left\na blue square moving up\n")
    evaluated = tmp_path / "evaluated.txt"
    evaluated.write_text("a red cross moving left\na red square moving up\n")
    bad = "blue" if on_failure == "drop_group" else "nothing"
    arguments = [
        REWARDS.format("Faulty"),
        f"--reward.options={{'tests.rewards.support:Faulty': {{word: {bad}}}}}",
        "--reward.weights={score: 1}",
        f"--reward.on_failure={on_failure}",
        f"--data.prompts={prompts}",
        "--evaluation.num_prompts=2",
        f"--evaluation.prompts={evaluated}",
        "--evaluation.batch_size=1",
        "--rollout.micro_batch_size=2",
    ]
    results = []
    for placement in ([], [PROCESS]):
        trainer = build_trainer(tiny_run(*arguments, *placement))
        record = trainer.iterate()
        assert ("time/reward_worker" in record) == bool(placement)
        assert record["reward/dropped_groups"] == (on_failure == "drop_group")
        results.append((untimed(record), trainer.evaluate()[0], trainer.tensors()["weights"]))
        trainer.reward.close()
    (inline, inline_scores, inline_weights), (process, process_scores, process_weights) = results
    assert inline == process
    assert inline_scores == process_scores
    assert all(torch.equal(w, process_weights[n]) for n, w in inline_weights.items())


@pytest.mark.slow
def test_scoring_overlaps_the_rollout(tiny_run: MakeRun, tmp_path: Path) -> None:
    """Batch 0 is in the reward, and stays there until the sampling of batch 1 has begun; so on to the end."""
    trainer = build_trainer(
        tiny_run(
            REWARDS.format("Waiting"),
            f"--reward.options={{'tests.rewards.support:Waiting': {{folder: '{tmp_path}'}}}}",
            "--reward.weights={score: 1}",
            "--rollout.micro_batch_size=1",
            PROCESS,
        )
    )

    def rendezvous(phase: str, done: int, total: int, subject: str) -> None:
        if phase == "rollout" and done:
            support.wait_for(tmp_path / f"came-{done - 1}")
            (tmp_path / f"go-{done - 1}").touch()
        elif phase == "reward" and done == 0:
            (tmp_path / f"go-{total - 1}").touch()

    trainer.progress = rendezvous
    record = trainer.iterate()
    assert (tmp_path / "came-3").exists() and record["reward/mean"] == 1.0
    assert record["time/reward_worker"] > 0
    phases = ("rollout", "decode", "reward", "anchor", "update")
    assert record["time/iteration"] == pytest.approx(sum(record[f"time/{phase}"] for phase in phases))
    trainer.reward.close()


# ------------------------------------------------------------------------------------------ random generators

DRAWING = "tests.rewards.support:Drawing"
DRAWN = ["python", "numpy", "torch"]


@pytest.mark.slow
def test_the_generators_are_seeded_and_their_state_goes_on(started: Callable[..., RewardProcess]) -> None:
    settings = config("Drawing", weights=dict.fromkeys(DRAWN, 1.0))

    def draw(worker: RewardProcess) -> list[list[float]]:
        scores = worker.submit(videos(3), samples("a", "b", "c")).result().scores
        return [scores[name].tolist() for name in DRAWN]

    first = started(settings)
    begin = draw(first)
    pending = first.submit(videos(1), samples("a"))
    state = json.loads(json.dumps(first.state()))  # after the batch that is in flight
    assert pending.answer is not None
    going_on = [draw(first), draw(first)]
    second = started(settings)
    assert draw(second) == begin and len({value for column in begin for value in column}) == 9
    second.load_state(state)
    assert [draw(second), draw(second)] == going_on
    other = RewardProcess(settings, seed=1)
    assert not set(draw(other)[0]) & set(begin[0])
    other.close()


def drawing_run(tmp_path: Path) -> list[str]:
    """Overrides of a run whose rewards are drawn from each generator."""
    return [
        REWARDS.format("Drawing"),
        f"--reward.options={{'{DRAWING}': {{fatal: '{tmp_path / 'fatal'}'}}}}",
        "--reward.weights={python: 1, numpy: 1, torch: 1}",
        PROCESS,
    ]


def rows(run: RunConfig) -> list[dict[str, float]]:
    return [untimed(row) for row in read_metrics(Path(run.output_dir) / "metrics.jsonl")]


@pytest.mark.slow
def test_a_resumed_run_draws_the_numbers_of_an_uninterrupted_one(tiny_run: MakeRun, tmp_path: Path) -> None:
    whole = tiny_run(*drawing_run(tmp_path))
    Run(whole).train()
    saved = Path(whole.output_dir) / "checkpoints" / checkpoint_name(1)
    resumed = tiny_run(*drawing_run(tmp_path), f"--output_dir={tmp_path / 'resumed'}", f"--resume={saved}")
    Run(resumed).train()
    assert [row["update"] for row in rows(resumed)] == [0, 2]
    assert rows(resumed) == [rows(whole)[0], rows(whole)[2]]


@pytest.mark.slow
def test_a_killed_run_draws_the_numbers_of_an_uninterrupted_one(tiny_run: MakeRun, tmp_path: Path) -> None:
    whole = tiny_run(*drawing_run(tmp_path))
    Run(whole).train()
    killed = [*drawing_run(tmp_path), f"--output_dir={tmp_path / 'killed'}"]
    (tmp_path / "fatal").touch()
    command = [sys.executable, "-m", "sage_fast", "train", str(tmp_path / "run.yaml"), *killed]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "fatal").exists()
    resumed = tiny_run(*killed, "--resume=auto")
    Run(resumed).train()
    assert len(rows(resumed)) == 3
    assert rows(resumed) == rows(whole)


# ------------------------------------------------------------------------------------------ Ctrl-C


@pytest.mark.signals
def test_ctrl_c_at_every_line_of_the_wait(started: Callable[..., RewardProcess]) -> None:
    """Of the wait and of all that it calls. Each is an interrupt at once, and the worker's answers stay in step."""
    worker = started(config("brightness", weights={"brightness": 1.0}))
    batch = videos(1), samples("a")
    expected = worker.submit(*batch).result().scores["brightness"]
    lost, points, reached = [], 0, True
    while reached:
        reached = False
        countdown = points

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal countdown, reached
            if event == "line":
                if countdown == 0:
                    sys.settrace(None)
                    reached = True
                    os.kill(os.getpid(), signal.SIGINT)
                countdown -= 1
            return trace

        pending = worker.submit(*batch)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            pending.result()
            if reached:
                lost.append(points)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert torch.equal(pending.result().scores["brightness"], expected)
        assert not worker._outstanding
        points += 1
    assert not lost
    assert points > 100


@pytest.mark.signals
def test_ctrl_c_in_a_callback_ends_the_wait(
    started: Callable[..., RewardProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in a weak reference's callback is lost to Python; the reward would not have answered for 30 s."""
    worker = started(config("Waiting", options={"Waiting": {"folder": str(tmp_path)}}))
    pending = worker.submit(videos(1), samples("a"))

    class Target:
        """Something to refer to."""

    def wait_after_callback(*arguments: Any) -> Any:
        monkeypatch.undo()
        target = Target()
        reference = weakref.ref(target, lambda _: os.kill(os.getpid(), signal.SIGINT))
        del target
        assert reference() is None
        return wait(*arguments)

    monkeypatch.setattr("sage_fast.rewards.worker.wait", wait_after_callback)
    with pytest.raises(KeyboardInterrupt):
        pending.result()
    assert pending.answer is None
    (tmp_path / "go-0").touch()
    assert pending.result().scores["score"].tolist() == [1.0]


@pytest.mark.signals
def test_ctrl_c_while_the_worker_starts_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be joined at exit, and it would wait for batches."""
    start = SpawnProcess.start

    def start_interrupted(process: SpawnProcess) -> None:
        start(process)
        children.append(process)
        os.kill(os.getpid(), signal.SIGINT)

    children: list[SpawnProcess] = []
    monkeypatch.setattr(SpawnProcess, "start", start_interrupted)
    with pytest.raises(KeyboardInterrupt):
        RewardProcess(config("brightness"))
    assert children[0].exitcode is not None


@pytest.mark.signals
def test_a_second_ctrl_c_ends_the_wait_of_a_run(started: Callable[..., RewardProcess], tmp_path: Path) -> None:
    """The first asks the run to stop after its update, for which it goes on waiting."""
    worker = started(config("Waiting", options={"Waiting": {"folder": str(tmp_path)}}))
    pending = worker.submit(videos(1), samples("a"))
    with GracefulStop(announce=False) as stop:
        first = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        second = threading.Timer(0.5 + SAME_KEY_PRESS, os.kill, (os.getpid(), signal.SIGINT))
        first.start()
        second.start()
        with pytest.raises(KeyboardInterrupt):
            pending.result()
        assert stop.requested and not second.is_alive()
    (tmp_path / "go-0").touch()
    assert pending.result().scores["score"].tolist() == [1.0]


# ------------------------------------------------------------------------------------------ no orphans

PARENT = """
import signal, sys, torch
from pathlib import Path
from sage_fast.config.training_sections import RewardConfig
from sage_fast.records import Prompt, PromptEmbeds, Sample
from sage_fast.rewards.worker import RewardProcess

if __name__ == "__main__":
    # Commands that a script starts in the background begin with SIGINT ignored, and so do those that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name, folder = "tests.rewards.support:Faulty", sys.argv[1]
    options = {name: {"fault": "hang", "folder": folder}}
    worker = RewardProcess(RewardConfig(rewards=[name], options=options, weights={"score": 1}, placement="process"))
    embeds = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))
    bad = [Sample(prompt=Prompt(text="bad", index=0), embeds=embeds, member=0)]
    pending = worker.submit(torch.zeros(1, 2, 3, 8, 8, dtype=torch.uint8), bad)
    if sys.argv[2] == "finish":
        while not (Path(folder) / "pid").exists():
            pass
    else:
        pending.result()
"""


def alive(pid: int) -> bool:
    """Whether a process is still running; one that has ended and waits to be collected is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.signals
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("end", ["finish", "ctrl-c", "killed"])
def test_nothing_is_left_behind(tmp_path: Path, end: str) -> None:
    """A trainer that ends in the middle of a batch, is interrupted or is killed takes its worker along."""
    script = tmp_path / "train.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, script, tmp_path, end],
        env=environment(),
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    try:
        support.wait_for(tmp_path / "pid", 60)
        time.sleep(0.05)  # the file is there before its text
        worker = int((tmp_path / "pid").read_text())
        if end == "ctrl-c":
            os.killpg(parent.pid, signal.SIGINT)
        elif end == "killed":
            parent.kill()
        _, errors = parent.communicate(timeout=30)
        assert parent.returncode == {"finish": 0, "ctrl-c": -signal.SIGINT, "killed": -signal.SIGKILL}[end], errors
        assert (b"KeyboardInterrupt" in errors) == (end == "ctrl-c")
        deadline = time.monotonic() + 10
        while alive(worker) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(worker)
    finally:
        if parent.poll() is None:
            parent.kill()


@pytest.mark.signals
def test_ctrl_c_and_sigterm_leave_the_worker_to_the_trainer(
    started: Callable[..., RewardProcess], tmp_path: Path
) -> None:
    """The update in progress gets its scores; closing then ends the worker, and does nothing a second time."""
    worker = started(config("Waiting", options={"Waiting": {"folder": str(tmp_path)}}))
    pending = worker.submit(videos(1), samples("a"))
    support.wait_for(tmp_path / "came-0")
    assert worker._process.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker._process.pid, number)
    (tmp_path / "go-0").touch()
    assert pending.result().scores["score"].tolist() == [1.0]
    worker.close()
    assert worker._process.exitcode == 0
    worker.close()
    with pytest.raises(RewardError, match="has been closed"):
        worker.submit(videos(1), samples("a"))
