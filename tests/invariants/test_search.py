"""The site's search finds sections that answer what users of such trainers have asked."""

import re
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


def slug(heading: str) -> str:
    """A heading's anchor on the site."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_section_answers_with_the_words_that_are_typed(question: str) -> None:
    typed, answer = QUESTIONS[question]
    page, _, anchor = answer.partition("#")
    text = (ROOT / "docs" / page).with_suffix(".md").read_text("utf-8")
    sections = {slug(part.split("\n")[0]): part for part in re.split(r"(?m)^#+ ", text)}
    section = sections[anchor] if anchor else text
    assert all(word in section.lower() for word in typed.lower().split())
