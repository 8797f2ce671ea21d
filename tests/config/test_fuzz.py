"""Random configurations and command lines: each is read as it says, or refused with a
message.

A case is a seed. It sets keys of a good file to other values, in the file or on the
command line. None may end in a traceback, or be accepted without every key that it sets
standing in the resolved configuration.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.documents import read_yaml
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import dump_config, load_config
from sage_fast.config.schema import by_dotted_key

PRESET = Path(__file__).resolve().parents[2] / "configs/toy_cpu.yaml"
WHOLE = ("reward.weights", "reward.options")
RESOLVED = by_dotted_key(read_yaml(dump_config(load_config(PRESET)), "preset"), WHOLE)
KEYS = sorted(RESOLVED)
SET_BY_PRESET = by_dotted_key(read_yaml(PRESET.read_text("utf-8"), "preset"), WHOLE)

VALUES = (
    "", "~", "null", "true", "False", "yes", "No", "on", "0", "-0", "1", "2", "-1", "010", "08", "1:30", "1_000",
    "0x10", "0b11", "1.5", "1e3", "1e30", "-1e30", "1e400", ".inf", ".nan", "9" * 5000, "1e-300", "''", "'010'",
    "'yes'", "toy", "cpu", "os:system", "..:x", "a:b:c", ":", "auto", "lora", "2024-01-01", "猫", "a" * 10_000, "[]",
    "{}", "[1, 2]", "[toy, toy]", "{VQ: 1e308}", "{VQ: 1, VQ: 2}", "{1: 2}", "{a: {b: {c: 1}}}", "{toy: {x: 1}}",
    "&a [*a]", "*nothing", "!!python/object/apply:os.getpid []", "!x 1", "{<<: {a: 1}}", "{? [a] : 1}", "@", "%", "|",
    "- x", "a: b: c", "x\ty",
)  # fmt: skip
ODD_TEXTS = (
    "\0",
    "\t",
    "\ufeff",
    "x",
    "é",
    "{",
    "]",
    '"',
    "'",
    "&a",
    "*a",
    "<<: ",
    "---",
    "%YAML 3.0",
    "\u2028",
    ":::",
)


def plausible(draw: random.Random, key: str) -> str:
    """A value that a key takes, in one of its spellings; not always together with the
    others.
    """
    value = RESOLVED[key]
    if isinstance(value, bool):
        return draw.choice(["true", "false", "True", "FALSE"])
    if isinstance(value, int):
        return draw.choice(
            [str(value)] * 4
            + [str(2 * value), f"'{value}'", hex(value), f"+{value}", "1", "1_0"]
        )
    if isinstance(value, float):
        return draw.choice(
            [
                str(value),
                f"{value:e}",
                f"{value / 2:.9f}",
                f"'{value}'",
                "1",
                ".5",
                "0.25",
            ]
        )
    return json.dumps(value)


def as_lines(values: dict[str, str]) -> list[str]:
    """A configuration file of dotted keys, the values as they stand."""
    lines: list[str] = []
    for key in sorted(values):
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if (header := f"{'  ' * depth}{section}:") not in lines:
                lines.append(header)
        lines.append(f"{'  ' * len(sections)}{name}: {values[key]}")
    return lines


def damage(draw: random.Random, lines: list[str]) -> None:
    """Repeats, loses or garbles a line."""
    at = draw.randrange(len(lines))
    place = draw.randrange(len(lines[at]) + 1)
    garbled = lines[at][:place] + draw.choice(ODD_TEXTS) + lines[at][place:]
    lines[at : at + 1] = draw.choice([[lines[at]] * 2, [], [garbled], [garbled]])


def case_of(seed: int) -> tuple[str, dict[str, str]]:
    """Content of a file, and values by key that are given after it."""
    draw = random.Random(seed)
    values = {key: json.dumps(value) for key, value in SET_BY_PRESET.items()}
    given = {
        key: plausible(draw, key) if draw.random() < 0.7 else draw.choice(VALUES)
        for key in draw.choices(KEYS, k=draw.randint(1, 4))
    }
    if draw.random() < 0.5:
        return "\n".join(as_lines(values)), given
    lines = as_lines(values | given)
    if draw.random() < 0.2:
        damage(draw, lines)
    return "\n".join(lines), {}


def comparable(value: Any) -> Any:
    """A value with every number as a float and all else as text."""
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [comparable(part) for part in value]
    try:
        return str(value).lower() if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return str(value).lower()


def as_yaml(word: str) -> object:
    """Value of a word as YAML; the word itself where it is none."""
    try:
        return read_yaml(word, "word")
    except ConfigError:
        return word


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 460), marks=pytest.mark.slow)]
)
def test_a_random_case_is_read_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seeds: range
) -> None:
    """Many of them are accepted, else nothing would be found where keys are ignored."""
    path = tmp_path / "case.yaml"
    accepted = 0
    for seed in seeds:
        content, given = case_of(seed)
        path.write_text(content, encoding="utf-8")
        words = [f"--{key}={value}" for key, value in given.items()]
        try:
            status = main(["train", str(path), *words, "--print_config"])
        except Exception as error:  # noqa: BLE001 - whatever it is, it would be a traceback
            pytest.fail(f"seed {seed}: {error!r}\n{words}\n{content}")
        printed = capsys.readouterr().out
        assert status in (0, 2), seed
        if status == 0:
            accepted += 1
            resolved, in_file = (
                by_dotted_key(read_yaml(text, "case"), WHOLE)
                for text in (printed, content)
            )
            expected = {key: [comparable(value)] for key, value in in_file.items()}
            # A word is a string as it stands, or what YAML makes of it.
            expected |= {
                key: [comparable(value), comparable(as_yaml(value))]
                for key, value in given.items()
            }
            for key, readings in expected.items():
                assert comparable(resolved[key]) in readings, (seed, key)
    assert accepted >= 0.15 * len(seeds)
