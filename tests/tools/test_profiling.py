"""One profiled update: its phases, blocks and operators, files, and nothing left behind."""

import gzip
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.run.run import build_trainer
from sage_fast.tools.profiling import BLOCK, TABLE, TRACE, profile_update
from sage_fast.trainer import PHASE_PREFIX

pytestmark = pytest.mark.slow

PHASES = {"rollout", "decode", "reward", "anchor", "update", "optimizer"}


def test_the_trace_and_the_table_hold_phases_blocks_and_operators(
    tiny_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    trainer = build_trainer(tiny_run("--training.anchor_interval=2"))
    table = profile_update(trainer, tmp_path / "profile", warmup=1, memory=True, top=500)
    for block in trainer.policy.transformer.transformer_blocks:
        assert not block._forward_hooks and not block._forward_pre_hooks, "the model is as it was"
    assert trainer.update == 2
    assert all(PHASE_PREFIX + phase in table for phase in PHASES) and "attention" in table and "CPU Mem" in table
    assert (tmp_path / "profile" / TABLE).read_text(encoding="utf-8") == table + "\n"
    with gzip.open(tmp_path / "profile" / TRACE, "rt", encoding="utf-8") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert {PHASE_PREFIX + phase for phase in PHASES} <= set(names)
    # 4 steps, two branches, two blocks, in rollout, anchor (which lies behind at the second update) and update.
    assert names.count(BLOCK) == 48


def test_the_command(tiny_run: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    words = shlex.split(f"profile {file} --output {tmp_path / 'out'} --top 2 --warmup 0")
    assert main(words) == 0
    assert f"Written to {tmp_path / 'out'}." in capsys.readouterr().out
    assert not (tmp_path / "run").exists(), "no run was begun"
