"""The presets of Wan 2.1: what they set, and that their plans fit the cards in their
names.
"""

import re
from pathlib import Path

import pytest

from sage_fast.config.load import load_config, preset_summary
from sage_fast.config.schema import RunConfig
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.run.prompt_files import load_prompts

ROOT = Path(__file__).resolve().parents[3]
PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("wan_*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_name_says(name: str) -> None:
    config: RunConfig = load_config(name)
    assert (config.model.family, config.model.forward, config.output_dir) == (
        "wan",
        "fused",
        f"runs/{name}",
    )
    assert (config.video.height, config.video.width, config.video.fps) == (480, 832, 16)
    assert config.video.num_frames == (17 if "quick" in name else 81)
    assert config.reward.options["videoalign"]["fps"] == config.video.fps
    assert (config.rollout.shift, config.model.dtype, config.training.mode) == (
        3.0,
        "bfloat16",
        "lora",
    )
    # Flow-Factory's recipes for Wan 2.1: AdamW 1e-4, alpha = rank, and for the forward
    # process 12 steps.
    optimizer = config.optimizer
    lora = config.lora
    assert (
        optimizer.name,
        optimizer.learning_rate,
        lora.alpha,
        lora.target_modules,
    ) == ("adamw", 1e-4, None, None)
    forward = name.endswith("_nft")
    assert (
        forward
        == (config.training.update == "forward_process")
        == (config.objective.kl_mode == "none")
    )
    assert config.sampling_guidance == 5.0
    if forward:
        process = config.forward_process
        assert (
            config.rollout.num_steps,
            process.levels,
            process.beta,
            process.old_decay,
        ) == (12, 4, 0.1, "rising")
    videos = config.rollout.batch_size
    header = (
        f"# An update has {videos} videos of "
        f"{videos // config.rollout.num_generations} prompts; published"
    )
    assert header in (ROOT / f"configs/{name}.yaml").read_text("utf-8")
    assert preset_summary(name).endswith(".") and re.search(
        r"_(24gb|1gpu)(_nft)?$", name
    )
    assert name in (ROOT / "docs/wan.md").read_text("utf-8")
    assert len(load_prompts(config)[0]) >= 64


@pytest.mark.slow
@pytest.mark.parametrize("frames", [33, None])
@pytest.mark.parametrize("name", PRESETS)
def test_the_plan_of_a_preset_fits_its_card(name: str, frames: int | None) -> None:
    small = "24gb" in name
    if frames and not small:
        return
    config = load_config(name, [f"--video.num_frames={frames}"] if frames else [])
    plan = make_plan(config, DEVICES["rtx4090" if small else "h100"], sizes={})
    assert plan.fits and plan.memory.peak < (23.5e9 if small else 72e9)


@pytest.mark.slow
def test_the_plan_of_a_single_pass() -> None:
    """With the fastest attention, all activations and no KL; with cuDNN's attention it
    is 80 s.

    75 s were aimed at: decoding in float32, which the plan once timed as 16 bits, takes
    the last 0.7 s.
    """
    words = [
        "--training.update=single_pass",
        "--objective.kl_mode=none",
        "--model.checkpointing=none",
    ]
    config = load_config("wan_480p_lora_1gpu", [*words, "--model.attention=flash3"])
    plan = make_plan(config, DEVICES["h100"], sizes={})
    assert plan.fits and plan.seconds_per_video <= 75.2
