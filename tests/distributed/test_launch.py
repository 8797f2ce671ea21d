"""How processes are described, numbered and restarted, what they print together, and the scripts that start them."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from sage_fast.config.errors import ConfigError
from sage_fast.distributed import launch
from sage_fast.distributed.hostfile import Host, HostfileError, main, plan_node, read_hostfile
from sage_fast.distributed.launch import adopt_slurm, effective_resume, expand_counts, expand_hosts, rank_device
from sage_fast.run.interrupt import SAME_KEY_PRESS, GracefulStop
from tests.distributed.ranks import try_ranks

ROOT = Path(__file__).resolve().parents[2]

SLURM_TASK = {
    "SLURM_JOB_ID": "40321",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHON"):
            monkeypatch.delenv(name)


# ---------------------------------------------------------------------------------------------- SLURM


def test_a_task_of_srun_is_described_as_torchrun_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no scontrol
    environment = dict(SLURM_TASK)
    assert adopt_slurm(environment)
    added = {key: value for key, value in environment.items() if key not in SLURM_TASK}
    assert added == {
        "RANK": "9",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(12000 + 40321 % 20000),
    }


def test_an_address_that_is_given_is_kept() -> None:
    environment = SLURM_TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    adopt_slurm(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "4000")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "64", "SLURM_JOB_ID": "1"},  # the shell of a batch script
        SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "1"},
        SLURM_TASK | {"RANK": "3"},  # torchrun inside a step
    ],
    ids=["no SLURM", "batch shell", "one task", "torchrun in a step"],
)
def test_others_are_left_alone(environment: dict[str, str]) -> None:
    before = dict(environment)
    assert not adopt_slurm(environment)
    assert environment == before


@pytest.mark.parametrize(
    "broken", [{"SLURM_STEP_TASKS_PER_NODE": "8"}, {"SLURM_PROCID": None}, {"SLURM_STEP_TASKS_PER_NODE": "8*2"}]
)
def test_an_environment_that_cannot_be_read_is_refused(broken: dict[str, str | None]) -> None:
    environment = {key: value for key, value in (SLURM_TASK | broken).items() if value is not None}
    with pytest.raises(ConfigError, match="SLURM step of 12 tasks.*one task per GPU"):
        adopt_slurm(environment)


def test_scontrol_is_asked_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "scontrol", 'echo "host-of $3" | tr " " "_"; echo second')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch.first_host("gpu[03-04]") == "host-of_gpu[03-04]"


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,07],gpu1", ["node01", "node02", "node03", "node07", "gpu1"]),
        ("n[9-11]-ib", ["n9-ib", "n10-ib", "n11-ib"]),
        ("r[1-2]n[3,4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_node_lists(nodes: str, hosts: list[str]) -> None:
    assert expand_hosts(nodes) == hosts


@pytest.mark.parametrize("nodes", ["node[01-03", "node[a-b]", "a,,b"])
def test_node_lists_that_cannot_be_read(nodes: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_hosts(nodes)


def test_tasks_per_node() -> None:
    assert expand_counts("8(x2),4") == [8, 8, 4]


# ---------------------------------------------------------------------------------------------- device, restarts


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return chosen


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_rank_takes_the_gpu_of_its_number(
    name: str, two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device(name) == torch.device("cuda", 1)
    assert two_gpus == [torch.device("cuda", 1)]


def test_a_gpu_that_is_bound_to_the_task_is_number_0(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5")
    assert rank_device("cuda") == torch.device("cuda", 0)


def test_more_processes_than_gpus(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"2 GPU\(s\).*--nproc_per_node=2"):
        rank_device("auto")
    assert not two_gpus


def test_one_gpu_named_for_several_processes(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'cuda:0'.*a GPU of its own"):
        rank_device("cuda:0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert rank_device("cuda:1") == torch.device("cuda", 1)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    assert rank_device("auto") == rank_device("cpu") == torch.device("cpu")
    assert torch.get_num_threads() == threads
    with pytest.raises(ConfigError, match="sees no GPU"):
        rank_device("cuda")
    with pytest.raises(ConfigError, match="'tpu'.*Use auto or cpu"):
        rank_device("tpu")


@pytest.mark.parametrize("key", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restarted_job_goes_on(key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert effective_resume("none", {}) == effective_resume("none", {key: "0"}) == "none"
    assert not caplog.messages
    assert effective_resume("none", {key: "2"}) == "auto"
    assert "Restart 2" in caplog.text
    assert effective_resume("runs/a/checkpoints/step-10", {key: "2"}) == "runs/a/checkpoints/step-10"


# ---------------------------------------------------------------------------------------------- speaking as one


def report(folder: Path, port: int | None, texts: list[str], met: bool) -> None:
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 2)
    os.environ["MASTER_PORT"] = str(port or 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "SECONDS_TO_CONNECT", 0.2)
        patch.setattr(dist, "is_initialized", lambda: met)
        text = texts[launch.rank()]
        if text:
            launch.report_error(f"error: {text}")


@pytest.fixture
def agent() -> Iterator[int]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield store.port
    del store


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (["bad key"] * 3, ["error: bad key"]),
        (["", "no file", "no file"], ["[rank *] error: no file"]),
        (["bad key", "no file", "bad key"], ["error: bad key", "[rank *] error: no file"]),
    ],
    ids=["all alike", "those of one node", "one its own"],
)
def test_an_error_is_printed_once(tmp_path: Path, agent: int, texts: list[str], lines: list[str]) -> None:
    try_ranks(report, 3, tmp_path, agent, texts, False)
    printed = (tmp_path / "printed").read_text().splitlines()
    assert sorted(re.sub(r"rank \d", "rank *", line) for line in printed) == sorted(lines)


def test_without_a_store_rank_0_speaks_before_they_meet_and_all_after(tmp_path: Path) -> None:
    for met, ranks in ((False, ["error: gone"]), (True, ["[rank 1] error: gone", "error: gone"])):
        folder = tmp_path / str(met)
        folder.mkdir()
        try_ranks(report, 2, folder, None, ["gone"] * 2, met)
        lines = (folder / "printed").read_text().splitlines()
        assert sorted(line for line in lines if "error: gone" in line and "c10d" not in line) == ranks


def test_a_process_alone_just_prints(capsys: pytest.CaptureFixture[str]) -> None:
    launch.report_error("error: no such file")
    assert capsys.readouterr().err == "error: no such file\n"


@pytest.mark.parametrize(
    ("rank", "expected"), [("0", "INFO hello\nWARNING careful\n"), ("3", "[rank 3] WARNING careful\n")]
)
def test_other_ranks_log_warnings_with_their_rank(rank: str, expected: str) -> None:
    code = (
        "import logging\nfrom sage_fast.distributed.launch import configure_logging\nconfigure_logging()\n"
        "logging.getLogger('a').info('hello')\nlogging.getLogger('a').warning('careful')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"RANK": rank}, capture_output=True, text=True, check=True
    )
    assert done.stderr == expected


def meet_and_sum(port: int, attempt: int) -> float:
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    time.sleep(0.5 if launch.rank() == attempt else 0.0)  # somebody else is late each time
    dist.init_process_group("gloo", timeout=timedelta(seconds=10), **launch.meeting_place(10.0))
    total = torch.tensor([launch.rank() + 1.0])
    dist.all_reduce(total)
    return total.item()


def test_restarted_processes_meet_in_the_store_of_those_before(agent: int) -> None:
    for attempt in range(3):
        assert try_ranks(meet_and_sum, 3, agent, attempt, timeout=20) == [("value", 6.0)] * 3


def meet_alone(port: int) -> None:
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if launch.rank() != 1:
        launch.meeting_place(0.5)


def test_a_process_that_does_not_come(agent: int) -> None:
    texts = [str(text) for _, text in try_ranks(meet_alone, 3, agent, timeout=20)]
    assert "3 processes were to meet" in texts[0] and "did not answer" in texts[0] and "startup_timeout" in texts[2]


def test_without_an_agent_the_processes_meet_at_rank_0() -> None:
    assert launch.meeting_place(1.0) == {}


# ---------------------------------------------------------------------------------------------- stopping


@pytest.mark.signals
def test_one_key_press_that_comes_twice_is_one(capfd: pytest.CaptureFixture[str]) -> None:
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        time.sleep(SAME_KEY_PRESS + 0.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("finishing this update") == 1


@pytest.mark.signals
def test_torchrun_is_known_to_wait_only_so_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with GracefulStop():
        os.kill(os.getpid(), signal.SIGINT)
    text = capfd.readouterr().err
    assert "torchrun waits 30 s" in text and "again" not in text


def test_a_stop_file_asks_to_stop_and_is_gone_afterwards(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "STOP").touch()  # of another time
    with GracefulStop(tmp_path) as stop:
        assert not stop.requested
        (tmp_path / "STOP").touch()
        assert stop.requested and stop.requested
        assert (tmp_path / "STOP").exists()
    assert not (tmp_path / "STOP").exists()
    assert capfd.readouterr().err.count("saving after this update") == 1


def test_a_rank_that_does_not_speak(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with GracefulStop(announce=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------------------------------------- hostfile, scripts


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts.txt"
    path.write_text(text)
    return path


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def test_a_hostfile(tmp_path: Path) -> None:
    text = "# two nodes\nnode01 slots=8\n\nnode02.cluster slots=8 max_slots=16  # the other\n"
    hosts = read_hostfile(hostfile(tmp_path, text))
    assert hosts == [Host("node01", 8), Host("node02.cluster", 8)]
    assert plan_node(hosts, {"node02", "10.0.0.2"}).shell() == (
        "NNODES=2\nNODE_RANK=1\nNPROC_PER_NODE=8\nMASTER_ADDR=node01"
    )
    assert plan_node([Host("10.0.0.1", None), Host("10.0.0.2", None)], {"x", "10.0.0.2"}, 4).node_rank == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("node01 slots=eight", "hosts.txt:1: 'node01 slots=eight' cannot be read"),
        ("slots=8", "HOST slots=GPUS"),
        ("node01 slots=0", "cannot be read"),
        ("node01 slots=4\nnode01 slots=4", "hosts.txt:2: node01 stands there twice"),
        ("node01\nnode02 slots=8", "no number of GPUs"),
        ("node01 slots=8\nnode02 slots=4", r"different numbers of slots \(node01 slots=8, node02 slots=4\)"),
        ("node01 slots=8\nnode02 slots=8", "none of the hosts node01, node02 is this node, which answers to me"),
    ],
)
def test_hostfiles_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(HostfileError, match=message):
        plan_node(read_hostfile(hostfile(tmp_path, text)), {"me"})


def test_the_hostfile_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = hostfile(tmp_path, "a slots=2\nb slots=2\n")
    assert main([str(path), "--node_rank", "1"]) == 0
    assert "NODE_RANK=1" in capsys.readouterr().out
    assert main([str(path), "--node_rank", "2"]) == 2
    assert main([str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err


def bash(
    name: str, *arguments: str, environment: dict[str, str], timeout: float = 20
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "configs" / "launch" / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def fake_python(folder: Path) -> dict[str, str]:
    """An environment whose PYTHON writes down how it was called instead of starting a run."""
    script(
        folder / "python",
        f'if [[ "$2" == *hostfile ]]; then exec {sys.executable} "$@"; fi\n'
        f'printf "%s\\n" "$@" > {folder}/arguments; env > {folder}/environment; exit "${{STATUS:-0}}"',
    )
    return os.environ | {"PYTHON": str(folder / "python"), "PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_torchrun_script(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "node01 slots=8\nnode02 slots=8\n")
    environment = fake_python(tmp_path) | {"NODE_RANK": "1", "MAX_RESTARTS": "2"}
    done = bash("torchrun.sh", str(path), "my config.yaml", "--seed=1", environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "arguments").read_text().splitlines() == [
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=8",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=node01:29500",
        "--rdzv_conf=is_host=0",
        "--rdzv_id=sage-fast",
        "--max-restarts=2",
        "-m",
        "sage_fast",
        "train",
        "my config.yaml",
        "--seed=1",
    ]
    variables = (tmp_path / "environment").read_text()
    assert "TORCH_FR_BUFFER_SIZE=2000" in variables and "TORCH_NCCL_DUMP_ON_TIMEOUT=1" in variables


def test_the_torchrun_script_stops_at_a_bad_hostfile(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "elsewhere slots=8\n")
    done = bash("torchrun.sh", str(path), "config.yaml", environment=fake_python(tmp_path))
    assert done.returncode == 2 and "none of the hosts elsewhere is this node" in done.stderr
    assert not (tmp_path / "arguments").exists()
    assert "usage" in bash("torchrun.sh", str(path), environment=fake_python(tmp_path)).stderr


def fake_slurm(folder: Path) -> dict[str, str]:
    # srun ends when it gets SIGUSR1, as a run that has saved does.
    script(
        folder / "srun",
        f'printf "%s\\n" "$@" > {folder}/arguments\ntrap "echo saved; exit 0" USR1\n'
        'if [[ -n "${LASTS:-}" ]]; then for i in $(seq 100); do sleep 0.1; done; fi\nexit "${STATUS:-0}"',
    )
    script(folder / "scontrol", f'echo "$@" >> {folder}/scontrol-calls')
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "CONFIG": "my config.yaml",
        "OUTPUT_DIR": "/shared/my runs/one",
        "OVERRIDES": "--seed=1 --distributed.sp=2",
    }


def test_the_slurm_script(tmp_path: Path) -> None:
    done = bash("slurm.sbatch", environment=fake_slurm(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[arguments.index("-m") :] == [
        *("-m", "sage_fast", "train", "my config.yaml", "--output_dir", "/shared/my runs/one", "--resume", "auto"),
        *("--seed=1", "--distributed.sp=2"),
    ]
    assert not (tmp_path / "scontrol-calls").exists()


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"), [("1", "0", True), ("137", "3", True), ("2", "0", False), ("1", "20", False)]
)
def test_the_slurm_script_queues_a_failed_job_again(tmp_path: Path, status: str, restarts: str, requeued: bool) -> None:
    environment = fake_slurm(tmp_path) | {"STATUS": status, "SLURM_RESTART_COUNT": restarts}
    assert bash("slurm.sbatch", environment=environment).returncode == int(status)
    assert (tmp_path / "scontrol-calls").exists() == requeued


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_slurm_script_saves_and_comes_back_at_the_end_of_its_time(tmp_path: Path, number: signal.Signals) -> None:
    job = subprocess.Popen(
        ["bash", str(ROOT / "configs/launch/slurm.sbatch")],
        env=fake_slurm(tmp_path) | {"LASTS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "arguments").exists():
        time.sleep(0.05)
    time.sleep(0.2)
    job.send_signal(number)
    printed, _ = job.communicate(timeout=10)
    assert job.returncode == 0
    assert "saved" in printed and "queueing it again" in printed
    assert (tmp_path / "scontrol-calls").read_text() == "requeue 77\n"


def test_the_slurm_script_asks_for_what_it_needs(tmp_path: Path) -> None:
    environment = {key: value for key, value in fake_slurm(tmp_path).items() if key != "CONFIG"}
    done = bash("slurm.sbatch", environment=environment)
    assert done.returncode != 0 and "Which run?" in done.stderr
