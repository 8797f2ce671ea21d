"""Memory in the plan: its parts, the toy run that was measured, and what `auto` fills."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.planning import estimate
from sage_fast.planning.devices import DEVICES, gpu_memory_gb
from sage_fast.planning.estimate import settle_memory
from sage_fast.planning.memory import PROCESS, checkpoint_bytes
from sage_fast.planning.text import to_text
from sage_fast.planning.trace import meta_transformer
from sage_fast.planning.work import Layout
from tests.planning.small import ROOT, SMALL, small_plan

MakeRun = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("in_the_repository")


def test_components_of_memory_are_sizes() -> None:
    found = small_plan("--training.ema_decay=0.9", "--optimizer.name=adamw")
    update, step = (
        found.memory.phases[phase].parts() for phase in ("update", "optimizer")
    )
    trained = 4 * found.weights.trained
    latent = 4 * 32 * 3 * 4 * 6
    for name in ("adapters", "anchor", "average (EMA)"):
        assert update[name] == trained
    # Those of the first half of the videos too, which are gone when the optimizer moves
    # the weights.
    assert update["gradients"] == 2 * step["gradients"] == 2 * trained
    assert update["optimizer state"] == 2 * trained
    assert update["transformer"] == 2 * found.weights.total
    assert (
        update["trajectories"] == 8 * 41 * latent
        and update["anchor velocities"] == 8 * 20 * latent
    )
    assert found.memory.peak == max(held.total for held in found.memory.phases.values())


def test_an_anchor_and_an_old_policy_are_two_copies_and_two_velocities() -> None:
    words = (
        "--training.update=forward_process",
        "--optimizer.name=adamw",
        "--forward_process.levels=4",
    )
    old = ("--forward_process.old_decay=0.5",)
    anchor = ("--objective.kl_mode=fixed", "--objective.kl_position_fraction=0.5")
    neither = ("--forward_process.old_decay=null", "--objective.kl_mode=none")
    found = {}
    for name, more in {
        "none": neither,
        "old": (*neither[1:], *old),
        "anchor": (*neither[:1], *anchor),
    }.items():
        found[name] = small_plan(*words, *more)
    found["both"] = small_plan(*words, *old, *anchor)
    latent = 4 * 32 * 3 * 4 * 6
    for name, copies, kept, passes in (
        ("old", 1, 4, 4.0),
        ("anchor", 1, 2, 1.99),
        ("both", 2, 6, 5.99),
    ):
        update = found[name].memory.phases["update"].parts()
        assert update["anchor"] == 4 * found[name].weights.trained * copies
        assert update["anchor velocities"] == 8 * kept * latent
        assert found[name].visits.anchor == pytest.approx(passes)
        assert found[name].checkpoint - found["none"].checkpoint == update["anchor"]


def test_a_node_needs_cpu_memory_for_what_is_not_read_straight_to_its_gpus() -> None:
    """Neither for the transformer nor for the text encoder, but for whatever is
    offloaded.
    """
    plain = small_plan("--checkpoint.asynchronous=false").loading or {}
    assert sum(plain.values()) == PROCESS, (
        "rewards are elsewhere, the decoder takes nothing"
    )
    found = small_plan("--model.adaln=offload", "--checkpoint.asynchronous=false")
    assert (
        found.loading is not None
        and found.loading["weights that stay"] == 2.0 * found.weights.adaln
    )
    many = replace(found, layout=Layout(replicate=16)).loading
    assert many == {name: 8 * size for name, size in found.loading.items()}, (
        "a node has eight"
    )


def test_pinned_memory_counts_as_torch_rounds_it() -> None:
    """Each tensor takes a power of two of bytes: copies of a checkpoint, and shards in
    CPU memory.
    """
    transformer = meta_transformer(dict(SMALL), torch.float32)
    rounded = sum(
        2 ** math.ceil(math.log2(p.numel())) for p in transformer.parameters()
    )
    found = small_plan("--training.mode=full", "--model.dtype=float32")
    weights = found.weights
    loading = found.loading
    assert weights.pinned == rounded > 1.1 * weights.total and loading is not None
    copies = (
        weights.trained_pinned
        / weights.trained
        * checkpoint_bytes(found.config, weights)
    )
    assert weights.trained_pinned > 1.05 * weights.trained
    assert loading["weights that stay"] == pytest.approx(copies)


TOY_RUN = """
import json, sys
from pathlib import Path
from sage_fast.config.load import load_config
from sage_fast.planning.devices import measure_cpu
from sage_fast.planning.estimate import make_plan
from sage_fast.planning.memory import PICTURES
from sage_fast.run.run import Run
words = [f"--output_dir={sys.argv[1]}", "--training.num_updates=1", "--evaluation.noises=1", *sys.argv[2:]]
config = load_config("configs/toy_cpu.yaml", words)
# In the process that trains, so that libraries which the model imports count.
plan = make_plan(config, measure_cpu(1.0))
Run(config).train()
# Not `ru_maxrss`, which starts with what the parent process held when it forked.
status = Path("/proc/self/status").read_text()
peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
runtime = plan.memory.phases["encode"].runtime - PICTURES
found = {"predicted": plan.memory.peak, "runtime": runtime, "peak": peak}
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_the_toy_run_is_the_measured_one(tmp_path: Path) -> None:
    """Resident memory of a whole `train` of one update with its evaluations, libraries
    included.
    """
    words = ["--rollout.num_steps=3"]  # memory is that of a step
    command = [sys.executable, "-c", TOY_RUN, str(tmp_path / "run"), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["predicted"] == pytest.approx(found["peak"], rel=0.15)
    # The libraries are the larger part, so what comes on top of them has its own bound.
    assert found["predicted"] - found["runtime"] == pytest.approx(
        found["peak"] - found["runtime"], rel=0.35
    )


def test_a_limit_of_memory_is_that_of_the_card() -> None:
    """Frozen weights stay whole where they take less than a third of it."""
    large, size = (
        small_plan("--distributed.dp_shard=2", gpus=2, memory_gb=limit)
        for limit in (None, 0.02)
    )
    assert large.gathered.keep == "always" and size.gathered.keep == "rollout"


def test_weights_behind_a_table_stay_whole_on_every_rank() -> None:
    words = ("--distributed.dp_shard=2", "--distributed.keep_gathered=never")
    plans = {
        adaln: small_plan(*words, f"--model.adaln={adaln}", gpus=2)
        for adaln in ("weights", "table", "auto")
    }
    held = {adaln: found.memory.phases["rollout"] for adaln, found in plans.items()}
    adaln_bytes = 2 * plans["table"].weights.adaln
    assert held["table"].transformer - held["weights"].transformer == adaln_bytes / 2
    assert (
        held["auto"].transformer == held["weights"].transformer
        and held["auto"].tables == held["weights"].tables
    )


def test_an_evaluation_by_unipc_has_noise_levels_of_its_own() -> None:
    word = "--rollout.num_steps=10"
    euler, unipc, more = (
        small_plan(
            word, f"--evaluation.num_steps={steps}", f"--evaluation.solver={name}"
        )
        .memory.phases["rollout"]
        .tables
        for steps, name in ((10, "euler"), (10, "unipc"), (20, "euler"))
    )
    assert (unipc - euler) * 2 == pytest.approx(more - euler)
    assert unipc > euler


@pytest.mark.parametrize(
    ("reported", "name", "expected"),
    [
        (85.0e9, "NVIDIA H100 80GB HBM3", 80),
        (42.4e9, "NVIDIA H100 80GB HBM3", 42.4),
        (48e9, "NVIDIA GeForce RTX 4090", DEVICES["rtx4090"].memory_gb),
    ],
)
def test_plan_and_run_count_the_same_memory(
    reported: float, name: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100 reports more bytes than the 80e9 of its name; a smaller one of a kind has
    what it reports.
    """
    properties: Any = SimpleNamespace(total_memory=reported, name=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert gpu_memory_gb("cuda") == expected


@pytest.mark.slow
def test_a_run_decodes_as_its_gpu_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        ROOT / "configs/wan_480p_lora_1gpu.yaml",
        [
            "--model.device=cpu",
            "--video.height=1088",
            "--video.width=1920",
            "--training.guidance=split",
            "--rollout.guidance_scale=5",
            "--rollout.num_steps=20",
            "--rollout.batch_size=8",
            "--rollout.sde_window.size=null",
            "--rollout.sde_window.within=1.0",
            "--rollout.sde_window.stride=1",
            "--objective.kl_mode=dual",
            "--lora={rank: 32, target_modules: null}",
        ],
    )
    assert settle_memory(config) is config
    monkeypatch.setattr(estimate, "rank_device", lambda name: torch.device("cuda"))
    properties: Any = SimpleNamespace(total_memory=80e9, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert settle_memory(config).model.decode_memory_gib == 41
    filled = settle_memory(
        replace(config, model=replace(config.model, checkpointing="auto"))
    ).model
    assert filled.decode_memory_gib == 41 and filled.checkpointing == "full"
    properties.total_memory = 24e9
    assert settle_memory(config).model.decode_memory_gib == "auto", (
        "in tiles where a whole video does not fit"
    )
    given = replace(config, model=replace(config.model, decode_memory_gib=8.0))
    assert settle_memory(given) is given
    properties.total_memory = 80e9
    frames = load_config(
        "hv15_352x624_lora_1gpu", ["--model.device=cpu", "--model.checkpointing=auto"]
    )
    filled = settle_memory(frames).model
    assert filled.decode_memory_gib == "auto", "it has no tiles"
    assert filled.checkpointing == "selective"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "memory", "expected"),
    [
        ((), None, 4),  # the whole group: its calls are short
        ((), 0.013, 1),
    ],
)
def test_micro_batch_size_auto_is_what_fills_and_fits_the_gpu(
    words: tuple[str, ...], memory: float | None, expected: int
) -> None:
    auto = (
        "--rollout.micro_batch_size=auto",
        "--rollout.num_generations=4",
        "--rollout.batch_size=8",
    )
    found = small_plan(*auto, *words, memory_gb=memory)
    assert (
        found.config.rollout.micro_batch_size == expected
        and found.asked.rollout.micro_batch_size == "auto"
    )
    assert f"rollout.micro_batch_size auto: {expected}" in to_text(found, [])


@pytest.mark.slow
def test_micro_batch_size_auto_stops_at_a_full_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (
        "--rollout.micro_batch_size=auto",
        "--rollout.num_generations=4",
        "--rollout.batch_size=4",
    )
    tokens = small_plan().video_tokens
    monkeypatch.setattr(estimate, "FULL_CALL", 1.5 * tokens)
    assert small_plan.__wrapped__(*words).config.rollout.micro_batch_size == 2
