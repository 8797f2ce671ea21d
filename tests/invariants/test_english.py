"""The check of the English of docstrings, messages and pages finds what it is for."""

import pytest

from docs.tools import english


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, '"""Whether it holds."""\nx = 1'),
        (3, "x = 1  # it is no file; besides, this is to change"),
        (5, 'def f():\n    """What has no name\n    was told anew of its own."""'),
        (0, '"""True if there is no file, no longer than 3: `told`, "anew"."""'),
        (
            5,
            '"""The weights as diffusers has it, in place of None is all; a forward '
            'more, which would not do."""',
        ),
        (0, '"""Diffusers has it; one forward more than before, as many as there."""'),
        (1, 'raise ValueError(f"{path} is no run")'),
        (2, 'logger.warning("which is what hears of it %s", 3)'),
        (1, 'parser.add_argument("--x", help="besides" " this")'),
        (0, 'call("is no run", name="besides")'),
    ],
)
def test_complaints_about_code(count: int, text: str) -> None:
    found: list[object] = []
    for _, part, opening in english.prose_of_code(text):
        found += english.complaints(part, opening=opening)
    assert len(found) == count


def test_a_long_sentence_is_found_and_a_short_one_is_not() -> None:
    words = "word " * english.MAX_WORDS
    page = (
        f"# Title\n\n{words}. [{words}](x.md). `a b` v1.5 {words}\n\n"
        f"| {words}| {words}|\n\n    {words}{words}\n"
    )
    assert [line for line, _ in english.long_sentences(page)] == [3]
    short = f"{words}\n\n{words}\n* {words}\n* {words}"
    assert not list(english.long_sentences(short))
    second = f"One.\nTwo {words[:60]}\n{words}"
    assert [line for line, _ in english.long_sentences(second)] == [2]


def test_a_wide_line_of_code_is_found() -> None:
    wide = "x" * (english.MAX_COLUMNS + 1)
    page = (
        f"{wide}\n\n    {wide}\n\n```python\n{wide}\n```\n{wide}\n"
        f"```mermaid\n{wide}\n```\n    {wide[5:]}\n"
    )
    assert [line for line, _ in english.wide_lines(page)] == [3, 6]
