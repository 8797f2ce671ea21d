"""The presets of Wan: what they set, that their plans fit the cards in their names, and
that each one starts.
"""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import first_steps
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.rollout import rollout_table
from sage_fast.run.prompt_files import load_prompts
from sage_fast.run.run import build_trainer
from tests.tiny.videoalign import build_tiny_videoalign
from tests.tiny.wan import save_wan

ROOT = Path(__file__).resolve().parents[3]
PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("wan_*.yaml"))
"""Of Wan 2.1."""
SECOND = ["wan22_5b_lora_1gpu", "wan22_5b_quick_lora_24gb"]
"""Of Wan 2.2."""
STARTED = sorted(path.stem for path in (ROOT / "configs").glob("wan*.yaml"))
"""Of every Wan."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_name_says(name: str) -> None:
    config: RunConfig = load_config(name)
    assert config.output_dir == f"runs/{name}"
    assert (config.video.height, config.video.width, config.video.fps) == (480, 832, 16)
    assert config.video.num_frames == (17 if "quick" in name else 81)
    assert config.reward.options["videoalign"]["fps"] == config.video.fps
    rollout = config.rollout
    assert rollout.shift == 3.0
    lora = config.lora
    forward = name.endswith("_nft")
    assert (
        forward
        == (config.training.update == "forward_process")
        == (rollout.sde_type == "ode")
    )
    assert config.objective.kl_mode == "none"
    if forward:  # Flow-Factory's examples/nft/lora/wan21/t2v.yaml at a0b2bc5
        process = config.forward_process
        assert (process.levels, process.beta, process.old_decay) == (4, 0.1, "rising")
        # Theirs: discrete levels of at least 0.1, of which a draw never is the last.
        table = rollout_table(rollout, 0)
        trained = first_steps(rollout.num_steps, process.within)
        assert trained == 11 and float(table.sigmas[10]) > 0.1
        assert (rollout.num_steps, rollout.guidance_scale) == (12, 5.0)
        assert config.sampling_guidance == 5.0 and config.advantage.std == "group"
        assert (config.optimizer.weight_decay, lora.target_modules) == (1e-4, None)
    else:  # UniRL's examples/diffusion/wan21_t2v.yaml at 1a7b501
        for updates in (0, 5):
            trained_steps = rollout_table(rollout, updates).trainable.nonzero()
            assert trained_steps.flatten().tolist() == [*range(7)]
        assert (rollout.sde_type, rollout.num_steps, rollout.eta) == (
            "flow_grpo",
            14,
            0.7,
        )
        assert config.sampling_guidance == 1.0 and config.advantage.std == "global"
        assert not config.objective.equalizer and config.optimizer.weight_decay == 0.0
        assert lora.target_modules is not None and len(lora.target_modules) == 8
    videos = config.rollout.batch_size
    header = (
        f"# An update has {videos} videos of "
        f"{videos // config.rollout.num_generations} prompts; published"
    )
    assert header in (ROOT / f"configs/{name}.yaml").read_text("utf-8")
    assert name in (ROOT / "docs/wan.md").read_text("utf-8")
    assert len(load_prompts(config)[0]) >= 64


@pytest.mark.parametrize("name", SECOND)
def test_a_preset_of_the_second_model_is_what_its_name_says(name: str) -> None:
    config: RunConfig = load_config(name)
    assert config.model.path == "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    video = config.video
    size = (17, 480, 832) if "quick" in name else (49, 704, 1280)
    assert (video.num_frames, video.height, video.width, video.fps) == (*size, 24)
    assert config.reward.options["videoalign"]["fps"] == video.fps
    # verl-omni's run_wan22_5b_t2v_hpsv3_v1.sh at 04eaf00.
    rollout = config.rollout
    for update, first in ((0, 0), (3, 3), (4, 0)):
        steps = rollout_table(rollout, update).trainable.nonzero().flatten().tolist()
        assert steps == ([0, 4] if update == 4 else [first, first + 1])
    given = (rollout.sde_type, rollout.num_steps, rollout.shift, rollout.eta)
    assert given == ("dance_grpo", 10, 5.0, 1.2)
    assert config.sampling_guidance == 5.0 and config.advantage.std == "group"
    assert config.objective.kl_mode == "none" and not config.objective.equalizer
    assert name in (ROOT / "docs/wan.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("frames", [33, None])
@pytest.mark.parametrize("name", PRESETS + SECOND)
def test_the_plan_of_a_preset_fits_its_card(name: str, frames: int | None) -> None:
    small = "24gb" in name
    # At 33 frames the update of the second model takes 24.1 GB.
    if frames and (not small or name in SECOND):
        return
    config = load_config(name, [f"--video.num_frames={frames}"] if frames else [])
    plan = make_plan(config, DEVICES["rtx4090" if small else "h100"], sizes={})
    assert plan.fits and plan.memory.peak < (23.5e9 if small else 72e9)


@pytest.mark.slow
def test_the_page_has_the_plans() -> None:
    page = (ROOT / "docs/wan.md").read_text("utf-8")
    for name in PRESETS + SECOND:
        card = "rtx4090" if "24gb" in name else "h100"
        plan = make_plan(load_config(name), DEVICES[card], sizes={})
        row = re.search(rf"^\| `{name}` \| [^|]* \| (.+) GB \| (\d+) s \|", page, re.M)
        assert row is not None, name
        assert (row[1], row[2]) == (
            f"{plan.memory.peak / 1e9:.1f}",
            f"{plan.seconds_per_video:.0f}",
        )


@pytest.mark.slow
def test_the_plan_of_a_single_pass() -> None:
    """As docs/wan.md has it."""
    words = ["--training.update=single_pass"]
    plan = make_plan(
        load_config("wan_480p_lora_1gpu", words), DEVICES["h100"], sizes={}
    )
    found = f"{plan.seconds_per_video:.1f} s per video of `wan_480p_lora_1gpu`"
    assert plan.fits and found in (ROOT / "docs/wan.md").read_text("utf-8")


TINY_MODELS = {"wan": save_wan, "wan22": partial(save_wan, kind="5B")}
"""First word of a preset's name -> what writes a tiny model of its kind to a folder."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each kind, VideoAlign and its base model, prompts."""
    root = tmp_path_factory.mktemp("presets")
    videoalign, base = build_tiny_videoalign(root / "rewards")
    prompts = root / "prompts.txt"
    prompts.write_text("a red circle moving left\na fox in the snow\n")
    models = {kind: save(root / kind) for kind, save in TINY_MODELS.items()}
    return {"videoalign": videoalign, "base": base, "prompts": prompts, **models}


@pytest.mark.parametrize(
    "name",
    [
        # The quick ones have the recipes of the others.
        pytest.param(name, marks=[] if "quick" in name else pytest.mark.slow)
        for name in STARTED
    ],
)
@pytest.mark.usefixtures("nothing_drawn")
def test_a_preset_starts(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    """Two updates, with its sampler, adapters, objective and reward; smaller are the
    model, the videos, the groups and the evaluation.
    """
    words = [
        f"--output_dir={tmp_path / 'run'}",
        f"--model.path={files[name.partition('_')[0]]}",
        "--model.device=cpu",
        f"--data.prompts={files['prompts']}",
        f"--evaluation.prompts={files['prompts']}",
        "--evaluation.num_prompts=null",
        "--evaluation.num_steps=3",
        "--evaluation.every=2",
        "--evaluation.num_samples=0",
        "--video={num_frames: 5, height: 32, width: 32, fps: 16}",
        "--rollout.num_generations=2",
        "--rollout.batch_size=4",
        "--training.num_updates=2",
        f"--reward.options.videoalign.path={files['videoalign']}",
        f"--reward.options.videoalign.base_model={files['base']}",
        "--logging.report_to=[]",
    ]
    config = load_config(name, words)
    trainer = build_trainer(config)
    before = {key: p.detach().clone() for key, p in trainer.engine.parameters.items()}
    for _ in range(2):
        row = trainer.iterate()
        assert row.get("ratio/first_max_deviation", 0.0) == 0.0
        assert row["grad_norm"] > 0 and row["reward/VQ_std"] > 0
    assert not any(
        torch.equal(p, before[key]) for key, p in trainer.engine.parameters.items()
    )
