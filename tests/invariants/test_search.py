"""The site's search finds sections that answer what users of such trainers have asked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

QUESTIONS = {
    "The job was killed. Does training go on where it was?": (
        "resume training",
        "reliability.html#continue-a-run",
    ),
    "CUDA is out of memory. Which settings help?": (
        "out of memory",
        "memory.html#out-of-memory",
    ),
    "Does it train on the GPU that I have?": (
        "which gpu",
        "how_to/which_card.html",
    ),
    "The reward only fluctuates. Why?": (  # DanceGRPO 34, 64, 108
        "reward not increasing",
        "how_to/reward_does_not_move.html#flat-or-not-increasing",
    ),
    "The reward rises, but the videos blur. Why?": (  # DanceGRPO 94, flow_grpo 233
        "reward hacking blurry",
        "how_to/reward_does_not_move.html#reward-hacking-the-reward-rises-the-videos-blur",
    ),
    "Can a run end by itself when it gets worse?": (
        "early stopping",
        "how_to/watch.html#stop-a-run-early-stopping",
    ),
    "How is an adapter used in ComfyUI?": (
        "ComfyUI",
        "how_to/generate.html#comfyui-and-other-programs-push-to-the-hub",
    ),
    "How is an adapter shared?": (
        "push to hub",
        "how_to/generate.html#comfyui-and-other-programs-push-to-the-hub",
    ),
    "Does it train image-to-video?": (  # UniRL 127
        "image to video",
        "real_model.html#image-to-video-weights",
    ),
    "Do sampling and training compute the same?": (  # UniRL 386, 412; verl-omni 97
        "train inference mismatch",
        "comparison.html#rollout-engines-and-train-inference-mismatch",
    ),
}
"""A user's question: the words to type, and the section that answers. Numbers
are issues of the trainer that is named.
"""


@pytest.mark.slow
def test_the_site_has_the_sections_that_answer_with_the_words_that_are_typed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mkdocs", reason="pip install '.[docs]' builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    command += ["--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=quiet, check=True)
    index = json.loads((tmp_path / "search/search_index.json").read_text("utf-8"))
    sections = index["docs"]
    places = {section["location"]: section for section in sections}
    assert not [place for place in places if place.startswith("source/")]
    for question, (typed, answer) in QUESTIONS.items():
        page = answer.partition("#")[0]
        shown = "".join(
            f"{section['title']} {section['text']} "
            for place, section in places.items()
            if place.partition("#")[0] == page
        ).lower()
        assert answer in places, question
        assert all(word.lower() in shown for word in typed.split()), question
