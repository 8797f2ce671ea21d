"""A reward that nobody else knows: what it says of itself is what `plan` and `doctor`
say.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.config.load import load_config
from sage_fast.config.registry import REWARDS, SCORES
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import VideoConfig
from sage_fast.models.hub import Requirement, require
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.planning.memory import rewards_here
from sage_fast.planning.text import to_json
from sage_fast.rewards.base import RewardCosts
from sage_fast.rewards.clip import CLIPScore, PickScore
from sage_fast.rewards.toy import ToyReward
from sage_fast.rewards.videoalign import SCORES as VIDEOALIGN_SCORES
from sage_fast.tools.diagnosis import Check, examine

NAME = f"{__name__}:Judge"


class Judge:
    """Holds 3 GB, keeps 1 byte a pixel, and takes 7 seconds."""

    def __init__(self, path: str = "judges/strict", device: str = "cuda") -> None:
        raise AssertionError("a plan builds no reward")

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        return {"verdict": torch.zeros(len(videos))}

    @staticmethod
    def requirements(options: Mapping[str, Any]) -> list[Requirement]:
        path = options.get("path", "judges/strict")
        return [require("the judge", path, ["judge.safetensors"], "judges/strict")]

    @staticmethod
    def costs(options: Mapping[str, Any], video: VideoConfig) -> RewardCosts:
        tables = float(video.num_frames * video.height * video.width)
        return RewardCosts(
            weights=3e9,
            folder=options.get("path"),
            tables=tables,
            working=2e9,
            seconds=7.0,
        )


def config(tmp_path: Path, **options: object) -> RunConfig:
    """The toy run with this reward."""
    reward = {
        "rewards": [NAME],
        "weights": {"verdict": 1.0},
        "options": {NAME: options},
    }
    return load_config(
        "toy_cpu", {"reward": reward, "output_dir": str(tmp_path / "run")}
    )


def test_its_bytes_seconds_and_files_are_in_the_plan_and_at_the_doctors(
    tmp_path: Path,
) -> None:
    def file(**options: object) -> Check:
        checks = examine(config(tmp_path, **options))
        (found,) = [check for check in checks if check.name == "the judge"]
        return found

    folder = str(tmp_path)
    assert rewards_here(config(tmp_path))[NAME].weights == 3e9
    assert (file().status, file().fix) == ("missing", "hf download judges/strict")
    assert file(path=folder).fix == f"hf download judges/strict --local-dir {folder}"
    # The files that are here count instead of the published ones.
    (tmp_path / "judge.safetensors").write_bytes(bytes(1000))
    plan = to_json(make_plan(config(tmp_path, path=folder), DEVICES["h100"]), [])
    assert plan["memory"]["rollout"]["reward models"] == 1000
    assert plan["memory"]["rollout"]["rewards' tables"] == 8 * 16 * 16
    assert plan["memory"]["reward"]["scoring"] == 2e9
    assert plan["phases"]["reward"]["predicted"] == pytest.approx(7.0)
    assert file(path=folder).status == "ok"


def test_the_registry_names_the_scores_of_the_rewards_that_ship() -> None:
    """By what they return, or what they declare where they need files."""
    videos = torch.zeros(1, 4, 3, 16, 16, dtype=torch.uint8)
    returned = ToyReward().score(videos, ["a red circle moving left"])
    assert {
        "toy": tuple(returned),
        "videoalign": VIDEOALIGN_SCORES,
        "clip_score": tuple(CLIPScore.SCALES),
        "pick_score": tuple(PickScore.SCALES),
        "ocr": ("OCR", "OCR_right"),
    } == SCORES
    assert SCORES.keys() == REWARDS.keys()
