"""Prompts in any script through train, generate and evaluate: file names, pages and
records keep them.
"""

import json
from pathlib import Path

import pytest
from markupsafe import escape

from sage_fast.commands.cli import main
from sage_fast.models.media_files import video_file_name
from tests.conftest import TINY_RUN
from tests.rewards import support
from tests.tiny.checkpoints import save_diffusers_layout

PROMPTS = [
    "一只猫在雪地里奔跑，阳光明媚",
    "قطة حمراء تمشي على العشب",
    '🦊 and 👩‍🚀 with "招牌"',
    "नमस्ते दुनिया",
]


def mp4s(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.mp4"))


@pytest.mark.slow
def test_prompts_in_any_script_go_all_the_way(tmp_path: Path) -> None:
    save_diffusers_layout(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    reward = f"{support.__name__}:brightness"
    tree = TINY_RUN | {
        "data": {"prompts": str(tmp_path / "prompts.txt")},
        "output_dir": str(tmp_path / "run"),
        "model": {
            "family": "hunyuan15",
            "path": str(tmp_path / "model"),
            "device": "cpu",
        },
        "video": {"num_frames": 5, "height": 32, "width": 32, "fps": 4},
        "reward": {"rewards": [reward], "weights": {"brightness": 1.0}},
        "training": {"num_updates": 1},
        "evaluation": {"every": 1, "batch_size": 4, "num_samples": 4},
    }
    (tmp_path / "run.yaml").write_text(
        json.dumps(tree, ensure_ascii=False), encoding="utf-8"
    )
    names = [video_file_name(number, prompt) for number, prompt in enumerate(PROMPTS)]
    assert [name[3:5] for name in names] == ["一只", "قط", "🦊-", "नम"]

    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    run = tmp_path / "run"
    assert mp4s(run / "samples/update-000001") == names
    assert (
        json.loads((run / "evaluation/update-000001.json").read_text("utf-8"))[
            "prompts"
        ]
        == PROMPTS
    )

    texts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert (
        main(["generate", str(run), *texts, "--output_dir", str(tmp_path / "videos")])
        == 0
    )
    assert mp4s(tmp_path / "videos") == names

    scores = tmp_path / "scores"
    assert (
        main(
            [
                "evaluate",
                str(run),
                "--output_dir",
                str(scores),
                "--trust-config",
                "--resamples",
                "100",
            ]
        )
        == 0
    )
    assert mp4s(scores / "base") == mp4s(scores / "trained") == names
    page = (scores / "evaluation.html").read_text("utf-8")
    assert all(f">{escape(prompt)}</bdi>" in page for prompt in PROMPTS)
