"""Everything that needs a GPU in one run of under 9 minutes, most valuable first, into one JSON file.

    python -m benchmarks device             kernel parity, ceilings, kernel bandwidth, the full-size transformer against
                                            diffusers, FSDP2 on one rank, a block, decoding, checkpoint and host,
                                            sanitizer; a table last
    python -m benchmarks device --smoke     the same code anywhere; the sanitizer's program runs without the sanitizer

The file is written again after every stage, so a run that is cut short leaves what it had, and the next run of the
same commit on the same device goes on from there: what is done is not repeated, unless by --fresh. A stage has a share
of the time (`LIMITS`) and of the budget at most; one that would start after the budget is skipped and says so.

It needs torch, triton, numpy, diffusers, transformers, peft and pytest. pytest-benchmark keeps the rounds of the small
ones where it is installed; NVML (nvidia-ml-py) adds clocks, power and energy.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import blocks, harness, kernels, policy, policy_report, sharded, trainer_costs, vae
from benchmarks.kernels import Plan

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = ("memcheck", "racecheck")
BUDGET = 510.0
"""Seconds of a whole run."""
LIMITS = {
    "parity": 75.0,
    "ceilings": 20.0,
    "kernels": 120.0,
    "policy": 260.0,
    "sharded": 110.0,
    "blocks": 60.0,
    "vae": 45.0,
    "costs": 45.0,
}
"""Most seconds of a stage; the others have what is left."""


class StageTimeout(KeyboardInterrupt):
    """A stage has used its time up. An interrupt, because pytest goes on after anything else."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `StageTimeout` in here after so many seconds; in other threads than the main one nothing is limited."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise StageTimeout

    handler = signal.signal(signal.SIGALRM, stop)
    began = time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        # A timer that was running before (a test's own time limit) goes on.
        signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - began), 1e-3) if outer else 0.0)
        signal.signal(signal.SIGALRM, handler)


@dataclass(kw_only=True)
class DeviceRun:
    """State of a run: what is measured, what is known so far, how much time is left."""

    plan: Plan
    path: Path | None
    budget: float
    """Seconds from the start to the end of the last stage."""
    result: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.monotonic() - self.started)

    def stage(self, name: str, work: Callable[["DeviceRun"], dict[str, Any]]) -> None:
        """Run a stage, merge what it returns into the result and save that. One that is done is left alone."""
        stages = self.result.setdefault("stages", {})
        elapsed = f"[{time.monotonic() - self.started:5.0f} s]"
        if stages.get(name, {}).get("status") == "done":
            print(f"{elapsed} {name}: done before", flush=True)
            return
        if self.left <= 0:
            stages[name] = {"status": f"skipped: the budget of {self.budget:.0f} s is used up"}
        else:
            print(f"{elapsed} {name}", flush=True)
            # A smoke run measures nothing, so on a busy machine it may take its time.
            limit = self.left if self.plan.smoke else LIMITS.get(name, self.left)
            stages[name] = self._work(work, min(self.left, limit))
        self.save()

    def save(self) -> None:
        """Write the result so far."""
        if self.path is not None:
            harness.write_result(self.path, self.result)

    def _work(self, work: Callable[["DeviceRun"], dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Status of a stage that has been run for at most so many seconds."""
        began = time.monotonic()
        status = "done"
        with harness.telemetry() as record:
            try:
                with time_limit(seconds):
                    found = work(self)
                status = found.pop("status", status)
                self.result |= found
            except StageTimeout:
                status = f"stopped after {seconds:.0f} s"
            except harness.FAILURES as error:
                # An interrupt inside pytest ends it with a status, which comes out as an error.
                late = time.monotonic() - began >= seconds
                lines = str(error).strip().splitlines() or [""]
                status = f"stopped after {seconds:.0f} s" if late else f"failed: {type(error).__name__}: {lines[0]}"
            harness.reset_clock()
            policy.release(None)
        return {"status": status} | record


def previous_result(path: Path, environment: dict[str, Any], *, smoke: bool) -> dict[str, Any] | None:
    """What an earlier run of this commit on this device has measured; None where there is nothing to go on from."""
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    known = found.get("environment", {})
    same = all(known.get(key) == environment[key] for key in ("commit", "gpu", "packages"))
    return found if same and found.get("smoke") == smoke and "stages" in found else None


def newest_file(environment: dict[str, Any], folder: Path = harness.RESULTS) -> Path:
    """The file of a run in this environment: of an earlier day, if there is one of this commit and device."""
    today = harness.result_file(environment, folder)
    _, _, commit = today.stem.partition(re.match(r"\d{4}-\d\d-\d\d-", today.stem)[0])  # type: ignore[index]
    earlier = sorted(today.parent.glob(f"????-??-??-{commit}.json"))
    return earlier[-1] if earlier else today


def parity_stage(run: DeviceRun) -> dict[str, Any]:
    """Every op against the float64 oracle: bf16 and fp32, odd shapes, on a GPU shapes A and B too."""
    return {"parity": run.plan.check_parity(), "parity_failures": run.plan.failures}


def ceilings_stage(run: DeviceRun) -> dict[str, Any]:
    """Copy bandwidth and the rate of a large matrix product, the denominators of every share."""
    device, smoke = run.plan.device, run.plan.smoke
    return {
        "copy": harness.copy_bandwidth(device, smoke=smoke),
        "matmul": harness.matmul_peak(device, smoke=smoke),
    }


def kernels_stage(run: DeviceRun) -> dict[str, Any]:
    """Bandwidth and ratios of every op that passed its parity."""
    return {"kernels": kernels.time_kernels(run.plan, run.result["copy"]["gb_per_s"])}


def policy_stage(run: DeviceRun) -> dict[str, Any]:
    """The full-size transformer against diffusers, as far as the time goes; what an earlier run measured is kept."""

    def save(result: dict[str, Any]) -> None:
        if run.path is not None:
            harness.write_result(run.path, run.result | result)

    run.result.pop("policy_skipped", None)
    known: dict[str, Any] = {key: run.result[key] for key in ("matmul", "policy_cells") if key in run.result}
    limit = min(LIMITS["policy"], run.left)
    result = policy.run_stages(
        # Its own clock ends it before the stage's does.
        policy.PolicyRun(
            device=run.plan.device, smoke=run.plan.smoke, budget=max(limit - 15.0, 0.6 * limit), save=save, result=known
        )
    )
    late = [name for name, cell in result["policy_cells"].items() if cell["status"].startswith("skipped: it takes")]
    late += result.get("policy_skipped", [])
    return result | ({"status": f"not finished: {', '.join(late)}"} if late else {})


def sharded_stage(run: DeviceRun) -> dict[str, Any]:
    """Steps under FSDP2 on one rank against the unwrapped one; what an earlier run measured is kept."""

    def save(found: dict[str, Any]) -> None:
        run.result |= found
        run.save()

    limit = min(LIMITS["sharded"], run.left)
    plan = sharded.ShardedRun(
        device=run.plan.device,
        smoke=run.plan.smoke,
        # Its own clock ends it before the stage's does.
        budget=limit - 10.0,
        save=save,
        matmul_tflop_per_s=run.result.get("matmul", {}).get("tflop_per_s"),
    )
    return sharded.run(plan, run.result.get("sharded"))


def blocks_stage(run: DeviceRun) -> dict[str, Any]:
    """One block against diffusers' as shipped, packed and compiled."""
    return blocks.run(
        run.plan.device, smoke=run.plan.smoke, matmul_tflop_per_s=run.result.get("matmul", {}).get("tflop_per_s")
    )


def vae_stage(run: DeviceRun) -> dict[str, Any]:
    """Decoding against diffusers."""
    return vae.run(run.plan.device, smoke=run.plan.smoke)


def costs_stage(run: DeviceRun) -> dict[str, Any]:
    """Stall of a checkpoint and the host's share; the toy run is a matter of CPUs."""
    return trainer_costs.run(run.plan.device, smoke=run.plan.smoke, toy=False)


def sanitizer_stage(run: DeviceRun) -> dict[str, Any]:
    """compute-sanitizer over every kernel, one tool after the other."""
    if run.plan.smoke:
        return {"sanitizer": {"dry run": run_sanitizer([], run.left)}}
    tool = find_sanitizer()
    if tool is None:
        return {"sanitizer": {"status": "not run: compute-sanitizer is neither on PATH nor under CUDA_HOME/bin"}}
    found = {}
    for number, name in enumerate(SANITIZERS):
        # An equal share of what is left, and a moment to write it down.
        seconds = max((run.left - 5.0) / (len(SANITIZERS) - number), 1.0)
        found[name] = run_sanitizer([tool, "--tool", name, "--error-exitcode", "9"], seconds)
    late = [name for name, outcome in found.items() if outcome["status"].startswith("stopped")]
    return {"sanitizer": found} | ({"status": f"not finished: {', '.join(late)}"} if late else {})


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, from PATH or the CUDA toolkit."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{toolkit}/bin")


def run_sanitizer(prefix: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run `benchmarks.sanitize` under a tool: {"passed", "errors", "status", "tail"}."""
    command = [*prefix, sys.executable, "-m", "benchmarks.sanitize"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "errors": None, "status": f"stopped after {timeout:.0f} s"}
    return read_sanitizer(done.returncode, done.stdout + done.stderr, under_tool=bool(prefix))


def read_sanitizer(returncode: int, output: str, *, under_tool: bool) -> dict[str, Any]:
    """What a sanitizer's run says. It passed if it said so, its program finished, and nothing was reported."""
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    errors = int(summary[1]) if summary else None
    ran = re.search(r"\d+ forward and backward passes of \d+ ops ran", output)
    passed = returncode == 0 and ran is not None and (errors == 0 or not under_tool)
    tail = [line for line in output.splitlines() if line.strip()][-5:]
    return {"passed": passed, "errors": errors, "status": ran[0] if ran else f"exit status {returncode}", "tail": tail}


STAGES: dict[str, Callable[[DeviceRun], dict[str, Any]]] = {
    "parity": parity_stage,
    "ceilings": ceilings_stage,
    "kernels": kernels_stage,
    "policy": policy_stage,
    "sharded": sharded_stage,
    "blocks": blocks_stage,
    "vae": vae_stage,
    "costs": costs_stage,
    "sanitizer": sanitizer_stage,
}
"""In the order of their value."""


def table(result: dict[str, Any], *, smoke: bool) -> str:
    """The run in a screenful."""
    lines = []
    if "copy" in result:
        shown = {"parity_failures": {}, "kernels": []} | result
        lines.append(kernels.table(shown, smoke=smoke))
        lines.append(f"bfloat16 product {result['matmul']['tflop_per_s']:.1f} TFLOP/s")
    if "policy_cells" in result:
        lines += ["", policy_report.table(result, smoke=smoke), ""]
    for key, suite in (("sharded", sharded), ("blocks", blocks), ("vae", vae), ("host", trainer_costs)):
        if key in result:
            lines += [suite.table(result), ""]
    for name, found in result.get("sanitizer", {}).items():
        if isinstance(found, dict):
            lines.append(f"{name}: {'passed' if found['passed'] else 'FAILED'}, {found['status']}")
        else:
            lines.append(f"sanitizer {found}")
    unfinished = [f"{name} {stage['status']}" for name, stage in result["stages"].items() if stage["status"] != "done"]
    if unfinished:
        unfinished.append("The same command goes on from here.")
    return "\n".join(lines + unfinished)


def succeeded(result: dict[str, Any]) -> bool:
    """Whether every stage ran, everything passed its parity and no sanitizer complained."""
    sanitizer = result.get("sanitizer", {}).values()
    return (
        all(stage["status"] == "done" for stage in result["stages"].values())
        and not result.get("parity_failures", ["parity was not checked"])
        and ("policy_cells" not in result or policy_report.succeeded(result))
        and ("sharded" not in result or sharded.succeeded(result))
        and ("blocks" not in result or blocks.succeeded(result))
        and ("vae" not in result or vae.succeeded(result))
        and ("host" not in result or trainer_costs.succeeded(result))
        and all(isinstance(found, dict) and found["passed"] for found in sanitizer)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 unless everything passed."""
    parser = kernels.parser_of("device", (__doc__ or "").split("\n")[0])
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds of the whole run ({BUDGET:.0f})")
    parser.add_argument("--fresh", action="store_true", help="measure everything again, in a file of today")
    options = parser.parse_args(argv)
    plan = kernels.plan_of(options)
    environment = harness.environment()
    path = options.output
    if path is None and not plan.smoke:
        path = harness.result_file(environment) if options.fresh else newest_file(environment)
    run = DeviceRun(plan=plan, path=path, budget=options.budget)
    known = None if path is None or options.fresh else previous_result(path, environment, smoke=plan.smoke)
    if known is not None:
        print(f"going on from {path}")
        run.result |= known
        plan.failures.update(known.get("parity_failures", {}))
    else:
        run.result |= {"environment": environment, "smoke": plan.smoke}
    for name, work in STAGES.items():
        run.stage(name, work)
    print(table(run.result, smoke=plan.smoke))
    if path is not None:
        print(f"written to {path}")
    return 0 if succeeded(run.result) else 1


if __name__ == "__main__":
    sys.exit(main())
