"""Small benchmarks: pytest-benchmark times them, the device's clock is read, and their records come back.

Where pytest-benchmark is missing (a bare machine with a GPU), or does nothing (a worker of parallel tests), the rounds
are measured by `harness.device_clock` directly. Either way a record is {"extra_info", "stats": {"data": seconds}}.
"""

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Rounds:
    """What the fixture `benchmark` is without pytest-benchmark: as much of it as is used here."""

    extra_info: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def pedantic(
        self, target: Callable[[], object], *, rounds: int, warmup_rounds: int = 0, iterations: int = 1
    ) -> None:
        """Call `target` `iterations` times in each of `rounds` rounds; the seconds are those of one call."""
        self.seconds = harness.samples(target, calls=iterations, rounds=rounds, warmup=warmup_rounds * iterations)


@dataclass
class RoundsPlugin:
    """Gives the fixture `benchmark` to tests and keeps their records."""

    records: list[dict[str, Any]] = field(default_factory=list)

    @pytest.fixture
    def benchmark(self) -> Iterator[Rounds]:
        """One per test."""
        rounds = Rounds()
        yield rounds
        if rounds.seconds:
            self.records.append({"extra_info": rounds.extra_info, "stats": {"data": rounds.seconds}})


@dataclass
class Calls:
    """The plugin that hands named calls to `test_call`, one test each."""

    by_name: Mapping[str, Callable[[], object]]
    rounds: int
    warmup: int = 1

    @pytest.fixture
    def timed(self) -> "Calls":
        """The plugin itself."""
        return self

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One benchmark per call."""
        if "timed" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.by_name))


def test_call(benchmark: Any, timed: Calls, name: str) -> None:
    """Collected by pytest through `time_calls`."""
    benchmark.extra_info["name"] = name
    benchmark.pedantic(timed.by_name[name], rounds=timed.rounds, warmup_rounds=timed.warmup, iterations=1)


def time_calls(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1
) -> dict[str, harness.Quantiles]:
    """Seconds of each call.

    Raises:
        RuntimeError: one of them failed; pytest has printed why.
    """
    records = run(__file__, Calls(by_name=calls, rounds=rounds, warmup=warmup))
    return {record["extra_info"]["name"]: harness.Quantiles.of(record["stats"]["data"]) for record in records}


def run(file: str | Path, plugin: object) -> list[dict[str, Any]]:
    """Run the benchmarks of a file by pytest and return their records.

    Raises:
        RuntimeError: one of them failed; pytest has printed why.
    """
    # No settings of a project: theirs may name plugins that are not installed.
    options = ["-qq", "--disable-warnings", "-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout"]
    fallback = RoundsPlugin()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "benchmark.json"
        if importlib.util.find_spec("pytest_benchmark") is None or "PYTEST_XDIST_WORKER" in os.environ:
            options += ["-p", "no:benchmark"]
            status = pytest.main([str(file), *options], plugins=[plugin, fallback])
        else:
            options += ["--benchmark-quiet", "--benchmark-timer=benchmarks.harness.device_clock"]
            status = pytest.main([str(file), *options, f"--benchmark-json={record}"], plugins=[plugin])
        if status != 0:
            raise RuntimeError(f"the benchmarks of {Path(file).name} failed (pytest status {int(status)})")
        if not record.exists():
            return fallback.records
        records: list[dict[str, Any]] = json.loads(record.read_text("utf-8"))["benchmarks"]
        return records
