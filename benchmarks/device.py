"""Everything that needs a GPU in one run of under 8 minutes, most valuable first, into one JSON file.

    python -m benchmarks device             kernel parity, ceilings, kernel bandwidth, the full-size transformer against
                                            diffusers, sanitizer; a short table last
    python -m benchmarks device --smoke     the same code anywhere; the sanitizer's program runs without the sanitizer

The file is written again after every stage, so a run that is cut short leaves what it had. A stage that would start
after the time budget is skipped and says so.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness, kernels, policy, policy_report
from benchmarks.kernels import Plan

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = ("memcheck", "racecheck")
SANITIZER_SECONDS = 90.0
"""What the policy stage leaves of the budget."""


@dataclass(kw_only=True)
class DeviceRun:
    """State of a run: what is measured, what is known so far, how much time is left."""

    plan: Plan
    path: Path | None
    budget: float
    """Seconds from the start to the start of the last stage."""
    result: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.monotonic() - self.started)

    def stage(self, name: str, work: Callable[["DeviceRun"], dict[str, Any]]) -> None:
        """Run a stage, merge what it returns into the result and save that."""
        began = time.monotonic()
        if self.left <= 0:
            status: dict[str, Any] = {"status": f"skipped: the budget of {self.budget:.0f} s is used up"}
        else:
            print(f"[{began - self.started:5.0f} s] {name}", flush=True)
            self.result |= work(self)
            status = {"status": "done", "seconds": time.monotonic() - began}
        self.result.setdefault("stages", {})[name] = status
        if self.path is not None:
            harness.write_result(self.path, self.result)


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
    """The full-size transformer against diffusers, as far as the budget goes."""

    def save(result: dict[str, Any]) -> None:
        if run.path is not None:
            harness.write_result(run.path, run.result | result)

    return policy.run_stages(
        policy.PolicyRun(
            device=run.plan.device,
            smoke=run.plan.smoke,
            budget=run.left - SANITIZER_SECONDS,
            save=save,
            result={"matmul": run.result["matmul"]},
        )
    )


def sanitizer_stage(run: DeviceRun) -> dict[str, Any]:
    """compute-sanitizer over every kernel, one tool after the other."""
    if run.plan.smoke:
        return {"sanitizer": {"dry run": run_sanitizer([], run.left)}}
    tool = find_sanitizer()
    if tool is None:
        return {"sanitizer": {"status": "not run: compute-sanitizer is neither on PATH nor under CUDA_HOME/bin"}}
    return {
        "sanitizer": {
            name: run_sanitizer([tool, "--tool", name, "--error-exitcode", "9"], max(run.left, 1.0))
            for name in SANITIZERS
        }
    }


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
    for name, found in result.get("sanitizer", {}).items():
        if isinstance(found, dict):
            lines.append(f"{name}: {'passed' if found['passed'] else 'FAILED'}, {found['status']}")
        else:
            lines.append(f"sanitizer {found}")
    skipped = [f"{name} {stage['status']}" for name, stage in result["stages"].items() if stage["status"] != "done"]
    return "\n".join(lines + skipped)


def succeeded(result: dict[str, Any]) -> bool:
    """Whether every stage ran, everything passed its parity and no sanitizer complained."""
    sanitizer = result.get("sanitizer", {}).values()
    return (
        all(stage["status"] == "done" for stage in result["stages"].values())
        and not result["parity_failures"]
        and ("policy_cells" not in result or policy_report.succeeded(result))
        and all(isinstance(found, dict) and found["passed"] for found in sanitizer)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 unless everything passed."""
    parser = kernels.parser_of("device", __doc__.split("\n")[0])
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no further stage starts")
    options = parser.parse_args(argv)
    plan = kernels.plan_of(options)
    environment = harness.environment()
    path = options.output or (None if plan.smoke else harness.result_file(environment))
    run = DeviceRun(plan=plan, path=path, budget=options.budget)
    run.result |= {"environment": environment, "smoke": plan.smoke}
    for name, work in STAGES.items():
        run.stage(name, work)
    print(table(run.result, smoke=plan.smoke))
    if path is not None:
        print(f"written to {path}")
    return 0 if succeeded(run.result) else 1


if __name__ == "__main__":
    sys.exit(main())
