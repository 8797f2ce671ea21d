"""One profiled update: phases, blocks and operators where they belong, files, and nothing left behind."""

import gzip
import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.run.run import build_trainer
from sage_fast.tools.profiling import BLOCK, TABLE_JSON, TABLE_TEXT, TRACE, Profile, profile_update, summarise
from sage_fast.trainer import PHASE_PREFIX

pytestmark = pytest.mark.slow

MakeRun = Callable[..., RunConfig]
PHASES = {"rollout", "decode", "reward", "anchor", "update", "optimizer"}


@pytest.fixture
def profiled(tiny_run: MakeRun, tmp_path: Path) -> Profile:
    trainer = build_trainer(tiny_run("--training.anchor_interval=2"))
    result = profile_update(trainer, tmp_path / "profile", warmup=1, memory=True, top=3)
    for block in trainer.policy.transformer.transformer_blocks:
        assert not block._forward_hooks and not block._forward_pre_hooks, "the model is as it was"
    assert trainer.update == 2
    return result


def test_phases_hold_their_blocks_and_operators(profiled: Profile, tmp_path: Path) -> None:
    phases = {phase.phase: phase for phase in profiled.phases}
    assert set(phases) == PHASES
    # 4 steps, two branches, two blocks; the anchor lies behind at the second update.
    assert [phases[name].blocks for name in ("rollout", "anchor", "update", "decode")] == [16, 16, 16, 0]
    rows = {(row.phase, row.name): row for row in profiled.rows}
    assert any("attention" in name for phase, name in rows if phase == "rollout")
    assert any("attention" in name and "backward" in name for phase, name in rows if phase == "update")
    assert not any("backward" in name for phase, name in rows if phase in ("rollout", "anchor"))
    assert any("AdamW.step" in name for phase, name in rows if phase == "optimizer")
    assert rows["rollout", BLOCK].calls == 16
    for name in phases:
        own = [row for row in profiled.rows if row.phase == name]
        assert sum(row.share for row in own) == pytest.approx(1.0)
        # One thread at a time works on a CPU, so operators do not take longer than their phase.
        assert 0 < sum(row.seconds for row in own) <= 1.01 * phases[name].seconds + 1e-3
    assert any(row.allocated for row in profiled.rows)


def test_the_files_say_the_same(profiled: Profile, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == sorted([TRACE, TABLE_TEXT, TABLE_JSON])
    with gzip.open(folder / TRACE, "rt", encoding="utf-8") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {PHASE_PREFIX + phase for phase in PHASES} <= names and BLOCK in names
    tree = json.loads((folder / TABLE_JSON).read_text(encoding="utf-8"))
    assert tree == asdict(profiled)
    text = (folder / TABLE_TEXT).read_text(encoding="utf-8")
    assert text == profiled.to_text(3) + "\n" and all(f"{phase}: " in text for phase in PHASES)


def test_the_command(tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    words = shlex.split(f"profile {file} --output {tmp_path / 'out'} --top 2 --warmup 0")
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "rollout: " in text and f"Written to {tmp_path / 'out'}." in text
    assert not (tmp_path / "run").exists(), "no run was begun"
    assert main([*words, "--warmup", "-1"]) == 2
    assert "--warmup is -1" in capsys.readouterr().err


def event(name: str, start: float, end: float, own: float) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name="CPU"),
        self_cpu_time_total=own,
        self_device_time_total=2 * own,
    )


def test_an_operator_belongs_to_the_innermost_phase_of_its_time() -> None:
    events = [
        event(PHASE_PREFIX + "update", 0, 1_000_000, 0),
        event("mm", 10, 20, 300_000),
        event(PHASE_PREFIX + "optimizer", 600_000, 900_000, 0),
        event("step", 700_000, 800_000, 100_000),
        event("mm", 950_000, 960_000, 100_000),
        event("after", 2_000_000, 2_000_001, 1),
    ]
    found = summarise(events, "cpu", memory=False)
    assert {(r.phase, r.name, r.calls, r.seconds) for r in found.rows} == {
        ("update", "mm", 2, 0.4),
        ("optimizer", "step", 1, 0.1),
    }
    assert {p.phase: p.seconds for p in found.phases} == pytest.approx({"update": 0.7, "optimizer": 0.3})
    on_gpu = summarise(events, "cuda:0", memory=False)
    assert {r.name: r.seconds for r in on_gpu.rows} == pytest.approx({"mm": 0.8, "step": 0.2})
