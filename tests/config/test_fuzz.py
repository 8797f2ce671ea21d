"""Random configurations and command lines: each is read as it says, or refused with a message.

A case is a seed. It makes a file from a good one by mutations, or a command line by appending words. None may end in a
traceback, or be accepted without every key that it sets standing in the resolved configuration.
"""

import contextlib
import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from sage_fast.commands.cli import main
from sage_fast.config.load import dump_config, load_config
from sage_fast.config.schema import by_dotted_key

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("in_the_repository")
PRESET = ROOT / "configs/toy_cpu.yaml"
WHOLE = ("reward.weights", "reward.options")
RESOLVED = by_dotted_key(yaml.safe_load(dump_config(load_config(PRESET))), WHOLE)
KEYS = sorted(RESOLVED)
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS} - {""})

VALUES = (
    "", "~", "null", "true", "False", "yes", "No", "on", "0", "-0", "1", "2", "-1", "010", "08", "1:30", "1_000",
    "0x10", "0b11", "1.5", "1e3", "1e30", "-1e30", "1e400", ".inf", ".nan", "9" * 5000, "1e-300", "''", "'010'",
    "'yes'", "toy", "cpu", "os:system", "..:x", "a:b:c", ":", "auto", "lora", "2024-01-01", "猫", "a" * 10_000, "[]",
    "{}", "[1, 2]", "[toy, toy]", "{VQ: 1e308}", "{VQ: 1, VQ: 2}", "{1: 2}", "{a: {b: {c: 1}}}", "{toy: {x: 1}}",
    "&a [*a]", "*nothing", "!!python/object/apply:os.getpid []", "!x 1", "{<<: {a: 1}}", "{? [a] : 1}", "@", "%", "|",
    "- x", "a: b: c", "x\ty",
)  # fmt: skip


def plausible(draw: random.Random, key: str) -> str:
    """A value that a key takes, in one of its spellings; not always together with the others."""
    value = RESOLVED[key]
    if isinstance(value, bool):
        return draw.choice(["true", "false", "True", "FALSE"])
    if isinstance(value, int):
        return draw.choice([str(value)] * 4 + [str(2 * value), f"'{value}'", hex(value), f"+{value}", "1", "1_0"])
    if isinstance(value, float):
        return draw.choice([str(value), f"{value:e}", f"{value / 2:.9f}", f"'{value}'", "1", ".5", "0.25"])
    return json.dumps(value)


def set_value(draw: random.Random, lines: list[str]) -> None:
    i = draw.randrange(len(lines))
    lines[i] = f"{lines[i].partition(':')[0]}: {draw.choice(VALUES)}"


def set_well(draw: random.Random, lines: list[str]) -> None:
    """One more key, in its section, or another value of one that is there."""
    key = draw.choice([key for key in KEYS if key.count(".") == 1])
    section, _, name = key.partition(".")
    line = f"  {name}: {plausible(draw, key)}"
    if f"{section}:" not in lines:
        lines += [f"{section}:", line]
        return
    start = lines.index(f"{section}:") + 1
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("  ")), len(lines))
    own = [i for i in range(start, end) if lines[i].startswith(f"  {name}:")]
    lines[start : own[0] + 1 if own else start] = [*lines[start : own[0]], line] if own else [line]


def append_key(draw: random.Random, lines: list[str]) -> None:
    section, _, name = draw.choice(KEYS).rpartition(".")
    value = draw.choice(VALUES)
    lines.append(f"{section}: {{{name}: {value}}}" if section and "." not in section else f"{name}: {value}")


def misspell(draw: random.Random, lines: list[str]) -> None:
    i = draw.randrange(len(lines))
    lines[i] = lines[i].replace(":", draw.choice(["x:", "s:", "_:", "é:"]), 1)


def repeat_line(draw: random.Random, lines: list[str]) -> None:
    lines.append(draw.choice(lines))


def remove_line(draw: random.Random, lines: list[str]) -> None:
    del lines[draw.randrange(len(lines))]


def insert_text(draw: random.Random, lines: list[str]) -> None:
    i = draw.randrange(len(lines))
    place = draw.randrange(len(lines[i]) + 1)
    odd = draw.choice(
        ["\0", "\t", "\ufeff", "{", "]", '"', "'", "&a", "*a", "<<: ", "---", "%YAML 3.0", "\u2028", ":::"]
    )
    lines[i] = lines[i][:place] + odd + lines[i][place:]


MUTATIONS: Sequence[Callable[[random.Random, list[str]], None]] = (
    *(append_key, misspell, repeat_line, remove_line, insert_text),
    *(set_value,) * 4,
    *(set_well,) * 20,
)


def odd_word(draw: random.Random) -> list[str]:
    """An override, mostly of a key that exists, mostly spelled as one."""
    key, value = draw.choice([*KEYS, *SECTIONS, "reward.options.toy.size", "reward.weights.VQ"]), draw.choice(VALUES)
    value = plausible(draw, key) if key in KEYS and draw.random() < 0.7 else value
    forms = [
        [f"--{key}={value}"], [f"--{key}", value], [f"--{key}+={value}"], [f"{key}={value}"], [f"-{key}={value}"],
        [f"\u2013{key}={value}"], [f"--{key}"], [f"--{key[:-1]}={value}"], ["--"], ["--="], ["---"], [""],
        [f"--{key}.x={value}"], [f"--config={value}"], [f"--{key.replace('.', '-')}={value}"], ["nowhere.yaml"],
    ]  # fmt: skip
    return draw.choice(forms[:1] * 60 + forms[1:2] * 15 + forms)


def case_of(seed: int) -> tuple[str, list[str]]:
    """Content of a file, and words after it."""
    draw = random.Random(seed)
    lines = [line.partition("#")[0].rstrip() for line in PRESET.read_text("utf-8").splitlines()]
    lines = [line for line in lines if line]
    if draw.random() < 0.5:
        return "\n".join(lines), [word for _ in range(draw.randint(1, 4)) for word in odd_word(draw)]
    for _ in range(draw.randint(1, 4)):
        draw.choice(MUTATIONS)(draw, lines)
    return "\n".join(lines), []


def check(seeds: Sequence[int], folder: Path) -> int:
    """Number of accepted cases."""
    accepted = 0
    for seed in seeds:
        content, words = case_of(seed)
        path = folder / "case.yaml"
        path.write_text(content, encoding="utf-8")
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
                status = main(["train", str(path), *words, "--print_config"])
        except SystemExit as end:
            status = end.code
        except Exception as error:  # noqa: BLE001 - whatever it is, it would be a traceback
            pytest.fail(f"seed {seed}: {error!r}\n{words}\n{content}")
        assert status in (0, 2), (seed, status)
        if status == 0 and output.getvalue():
            accepted += 1
            problem = ignored_key(content, words, output.getvalue())
            assert problem is None, f"seed {seed}: {problem}\n{words}\n{content}"
    return accepted


def ignored_key(content: str, words: Sequence[str], printed: str) -> str | None:
    """A key of an accepted configuration that does not stand in the resolved one as it was given."""
    resolved = by_dotted_key(yaml.safe_load(printed), WHOLE)
    given = by_dotted_key(yaml.safe_load(content), WHOLE)
    rest = iter(words)
    for word in rest:
        key, separator, value = word.partition("=")
        key = key.removeprefix("--")
        value = value if separator else next(rest, "")
        if key in SECTIONS:
            given |= by_dotted_key(yaml.safe_load(value) or {}, WHOLE, f"{key}.")
        elif key in KEYS:
            given[key] = Raw(value)
        elif owner := next((k for k in KEYS if key == f"{k}+" or (k in WHOLE and key.startswith(k))), None):
            given.pop(owner, None)  # an append, or one name of a mapping
        elif word not in ("--", "---"):
            return f"the word {word!r} is accepted, and is no key"
    for key, value in given.items():
        if key not in resolved or not same(value, resolved[key]):
            return f"{key} is {value!r}, and {resolved.get(key)!r} in the resolved configuration"
    return None


class Raw(str):
    """A value on the command line: a string as it stands, or what YAML makes of it."""


def same(given: Any, resolved: Any) -> bool:
    if isinstance(given, Raw):
        return given == resolved or same(yaml.safe_load(given), resolved)
    if isinstance(given, dict) and isinstance(resolved, dict):
        return given.keys() == resolved.keys() and all(same(given[name], resolved[name]) for name in given)
    if isinstance(given, list | tuple) and isinstance(resolved, list):
        return len(given) == len(resolved) and all(map(same, given, resolved))
    if given is None or resolved is None or isinstance(given, bool) or isinstance(resolved, bool):
        return given is resolved or str(given).lower() == str(resolved).lower()
    with contextlib.suppress(TypeError, ValueError):
        return float(given) == float(resolved)
    return str(given) == str(resolved)


def test_a_random_case_is_read_or_refused(tmp_path: Path) -> None:
    check(range(60), tmp_path)


@pytest.mark.slow
def test_more_random_cases_are_read_or_refused(tmp_path: Path) -> None:
    """Many of them are accepted, else nothing would be found where keys are ignored."""
    assert check(range(60, 460), tmp_path) >= 60
