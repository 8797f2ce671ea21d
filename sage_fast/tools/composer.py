"""Captions of the kind that HunyuanVideo-1.5 was trained on and is used with: 60 to 150 words.

Its pipeline rewrites what a person types into a caption that names subject, action, setting, camera, light and style;
a model that is trained on twelve words at a time meets conditions that it never sees in use. Captions are drawn from
`scenes.yaml` by a seed. Some hold text in quotes, for the glyph branch of the prompt encoder, and some are Chinese.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from sage_fast.config.errors import ConfigError
from sage_fast.records import SHORT_CAPTION, Prompt, word_count

Language = Literal["english", "chinese"]

SCENES = Path(__file__).parent / "scenes.yaml"


@cache
def scenes() -> Mapping[str, Any]:
    """The vocabulary by language."""
    tree: Mapping[str, Any] = yaml.safe_load(SCENES.read_text(encoding="utf-8"))
    return tree


def compose(count: int, seed: int, *, without: Sequence[str] = ()) -> list[str]:
    """Captions, all different; the same for the same arguments.

    One in 16 is Chinese and one in 8 holds quoted text. Themes take turns, so that each is as frequent as the others.

    Args:
        count: number of captions.
        seed: of the draw.
        without: captions that must not be among them, such as those of another set.

    Raises:
        ConfigError: `count` is more than can differ.
    """
    generator = random.Random(seed)
    seen, captions = set(without), []
    for number in range(count):
        language: Language = "chinese" if number % 16 == 12 else "english"
        themes = list(scenes()[language]["themes"])
        theme = themes[(number // 16 if language == "chinese" else number) % len(themes)]
        for _ in range(100):
            caption = _caption(generator, language, theme, quoted=number % 8 == 7)
            if caption not in seen:
                break
        else:
            raise ConfigError(f"count is {count}, and the scenes do not hold so many different captions.")
        seen.add(caption)
        captions.append(caption)
    return captions


def _caption(generator: random.Random, language: Language, theme: str, quoted: bool) -> str:
    common = scenes()[language]
    scene = common["themes"][theme]
    pick = generator.choice
    subject, action, setting = (pick(scene[part]) for part in ("subjects", "actions", "settings"))
    details = generator.sample(scene["details"], 2)
    texts = [pick(common["texts"])] if quoted else []
    camera, light, style = (pick(common[part]) for part in ("camera", "light", "style"))
    if language == "chinese":
        # The comma and full stop of Chinese.
        return "".join([f"{setting}\uff0c{subject}{action}\u3002", *details, *texts, camera, light, style])
    return " ".join([f"{subject} {action} {setting}.", *details, *texts, camera, light, style])


def describe_prompts(prompts: Sequence[Prompt]) -> str:
    """What is in a prompt file, with what should be looked at, as lines of text."""
    words = [word_count(prompt.text) for prompt in prompts]
    repeated = len(prompts) - len({prompt.text for prompt in prompts})
    chinese = sum(any("\u4e00" <= c <= "\u9fff" for c in prompt.text) for prompt in prompts)
    quoted = sum(any(mark in prompt.text for mark in '"\u201c') for prompt in prompts)
    lines = [
        f"{len(prompts)} prompts, {min(words)} to {max(words)} words, median {round(statistics.median(words))}",
        f"{chinese} with Chinese, {quoted} with text in quotes, which the video shows",
    ]
    if repeated:
        lines.append(f"{repeated} repeated: a group of its own is drawn for each")
    if statistics.median(words) < SHORT_CAPTION:
        lines.append(
            "Short for HunyuanVideo-1.5, which is used with captions of 80 to 200 words. `sage-fast prompts rewrite` "
            "expands them."
        )
    return "\n".join(lines)
