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


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, 2, [0, 1, None]),
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
            with pytest.raises(ConfigError, match=rf"{count} usable .*_node={count}"):
                rank_device("auto")
        else:
            assert rank_device("auto") == two_gpus[-1] == torch.device("cuda", number)
            assert rank_device("cuda") == torch.device("cuda", number)
            assert rank_device("cuda:0") == two_gpus[-1] == torch.device("cuda", 0)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_device("auto") == rank_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no GPU"):
        rank_device("cuda")


@pytest.mark.parametrize(
    ("resume", "restarts", "shared", "refusal"),
    [
        ("restart", "0", "True", None),
        ("auto", "3", "False", None),
        # Plain torch 2.13 would hang after the first restart.
        ("auto", "3", "True", "=3, .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        # A replaced node starts the same words again with a restart count of 0, so no
        # process could tell.
        ("none", "3", "False", "--resume none .*Give --resume auto"),
        ("runs/a", "3", "False", "--resume runs/a .*Give --resume auto"),
    ],
)
def test_restarts_that_would_not_go_on_are_refused(
    resume: str,
    restarts: str,
    shared: str,
    refusal: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("RANK", "0")
    if refusal is None:
        check_restartable(resume)
        return
    settings = DistributedConfig()
    with pytest.raises(ConfigError, match=refusal):
        start_world(settings, "lora", torch.device("cpu"), {"resume": resume})


@pytest.mark.parametrize("value", ["first", "-1"])
def test_a_rank_that_is_no_number_is_named(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", value)
    with pytest.raises(SystemExit, match=f"environment variable RANK is '{value}'"):
        rank()


def test_without_a_launcher_there_is_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "")  # as a script leaves it behind
    assert rank() == 0
    assert world_size() == 1


# --------------------------------------------------------------------------------------
# scripts


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def bash(name: str, *words: str, environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and messages of a script."""
    ended = subprocess.run(
        ["bash", f"configs/launch/{name}", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
    )
    return ended.returncode, ended.stderr


# It lasts until the run is asked to stop, as one does that saves then.
SRUN = """
if [[ -n "${LASTS:-}" ]]; then
    until [[ -e "$OUTPUT_DIR/STOP" ]]; do sleep 0.05; done; echo saved
fi
if [[ -n "${SAVES:-}" ]]; then mkdir -p "$OUTPUT_DIR/checkpoints/update-000002"; fi
exit "${STATUS:-0}"
"""
SCONTROL = """
if [[ "$1" == show ]]; then printf "node03\\nnode04\\n"
else echo "$@" >> FOLDER/scontrol-calls; fi
"""


def fake_cluster(folder: Path, **variables: str) -> dict[str, str]:
    """An environment whose python, srun and scontrol write down how they were called."""
    record = f'printf "%s\\n" "$@" > {folder}/arguments; env > {folder}/environment\n'
    script(folder / "python", record)
    script(folder / "srun", record + SRUN)
    script(folder / "scontrol", SCONTROL.replace("FOLDER", str(folder)))
    (folder / "my runs").mkdir()
    job = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[03-04]",
        "SLURM_JOB_NUM_NODES": "2",
        "CONFIG": "my config.yaml",
        "OUTPUT_DIR": str(folder / "my runs"),
        "OVERRIDES": "--seed=1 --distributed.sp=2",
    }
    return os.environ | variables | job


def called(folder: Path) -> list[str]:
    """Arguments of the last call."""
    return (folder / "arguments").read_text().splitlines()


def assert_called(folder: Path, expected: str) -> None:
    """The last call is torchrun with these arguments, and the environment has what it
    needs.
    """
    command = " ".join(called(folder))
    start = "-m torch.distributed.run --nnodes=2 --nproc_per_node=gpu "
    assert command.endswith(f"{start}--rdzv_backend=c10d {expected}")
    variables = (folder / "environment").read_text()
    assert "TORCH_FR_BUFFER_SIZE=2000" in variables
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT=1" in variables
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in variables


def test_the_script_of_torchrun(tmp_path: Path) -> None:
    here = fake_cluster(tmp_path, NNODES="2", HEAD="node01", MAX_RESTARTS="2")
    here |= {"MASTER_PORT": "29500", "RUN_ID": "a"}
    words = ("my config.yaml", "--seed=1")
    assert bash("torchrun.sh", *words, environment=here) == (0, "")
    assert_called(
        tmp_path,
        "--rdzv_endpoint=node01:29500 --rdzv_id=a --max-restarts=2 "
        "-m sage_fast train --resume auto my config.yaml --seed=1",
    )
    here["NNODES"] = "4:8"
    assert bash("torchrun.sh", *words, environment=here) == (0, "")
    # In front of the user's own words, of which the last one counts.
    assert "--nnodes=4:8" in called(tmp_path)
    assert called(tmp_path)[-3:] == ["--distributed.dp_replicate=null", *words]
    assert "usage" in bash("torchrun.sh", environment=here)[1]


def test_the_script_of_slurm(tmp_path: Path) -> None:
    environment = fake_cluster(tmp_path)
    assert bash("slurm.sbatch", environment=environment) == (0, "")
    assert_called(
        tmp_path,
        "--rdzv_endpoint=node03:12077 --rdzv_id=77 --max-restarts=3 "
        f"-m sage_fast train my config.yaml --output_dir {tmp_path}/my runs "
        "--resume auto --seed=1 --distributed.sp=2",
    )
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
    for words in (["a"], ["a"], ["a", "--output-dir=b"], ["a --output-dir=b"]):
        assert bash("torchrun.sh", *words, environment=several) == (0, "")
        endpoint, run_id = called(tmp_path)[5:7]
        assert re.fullmatch(r"--rdzv_endpoint=node01:2\d{4}", endpoint)
        places.append((endpoint, run_id))
    assert places[0] == places[1]
    assert len(set(places)) == 3
    del several["HEAD"]
    assert "HEAD: the node" in bash("torchrun.sh", "a", environment=several)[1]


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
    assert not (tmp_path / "arguments").exists()
    assert not (tmp_path / "scontrol-calls").exists()
    del environment["CONFIG"]
    assert "Which run?" in bash("slurm.sbatch", environment=environment)[1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_slurm_script_saves_and_comes_back_at_the_end_of_its_time(
    tmp_path: Path, number: signal.Signals
) -> None:
    job = subprocess.Popen(
        ["bash", str(ROOT / "configs/launch/slurm.sbatch")],
        env=fake_cluster(tmp_path, LASTS="1"),
        stdout=subprocess.PIPE,
        text=True,
    )
    arguments = tmp_path / "arguments"
    while not arguments.exists() or "--rdzv_id=77" not in called(tmp_path):
        time.sleep(0.05)
    time.sleep(0.2)
    job.send_signal(number)
    printed, _ = job.communicate(timeout=10)
    assert job.returncode == 0
    assert "saved" in printed and "queueing it again" in printed
    assert (tmp_path / "scontrol-calls").read_text() == "requeue 77\n"
