"""How processes are described, numbered and restarted, and the scripts that start them."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from sage_fast.config.errors import ConfigError
from sage_fast.config.sections import DistributedConfig
from sage_fast.distributed.start import (
    _number,
    check_restartable,
    rank,
    rank_device,
    start_world,
    world_size,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "PYTHON",
        ):
            monkeypatch.delenv(name)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return chosen


def test_which_gpu_a_rank_takes(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device("auto") == rank_device("cuda") == torch.device("cuda", 1)
    assert rank_device("cuda:0") == torch.device("cuda", 0)
    assert two_gpus == [torch.device("cuda", number) for number in (1, 1, 0)]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"2 usable GPU\(s\).*--nproc_per_node=2"):
        rank_device("auto")


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, 2, [0, 1, None]),
        ("0,1", 2, [0, 1, None]),
        ("6,3", 2, [0, 1, None]),  # torch numbers those that it sees
        ("GPU-5", 1, [0, 0, 0]),  # bound to the task
        (None, 1, [0, None, None]),
    ],
)
def test_every_rank_has_its_own_of_the_gpus_that_it_sees(
    visible: str | None,
    count: int,
    expected: list[int | None],
    two_gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for local, number in enumerate(expected):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        if number is None:
            with pytest.raises(ConfigError, match=rf"{count} usable GPU\(s\)"):
                rank_device("auto")
        else:
            assert rank_device("auto") == two_gpus[-1] == torch.device("cuda", number)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_device("auto") == rank_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no GPU"):
        rank_device("cuda")


def test_restarts_in_a_shared_store_are_refused() -> None:
    """Plain torch 2.13 would hang after the first one."""
    shared, restarts = (
        {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        {"TORCHELASTIC_MAX_RESTARTS": "3"},
    )
    check_restartable("restart", shared | {"TORCHELASTIC_MAX_RESTARTS": "0"})
    check_restartable("auto", restarts | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    with pytest.raises(
        ConfigError, match=r"--max-restarts=3, .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    ):
        check_restartable("auto", shared | restarts)


@pytest.mark.parametrize(
    "resume", ["none", "restart", "runs/mine/checkpoints/update-000040"]
)
def test_restarts_that_would_not_go_on_are_refused_before_the_processes_meet(
    resume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced node starts the same words again with a restart count of 0, so no
    process could tell.
    """
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=rf"--resume {resume} .*Give --resume auto"):
        start_world(
            DistributedConfig(), "lora", torch.device("cpu"), {"resume": resume}
        )


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_MAX_RESTARTS"]
)
@pytest.mark.parametrize("value", ["", "first", "-1", "1.5"])
def test_a_number_of_the_environment_that_is_none_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one, as a script leaves behind, is none at all."""
    monkeypatch.setenv(name, value)
    if value:
        with pytest.raises(
            SystemExit, match=f"environment variable {name} is '{value}'"
        ):
            _number(name, 1)
    else:
        assert _number(name, 1) == 1
    monkeypatch.delenv(name)
    assert _number(name, 1) == 1 and rank() == 0 and world_size() == 1


# ----------------------------------------------------------------------------------------------
# scripts


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def start(
    name: str, *arguments: str, environment: dict[str, str]
) -> subprocess.Popen[str]:
    command = ["bash", str(ROOT / "configs" / "launch" / name), *arguments]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def bash(name: str, *arguments: str, environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and messages."""
    process = start(name, *arguments, environment=environment)
    _, messages = process.communicate(timeout=20)
    return process.returncode, messages


def fake_cluster(folder: Path, **variables: str) -> dict[str, str]:
    """An environment whose python, srun and scontrol write down how they were called."""
    record = f'printf "%s\\n" "$@" > {folder}/arguments; env > {folder}/environment\n'
    script(folder / "python", record)
    # srun lasts until the run is asked to stop, as one does that saves then.
    lasting = (
        'if [[ -n "${LASTS:-}" ]]; then until [[ -e "$OUTPUT_DIR/STOP" ]]; do sleep '
        "0.05; done; echo saved; fi\n"
    )
    saving = (
        'if [[ -n "${SAVES:-}" ]]; then mkdir -p '
        '"$OUTPUT_DIR/checkpoints/update-000002"; fi\n'
    )
    script(folder / "srun", record + lasting + saving + 'exit "${STATUS:-0}"')
    nodes = 'if [[ "$1" == show ]]; then printf "node03\\nnode04\\n"; '
    script(
        folder / "scontrol", nodes + f'else echo "$@" >> {folder}/scontrol-calls; fi'
    )
    (folder / "my runs").mkdir()
    return (
        os.environ
        | variables
        | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[03-04]",
            "SLURM_JOB_NUM_NODES": "2",
            "CONFIG": "my config.yaml",
            "OUTPUT_DIR": str(folder / "my runs"),
            "OVERRIDES": "--seed=1 --distributed.sp=2",
        }
    )


def called(folder: Path) -> list[str]:
    """Arguments of the last call."""
    return (folder / "arguments").read_text().splitlines()


def assert_called(folder: Path, expected: list[str]) -> None:
    """The last call is torchrun with these arguments, and the environment has what it
    needs.
    """
    arguments = called(folder)
    assert arguments[arguments.index("-m") :] == [
        *(
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc_per_node=gpu",
            "--rdzv_backend=c10d",
        ),
        *expected,
    ]
    variables = (folder / "environment").read_text()
    for setting in (
        "FR_BUFFER_SIZE=2000",
        "NCCL_DUMP_ON_TIMEOUT=1",
        "DISABLE_SHARE_RDZV_TCP_STORE=1",
    ):
        assert f"TORCH_{setting}" in variables


def test_the_scripts(tmp_path: Path) -> None:
    environment = fake_cluster(tmp_path)
    here = environment | {
        "NNODES": "2",
        "HEAD": "node01",
        "MAX_RESTARTS": "2",
        "MASTER_PORT": "29500",
        "RUN_ID": "a",
    }
    assert bash("torchrun.sh", "my config.yaml", "--seed=1", environment=here) == (
        0,
        "",
    )
    rest = ["-m", "sage_fast", "train", "my config.yaml"]
    meeting = ["--rdzv_endpoint=node01:29500", "--rdzv_id=a", "--max-restarts=2"]
    assert_called(
        tmp_path, [*meeting, *rest[:3], "--resume", "auto", *rest[3:], "--seed=1"]
    )
    assert bash(
        "torchrun.sh", "a.yaml", "--seed=1", environment=here | {"NNODES": "4:8"}
    ) == (0, "")
    # In front of the user's own words, of which the last one counts.
    assert "--nnodes=4:8" in called(tmp_path)
    assert called(tmp_path)[-3:] == [
        "--distributed.dp_replicate=null",
        "a.yaml",
        "--seed=1",
    ]
    assert "usage" in bash("torchrun.sh", environment=here)[1]

    assert bash("slurm.sbatch", environment=environment) == (0, "")
    meeting = ["--rdzv_endpoint=node03:12077", "--rdzv_id=77", "--max-restarts=3"]
    rest += [
        "--output_dir",
        str(tmp_path / "my runs"),
        "--resume",
        "auto",
        "--seed=1",
        "--distributed.sp=2",
    ]
    assert_called(tmp_path, [*meeting, *rest])
    assert not (tmp_path / "scontrol-calls").exists()


def test_two_runs_of_the_script_at_a_time_do_not_meet(tmp_path: Path) -> None:
    """One node takes a free port. On several all nodes name the same place, another one
    for another command.
    """
    environment = fake_cluster(tmp_path)
    assert bash("torchrun.sh", "a.yaml", environment=environment) == (0, "")
    assert called(tmp_path)[4:6] == ["--standalone", "--max-restarts=3"]
    several = environment | {"NNODES": "2", "HEAD": "node01"}
    places = []
    for words in (
        ["a.yaml"],
        ["a.yaml"],
        ["a.yaml", "--output-dir=b"],
        ["a.yaml --output-dir=b"],
    ):
        assert bash("torchrun.sh", *words, environment=several) == (0, "")
        places.append(tuple(called(tmp_path)[5:7]))
    assert places[0] == places[1] and len(set(places)) == 3
    assert all(
        re.fullmatch(r"--rdzv_endpoint=node01:2\d{4}", endpoint)
        for endpoint, _ in places
    )
    assert (
        "HEAD: the node"
        in bash("torchrun.sh", "a.yaml", environment=environment | {"NNODES": "2"})[1]
    )


@pytest.mark.parametrize(
    ("status", "restarts", "saves", "requeued"),
    [
        ("137", "3", "1", True),
        ("1", "20", "1", False),
        ("137", "3", "", False),
        ("137", "0", "", True),
    ],
)
def test_the_slurm_script_queues_a_failed_job_again_as_long_as_it_makes_progress(
    tmp_path: Path, status: str, restarts: str, saves: str, requeued: bool
) -> None:
    environment = fake_cluster(
        tmp_path, STATUS=status, SLURM_RESTART_COUNT=restarts, SAVES=saves
    )
    (tmp_path / "my runs/checkpoints/update-000001").mkdir(parents=True)
    assert bash("slurm.sbatch", environment=environment)[0] == int(status)
    assert (tmp_path / "scontrol-calls").exists() == requeued


def test_the_slurm_script_ends_for_a_configuration_that_cannot_run(
    tmp_path: Path,
) -> None:
    environment = fake_cluster(tmp_path)
    script(tmp_path / "python", "exit 2")
    assert bash("slurm.sbatch", environment=environment)[0] == 2
    assert (
        not (tmp_path / "arguments").exists()
        and not (tmp_path / "scontrol-calls").exists()
    )
    del environment["CONFIG"]
    assert "Which run?" in bash("slurm.sbatch", environment=environment)[1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_slurm_script_saves_and_comes_back_at_the_end_of_its_time(
    tmp_path: Path, number: signal.Signals
) -> None:
    job = start("slurm.sbatch", environment=fake_cluster(tmp_path, LASTS="1"))
    while (
        not (tmp_path / "arguments").exists()
        or "--rdzv_id=77" not in (tmp_path / "arguments").read_text()
    ):
        time.sleep(0.05)
    time.sleep(0.2)
    job.send_signal(number)
    printed, _ = job.communicate(timeout=10)
    assert job.returncode == 0
    assert "saved" in printed and "queueing it again" in printed
    assert (tmp_path / "scontrol-calls").read_text() == "requeue 77\n"
