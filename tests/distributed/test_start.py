"""How processes are described, numbered and restarted, and the scripts that start them."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sage_fast.config.errors import ConfigError
from sage_fast.distributed.start import check_restartable, effective_resume, rank_device

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHON"):
            monkeypatch.delenv(name)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return chosen


def test_which_gpu_a_rank_takes(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device("auto") == rank_device("cuda") == torch.device("cuda", 1)
    assert rank_device("cuda:0") == torch.device("cuda", 0)
    assert two_gpus == [torch.device("cuda", number) for number in (1, 1, 0)]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"2 GPU\(s\).*--nproc_per_node=2"):
        rank_device("auto")
    # One that is bound to the task is number 0.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5")
    assert rank_device("cuda") == torch.device("cuda", 0)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_device("auto") == rank_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no GPU"):
        rank_device("cuda")
    with pytest.raises(ConfigError, match="'tpu'.*Use auto or cpu"):
        rank_device("tpu")


def test_a_restarted_job_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    key = "TORCHELASTIC_RESTART_COUNT"
    assert effective_resume("none", {}) == effective_resume("none", {key: "0"}) == "none"
    assert not caplog.messages
    assert effective_resume("none", {key: "2"}) == "auto"
    assert "Restart 2" in caplog.text
    assert effective_resume("runs/a/checkpoints/step-10", {key: "2"}) == "runs/a/checkpoints/step-10"


def test_restarts_in_a_shared_store_are_refused() -> None:
    """Plain torch 2.13 would hang after the first one."""
    shared, restarts = {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"TORCHELASTIC_MAX_RESTARTS": "3"}
    check_restartable(shared | {"TORCHELASTIC_MAX_RESTARTS": "0"})
    check_restartable(restarts | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    with pytest.raises(ConfigError, match=r"--max-restarts=3, .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_restartable(shared | restarts)


def test_other_ranks_log_warnings_with_their_rank() -> None:
    code = (
        "import logging\nfrom sage_fast.distributed.start import configure_logging\nconfigure_logging()\n"
        "logging.getLogger('a').info('hello')\nlogging.getLogger('a').warning('careful')\n"
    )
    command, environment = [sys.executable, "-c", code], os.environ | {"RANK": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == "[rank 3] WARNING careful\n"


# ---------------------------------------------------------------------------------------------- scripts


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def bash(name: str, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "configs" / "launch" / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)


def fake_cluster(folder: Path) -> dict[str, str]:
    """An environment whose python, srun and scontrol write down how they were called."""
    script(folder / "python", f'printf "%s\\n" "$@" > {folder}/arguments; env > {folder}/environment')
    # srun lasts until the run is asked to stop, as one does that saves then.
    script(
        folder / "srun",
        f'printf "%s\\n" "$@" > {folder}/arguments; env > {folder}/environment\n'
        'if [[ -n "${LASTS:-}" ]]; then until [[ -e "$OUTPUT_DIR/STOP" ]]; do sleep 0.05; done; echo saved; fi\n'
        'exit "${STATUS:-0}"',
    )
    script(
        folder / "scontrol",
        f'if [[ "$1" == show ]]; then printf "node03\\nnode04\\n"; else echo "$@" >> {folder}/scontrol-calls; fi',
    )
    (folder / "my runs").mkdir()
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[03-04]",
        "SLURM_JOB_NUM_NODES": "2",
        "CONFIG": "my config.yaml",
        "OUTPUT_DIR": str(folder / "my runs"),
        "OVERRIDES": "--seed=1 --distributed.sp=2",
    }


def assert_called(folder: Path, expected: list[str]) -> None:
    """The last call is torchrun with these arguments, and the environment has what it needs."""
    arguments = (folder / "arguments").read_text().splitlines()
    assert arguments[arguments.index("-m") :] == [
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=gpu", "--rdzv_backend=c10d"),
        *expected,
    ]
    variables = (folder / "environment").read_text()
    for setting in ("FR_BUFFER_SIZE=2000", "NCCL_DUMP_ON_TIMEOUT=1", "DISABLE_SHARE_RDZV_TCP_STORE=1"):
        assert f"TORCH_{setting}" in variables


def test_the_scripts(tmp_path: Path) -> None:
    environment = fake_cluster(tmp_path)
    here = environment | {"NNODES": "2", "HEAD": "node01", "MAX_RESTARTS": "2"}
    done = bash("torchrun.sh", "my config.yaml", "--seed=1", environment=here)
    assert (done.returncode, done.stderr) == (0, "")
    rest = ["-m", "sage_fast", "train", "my config.yaml"]
    meeting = ["--rdzv_endpoint=node01:29500", "--rdzv_id=sage-fast", "--max-restarts=2"]
    assert_called(tmp_path, [*meeting, *rest, "--seed=1"])
    assert "usage" in bash("torchrun.sh", environment=here).stderr

    done = bash("slurm.sbatch", environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    meeting = ["--rdzv_endpoint=node03:12077", "--rdzv_id=77", "--max-restarts=3"]
    rest += ["--output_dir", str(tmp_path / "my runs"), "--resume", "auto", "--seed=1", "--distributed.sp=2"]
    assert_called(tmp_path, [*meeting, *rest])
    assert not (tmp_path / "scontrol-calls").exists()


@pytest.mark.parametrize(("status", "restarts", "requeued"), [("137", "3", True), ("1", "20", False)])
def test_the_slurm_script_queues_a_failed_job_again(tmp_path: Path, status: str, restarts: str, requeued: bool) -> None:
    environment = fake_cluster(tmp_path) | {"STATUS": status, "SLURM_RESTART_COUNT": restarts}
    assert bash("slurm.sbatch", environment=environment).returncode == int(status)
    assert (tmp_path / "scontrol-calls").exists() == requeued


def test_the_slurm_script_ends_for_a_configuration_that_cannot_run(tmp_path: Path) -> None:
    environment = fake_cluster(tmp_path)
    script(tmp_path / "python", "exit 2")
    assert bash("slurm.sbatch", environment=environment).returncode == 2
    assert not (tmp_path / "arguments").exists() and not (tmp_path / "scontrol-calls").exists()
    del environment["CONFIG"]
    assert "Which run?" in bash("slurm.sbatch", environment=environment).stderr


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_slurm_script_saves_and_comes_back_at_the_end_of_its_time(tmp_path: Path, number: signal.Signals) -> None:
    job = subprocess.Popen(
        ["bash", str(ROOT / "configs/launch/slurm.sbatch")],
        env=fake_cluster(tmp_path) | {"LASTS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "arguments").exists() or "--rdzv_id=77" not in (tmp_path / "arguments").read_text():
        time.sleep(0.05)
    time.sleep(0.2)
    job.send_signal(number)
    printed, _ = job.communicate(timeout=10)
    assert job.returncode == 0
    assert "saved" in printed and "queueing it again" in printed
    assert (tmp_path / "scontrol-calls").read_text() == "requeue 77\n"
