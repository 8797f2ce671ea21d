"""The site's search answers questions that users of such trainers have asked."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

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

BOOST = {"title": 1000.0, "text": 1.0}
"""Of Material's index, whose search this repeats: BM25 with k1 = 1.2 and b = 0."""


def terms(text: str) -> Counter[str]:
    """Words of a title or text of the index, each with its count."""
    plain = re.sub(r"<[^>]*>", " ", text).lower()
    return Counter(word for word in re.split(r"[\s\-]+", plain) if word)


def words_left_out(site: Path) -> set[str]:
    """Words that the search in the browser has no index of."""
    (worker,) = (site / "assets/javascripts/workers").glob("search.*.js")
    listed = re.search(r"generateStopWordFilter\(\[(.*?)\]", worker.read_text("utf-8"))
    assert listed is not None
    return set(re.findall(r"\w+", listed[1]))


def best_pages(
    sections: list[dict[str, Any]], question: str, left_out: set[str]
) -> list[str]:
    """Pages that the search lists, the best first; a page is as good as its best
    section.
    """
    fields = []
    holders: Counter[str] = Counter()
    for section in sections:
        found = {name: terms(section[name]) for name in BOOST}
        fields.append(found)
        holders.update(word for words in found.values() for word in words)
    wanted = list(terms(question))
    # A word that is typed means all that begin with it.
    query = Counter(
        word
        for term in wanted
        for word in holders.keys() - left_out
        if word.startswith(term)
    )
    seen = set()
    scores: Counter[str] = Counter()
    for section, found in zip(sections, fields, strict=True):
        page = section["location"].partition("#")[0]
        score = 0.0
        for name, boost in BOOST.items():
            for word in query.keys() & found[name].keys():
                others = len(sections) - holders[word]
                rarity = math.log1p((others + 0.5) / (holders[word] + 0.5))
                count = found[name][word]
                score += boost * query[word] * rarity * 2.2 * count / (1.2 + count)
        matched = query.keys() & (found["title"].keys() | found["text"].keys())
        hit = {
            term for term in wanted if any(word.startswith(term) for word in matched)
        }
        counted = hit | {term for term in wanted if term not in left_out}
        share = (page not in seen) + len(hit) / max(len(counted), 1)
        scores[page] = max(scores[page], score * (1 + share**2))
        seen.add(page)
    return [page for page, score in scores.most_common() if score]


@pytest.mark.slow
def test_the_search_answers_ten_questions_among_its_first_three_pages(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mkdocs", reason="pip install '.[docs]' builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    command += ["--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=quiet, check=True)
    index = json.loads((tmp_path / "search/search_index.json").read_text("utf-8"))
    sections = index["docs"]
    left_out = words_left_out(tmp_path)
    places = {section["location"] for section in sections}
    assert not {place for place in places if place.startswith("source/")}
    assert len(QUESTIONS) == 10
    for question, (typed, answer) in QUESTIONS.items():
        assert answer in places, question
        first = best_pages(sections, typed, left_out)[:3]
        assert answer.partition("#")[0] in first, (question, first)
