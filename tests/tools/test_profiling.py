"""One profiled update: its phases, blocks and operators, and its files."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.tools.profiling import BLOCK, TABLE, TRACE
from sage_fast.trainer import PHASE_PREFIX

pytestmark = pytest.mark.slow


def test_the_trace_and_the_table_hold_phases_blocks_and_operators(
    tiny_run: Callable[..., RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "new.yaml"
    output = tmp_path / "profile"
    file.write_text(dump_config(tiny_run("--training.anchor_interval=2")))
    assert (
        main(
            [
                "profile",
                str(file),
                f"--output_dir={output}",
                "--warmup=1",
                "--memory",
                "--top=500",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert f"Written to {output}." in printed and not (tmp_path / "run").exists(), (
        "no run was begun"
    )
    table = (output / TABLE).read_text(encoding="utf-8")
    assert table in printed and "attention" in table and "CPU Mem" in table
    with gzip.open(output / TRACE, "rt", encoding="utf-8") as trace:
        names = [event.get("name") for event in json.load(trace)["traceEvents"]]
    for phase in ("rollout", "decode", "reward", "anchor", "update", "optimizer"):
        assert PHASE_PREFIX + phase in table and PHASE_PREFIX + phase in names
    # 4 steps, two branches, two blocks, in rollout, anchor (which lies behind at the
    # second update) and update.
    assert names.count(BLOCK) == 48
