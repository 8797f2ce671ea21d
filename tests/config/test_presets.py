"""The recipes that ship: each one loads, alone and with every ablation, and says what
the reference does.
"""

import csv
import json
import re
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.results import read_result
from benchmarks.suites import iteration
from sage_fast.config.load import (
    config_file,
    load_config,
    preset_evidence,
    preset_names,
    preset_summary,
)
from sage_fast.config.schema import by_dotted_key, check_batch, to_dict
from sage_fast.models.hunyuan15.hunyuan15 import HUNYUAN_VIDEO_15
from sage_fast.objectives.base import FEW_PROMPTS, FEW_VIDEOS
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import SAFE_SHARE, Plan, make_plan
from sage_fast.planning.work import least_gpus
from sage_fast.records import word_count
from sage_fast.rewards.base import find_reward, reward_requirements
from sage_fast.rewards.server import (
    SetupError,
    build_reward,
    check_reward,
    fill_options,
)
from sage_fast.rollout import rollout_table
from sage_fast.run.prompt_files import load_prompts, read_prompts

DISTILLED_STEPS = 50
"""Of weights with distilled guidance, by the README of Tencent-Hunyuan/HunyuanVideo-1.5."""

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted((ROOT / "configs").glob("hv15_*.yaml"))
SMALL_RECIPES = [
    p
    for p in PRESETS
    if "quick" in p.stem or p.stem.endswith(("_nft", "_path", "_window"))
]
"""Presets for a first curve, of another method or in a window, which keep to the
reference's size of an update no longer.
"""
ABLATIONS = sorted((ROOT / "configs/ablations").glob("*.yaml"))


def preset_gpus(path: Path) -> int:
    """Number of GPUs in a preset's name."""
    found = re.search(r"_(\d+)gpu(_|$)", path.stem)
    assert found is not None or path.stem.endswith("gb"), path
    return int(found[1]) if found else 1


MINUTES_PER_UPDATE = {
    "hv15_256x384_lora_64gpu_nft": 1.1,
    "hv15_256x384_lora_8gpu_nft": 9,
    "hv15_352x624_full_64gpu": 2,
    "hv15_352x624_full_8gpu": 3.5,
    "hv15_352x624_full_8gpu_paper": 14,
    "hv15_352x624_lora_1gpu": 13,
    "hv15_352x624_lora_8gpu": 3,
    "hv15_352x624_lora_8gpu_fast": 2.3,
    "hv15_352x624_lora_8gpu_window": 3.8,
    "hv15_480p_distilled_lora_8gpu": 4.6,
    "hv15_480p_distilled_lora_8gpu_nft": 5,
    "hv15_480p_distilled_lora_8gpu_path": 3.2,
    "hv15_480p_full_64gpu": 5,
    "hv15_480p_full_8gpu": 9,
    "hv15_480p_i2v_lora_1gpu": 38,
    "hv15_480p_lora_1gpu": 36,
    "hv15_480p_lora_64gpu": 5,
    "hv15_480p_lora_8gpu": 9,
    "hv15_480p_lora_8gpu_fast": 6.3,
    "hv15_480p_lora_8gpu_window": 10,
    "hv15_quick_lora_1gpu": 5.4,
    "hv15_quick_lora_1gpu_nft": 2.5,
    "hv15_quick_lora_24gb": 2.8,
    "hv15_quick_lora_8gpu": 0.7,
    "hv15_quick_lora_8gpu_nft": 0.32,
}
"""As planned; the presets of all weights say it."""

LEVERS = {
    "hv15_352x624_lora_8gpu_fast": "hv15_352x624_lora_8gpu",
    "hv15_352x624_lora_8gpu_window": "hv15_352x624_lora_8gpu",
    "hv15_480p_distilled_lora_8gpu": "hv15_480p_lora_8gpu",
    "hv15_480p_lora_8gpu_fast": "hv15_480p_lora_8gpu",
    "hv15_480p_lora_8gpu_window": "hv15_480p_lora_8gpu",
}
"""Preset -> the one that it changes by levers."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets work from any working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "path", [*PRESETS, *ABLATIONS, ROOT / "configs/toy_cpu.yaml"], ids=lambda p: p.stem
)
def test_a_preset_goes_by_its_name_and_says_in_a_line_what_it_is(path: Path) -> None:
    name = path.relative_to(ROOT / "configs").with_suffix("").as_posix()
    assert name in preset_names() and config_file(name) == path
    summary = preset_summary(name)
    assert (
        len(summary) <= 115
        and summary.endswith((".", ".)"))
        and not summary.startswith("#")
    )


@pytest.mark.parametrize(
    "preset", [p for p in PRESETS if p not in SMALL_RECIPES], ids=lambda p: p.stem
)
def test_a_preset_has_the_defaults_of_the_reference(preset: Path) -> None:
    config = load_config(preset)
    assert (
        config.model.family == "hunyuan15"
        and config.output_dir == f"runs/{preset.stem}"
    )
    rollout = config.rollout
    objective = config.objective
    video = config.video
    assert (rollout.sde_type, rollout.num_steps, rollout.shift, rollout.eta) == (
        "sage_grpo",
        20,
        5.0,
        0.5,
    )
    assert rollout.guidance_scale == (1.0 if "distilled" in preset.stem else 6.0)
    assert (rollout.num_generations, video.num_frames, video.fps) == (4, 81, 24.0)
    assert (video.height, video.width) == (
        (352, 624) if "352x624" in preset.stem else (480, 832)
    )
    assert (objective.clip_range, objective.kl_mode, objective.equalizer) == (
        1e-4,
        "dual",
        True,
    )
    assert (objective.kl_position_weight, objective.kl_velocity_weight) == (1.0, 0.1)
    assert (
        config.kl_weight.minimum,
        config.kl_weight.maximum,
        config.kl_weight.warmup_updates,
    ) == (1e-7, 1e-5, 100)
    optimizer = config.optimizer
    training = config.training
    expected = (
        ("muon", 1e-5, 0.01) if training.mode == "full" else ("adamw", 1e-4, 0.01)
    )
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == expected
    assert (
        training.anchor_interval,
        training.permute_timesteps,
        training.timestep_fraction,
    ) == (10, True, 1.0)
    assert optimizer.max_grad_norm == 1.0
    assert (config.lora.rank, config.lora.alpha) == (32, 64)
    assert config.evaluation.num_steps == (
        DISTILLED_STEPS if "distilled" in preset.stem else 40
    )
    weights = (0.5, 0.5, 1.0) if preset.stem.endswith("_paper") else (1.0, 1.0, 1.0)
    assert config.reward.weights == dict(zip(("VQ", "MQ", "TA"), weights, strict=True))
    assert config.reward.options["videoalign"]["fps"] == video.fps
    # What the window of every step leaves to train.
    assert int(rollout_table(rollout, 0).trainable.sum()) == 20


@pytest.mark.parametrize(
    "preset",
    [name for name in preset_names() if "/" not in name and name != "study_cpu"],
)
def test_the_rewards_of_a_preset_take_its_options_and_look_where_the_advice_puts_their_files(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preset that inherits another one's options may lack one that a reward must
    have.
    """
    config = load_config(preset)
    monkeypatch.chdir(tmp_path)
    for name in config.reward.rewards:
        found = find_reward(name)
        given = config.reward.options.get(name, {})
        assert (
            check_reward(
                name,
                found,
                fill_options(found, given, device="cpu", fps=config.video.fps),
            )
            == "maker"
        )
        downloads = [
            r for r in reward_requirements(name, given) if "--local-dir" in r.fetch
        ]
        for requirement in downloads:
            folder = tmp_path / requirement.fetch.split("--local-dir ")[1].split()[0]
            for file in requirement.missing:
                made = folder / file.replace("*", "1")
                made.parent.mkdir(parents=True, exist_ok=True)
                made.touch()
        now = {r.name: r.missing for r in reward_requirements(name, given)}
        assert not any(now[requirement.name] for requirement in downloads)
        # which says what is wrong with an empty file, not that it has no folder
        if name == "videoalign":
            with pytest.raises(SetupError, match=re.escape("models/VideoReward")):
                build_reward(
                    name,
                    found,
                    fill_options(found, given, device="cpu", fps=config.video.fps),
                )


def test_the_paper_is_one_preset() -> None:
    """The two files that it says it is, over the preset that it extends."""
    layers = load_config(
        ["hv15_352x624_full_8gpu", "ablations/published_sage_grpo", "ablations/table2"]
    )
    base, paper = (
        by_dotted_key(to_dict(c))
        for c in (layers, load_config("hv15_352x624_full_8gpu_paper"))
    )
    changed = {key: value for key, value in paper.items() if value != base[key]}
    assert changed.pop("output_dir")
    assert changed == {"rollout.batch_size": 8, "rollout.initial_noise": "fixed"}


@pytest.mark.parametrize("preset", SMALL_RECIPES, ids=lambda p: p.stem)
def test_a_preset_for_curves_has_as_many_videos_per_update_as_small_published_recipes(
    preset: Path,
) -> None:
    config = load_config(preset)
    gpus = preset_gpus(preset)
    videos = config.rollout.batch_size * gpus
    assert (
        videos >= FEW_VIDEOS and videos // config.rollout.num_generations >= FEW_PROMPTS
    )
    if "distilled" in str(config.model.path):
        assert config.evaluation.num_steps == DISTILLED_STEPS
    forward = config.training.update == "forward_process"
    path = preset.stem.endswith("_path")
    noised = preset.stem.endswith(("_nft", "_24gb"))
    assert forward == (path or noised) and noised == (config.rollout.sde_type == "ode")
    assert (config.rollout.guidance_scale == 1.0) == forward
    window = config.rollout.sde_window
    assert (window.size is not None) == preset.stem.endswith("_window")
    assert (config.forward_process.states == "path") == path


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_a_preset_is_for_the_gpus_in_its_name(preset: Path) -> None:
    config = load_config(preset)
    gpus = preset_gpus(preset)
    section = config.distributed
    rollout = config.rollout
    replicate, shard, sp = section.degrees(gpus, config.training.mode)
    assert least_gpus(section, rollout) == gpus and replicate * shard * sp == gpus
    check_batch(rollout.batch_size, replicate * shard, rollout.num_generations)
    videos = rollout.batch_size * replicate * shard
    prompts = videos // rollout.num_generations
    updates = config.training.updates_per_rollout
    header = (
        f"# An update has {videos // updates} videos of {prompts} prompts; published "
        "recipes have"
    )
    assert header in preset.read_text("utf-8")
    # Where a forward communicates, every rank must run as many dense batches: no
    # micro-batch of two prompts.
    assert rollout.num_generations % rollout.micro_batch_size == 0
    assert shard * sp <= 8, "weights are gathered over NVLink"
    assert HUNYUAN_VIDEO_15["num_attention_heads"] % sp == 0
    full = config.training.mode == "full"
    assert full == ("full" in preset.stem)
    assert (config.model.dtype, section.param_dtype) == (
        ("float32", "bfloat16") if full else ("bfloat16", "float32")
    )
    if gpus > 1:
        # The reference: two videos per data-parallel rank, on 64 GPUs two GPUs per
        # video. A whole group where a part of it is trained.
        whole = config.training.best_and_worst > 0
        curve = whole or preset in SMALL_RECIPES
        batch = (
            64 // gpus
            if preset.stem.endswith("_paper")
            else rollout.num_generations
            if curve
            else 2
        )
        if "256x384" in preset.stem:  # 32 prompts x 16, on as few ranks as it may be
            batch = 512 // gpus
        assert rollout.batch_size == batch and sp == (
            2 if gpus == 64 and not curve else 1
        )
    # A failure costs the update in progress, or as much as 0.5 GB/s of storage can save
    # of all weights.
    storable = 99 / 0.5 / 60 / MINUTES_PER_UPDATE[preset.stem] if full else 1
    assert config.checkpoint.every == ceil(storable)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_the_plan_of_a_preset(preset: Path) -> None:
    """It fits with a tenth to spare, loses little to the exchange, and takes as long
    per update as its comment says.
    """
    plan = planned(preset.stem)
    filled = plan.asked.model.checkpointing == "auto"
    # filled by hand on a card of 24 GB, which has 24 GiB
    small = preset.stem.endswith("24gb")
    assert plan.memory.peak < (
        (SAFE_SHARE if filled or small else 0.9) * (24 * 2**30 if small else 80e9)
    )
    assert plan.waiting < 0.1 * sum(phase.predicted for phase in plan.phases)
    minutes = plan.seconds_per_rollout / 60 / plan.config.training.updates_per_rollout
    assert minutes == pytest.approx(MINUTES_PER_UPDATE[preset.stem], rel=0.15)
    row = re.search(
        rf"^\| `{preset.stem}` \|.*\| (.+) \|$",
        (ROOT / "docs/how_to/faster.md").read_text("utf-8"),
        re.M,
    )
    assert row is None or row[1] == f"{plan.seconds_per_video:.0f}"


def test_no_preset_claims_more_than_what_was_committed() -> None:
    claimed = {name: preset_evidence(name) for name in preset_names()}
    results = ROOT / "benchmarks/results"
    rows = [
        json.loads(line)
        for file in results.glob("nvidia-*/*-toy.jsonl")
        for line in file.read_text("utf-8").splitlines()
    ]
    on_gpu = {row["preset"] for row in rows if "NVIDIA" in row["device"]}
    timed = [read_result(file)["cells"] for file in results.glob("nvidia-*/*.json")]
    if any("iteration B" in cells for cells in timed):
        on_gpu.add(iteration.RECIPE)
    # laid over by `python -m experiments`, and trained by `python -m experiments.readers`
    in_toys = {"study_cpu": "reproduction", "words_cpu": "words"}
    assert {name for name, level in claimed.items() if level == "GPU"} == on_gpu
    assert {name for name, level in claimed.items() if level == "CPU"} == set(in_toys)
    assert all(
        (ROOT / f"docs/results/{file}.jsonl").is_file() for file in in_toys.values()
    )
    assert set(claimed.values()) == {"GPU", "CPU", "plan"}


@pytest.mark.slow
def test_the_documented_table_of_plans_is_what_the_planner_finds() -> None:
    """After the plans, whose traces it shares where one process makes both."""
    assert report.presets_block([]) in (ROOT / "docs/how_to/which_card.md").read_text(
        "utf-8"
    )


@pytest.mark.slow
def test_the_readme_says_what_fits_which_card() -> None:
    """In as many bytes as the vendor names; a card of 24 GB has 24 GiB."""
    found = report.read_results(report.committed_files())
    assert report.cards_block(found) in (ROOT / "README.md").read_text("utf-8")


@cache
def planned(name: str, **overrides: Any) -> Plan:
    config = load_config(name, overrides)
    return make_plan(
        config,
        DEVICES["h100"],
        gpus=least_gpus(config.distributed, config.rollout),
        sizes={},
    )


def changed_keys(preset: str) -> dict[str, Any]:
    """Keys of the computation that a preset of `LEVERS` changes; saving, evaluating and
    how many videos an update has do not count.
    """
    files = (
        "output_dir",
        "rollout.batch_size",
        "rollout.num_generations",
        "model.path",
        "checkpoint.every",
        "evaluation.every",
        "evaluation.num_steps",
    )
    whole = ("reward.weights", "reward.options")
    own, base = (
        by_dotted_key(to_dict(load_config(name)), whole)
        for name in (preset, LEVERS[preset])
    )
    return {
        key: value
        for key, value in own.items()
        if value != base[key] and key not in files
    }


@pytest.mark.slow
@pytest.mark.parametrize("preset", LEVERS)
def test_the_factors_in_a_fast_preset_are_those_of_the_plan(preset: str) -> None:
    """On the line of each key that it changes: a factor, and what the lever leaves of
    the gradient.
    """

    def seconds(*keys: str) -> float:
        values = {key: changed[key] for key in keys if key in changed}
        return planned(LEVERS[preset], **values).seconds_per_video

    text = config_file(preset).read_text("utf-8")
    changed = changed_keys(preset)
    base = seconds()
    for key in changed.keys() - {"training.guidance"}:
        left = "( with the [^,:]+)?, (exact|unbiased|another policy): "
        said = re.search(
            rf"^ +{key.rpartition('.')[2]}: .*# (\d\.\d\d)x{left}", text, re.M
        )
        assert said, key
        # On both sides: the share of the KL of an update in one pass, a window's size.
        beside = {
            "training.update": ["objective.kl_position_fraction"],
            "rollout.sde_window.within": ["rollout.sde_window.size"],
        }.get(key, [])
        without = seconds(*beside) if beside else base
        alone = seconds(key, *beside)
        assert float(said[1]) == pytest.approx(without / alone, abs=0.006), key
    plan = planned(preset, **{"model.attention": "cudnn"})
    assert plan.fits
    assert [phase.name for phase in plan.phases] == [
        "rollout",
        "decode",
        "reward",
        "anchor",
        "update",
        "optimizer",
    ]
    page = (ROOT / "docs/how_to/faster.md").read_text("utf-8")
    assert all(f"| `{name}` |" in page for name in (preset, LEVERS[preset]))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_the_prompts_of_a_preset_are_there_and_held_out(preset: Path) -> None:
    prompts, evaluated = load_prompts(load_config(preset))
    assert len(prompts) >= 64 and len(evaluated) >= 24
    assert {p.text for p in prompts}.isdisjoint(p.text for p in evaluated)
    assert {p.index for p in prompts}.isdisjoint(p.index for p in evaluated)


@pytest.mark.parametrize("preset", ["hv15_352x624_lora_1gpu", "hv15_480p_full_64gpu"])
def test_every_ablation_goes_over_a_preset_and_is_what_its_name_says(
    preset: str,
) -> None:
    for path in ABLATIONS:
        config = load_config([preset, path])
        sought = path.stem.removeprefix("kl_").removeprefix("published_")
        named = (
            config.objective.kl_mode,
            config.rollout.sde_type,
            "strong",
            "setting_a",
            "setting_b",
            "table2",
        )
        assert sought in named, path


def test_the_prompt_files_are_csv_that_others_read_too_and_fit_the_model() -> None:
    texts = []
    for name in ("general_train", "general_eval"):
        path = ROOT / f"configs/prompts/{name}.csv"
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [r["prompt"] for r in rows] == [p.text for p in read_prompts(path)]
        assert all(60 <= word_count(r["prompt"]) <= 150 for r in rows)
        texts += [r["prompt"] for r in rows]
    assert len(set(texts)) == len(texts) == 576


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        ("a red fox", 3),
        ("a fox - and an owl", 5),
        ("红狐狸", 2),
        ("一只 fox 在跑", 4),
    ],
)
def test_words_of_a_prompt(text: str, words: int) -> None:
    assert word_count(text) == words
