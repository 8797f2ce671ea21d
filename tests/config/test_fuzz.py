"""Random configurations, command lines and prompt files: each is read as it says, or refused with a message.

A case is a seed. It makes a file from a good one by mutations, or a command line by appending words. None may end in a
traceback, take longer than ten seconds, or be accepted without every key that it sets standing in the resolved
configuration. A failing case is shrunk by leaving mutations out.
"""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sage_fast.commands.cli import main
from sage_fast.config.load import load_config
from sage_fast.config.schema import by_dotted_key, to_dict
from sage_fast.run.prompt_files import read_prompts

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("in_the_repository")
PRESET = ROOT / "configs/toy_cpu.yaml"
QUICK, ALL = range(80), range(80, 880)
SECONDS = 10
WHOLE = ("reward.weights", "reward.options")
RESOLVED = by_dotted_key(to_dict(load_config(PRESET)), WHOLE)
KEYS = sorted(RESOLVED)
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS} - {""})

VALUES = (
    "", "~", "null", "true", "False", "yes", "No", "on", "OFF", "0", "-0", "1", "2", "5", "-1", "010", "08", "1:30",
    "1_000", "0x10", "0b11", "1.5", "1e3", "1e30", "-1e30", "1e308", "1e400", ".inf", "-.inf", ".nan", "9" * 5000,
    "100000", "99999999999999999999", "1e-300", "''", "'5'", "'010'", "'1:30'", "'yes'", '"\\0"', '"\\ud800"',
    '"\\U99999999"', "toy", "cpu", "cuda:99999999999999999999", "os:system", "..:x", "a:b:c", ":", "none", "auto",
    "lora", "2024-01-01", "é", "猫", "\u202e", "😀", "a" * 10_000, "[]", "{}", "[1, 2]", "[0.1, 0.2]", "[toy, toy]",
    "['..:x']", "{VQ: 1e308}", "{VQ: 1, VQ: 2}", "{1: 2}", "{a: {b: {c: 1}}}", "{toy: {x: 1}}", "[[[[]]]]", "&a [*a]",
    "*nothing", "!!python/object/apply:os.getpid []", "!!binary aGk=", "!x 1", "[" * 3000, "{a: " * 3000, "[" * 40,
    "{<<: {a: 1}}", "{? [a] : 1}", "@", "`", "%", "|", "> x", "- x", "a: b: c", "x\ty", "# nothing", "/nowhere",
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A change of bytes; what it draws is fixed by its seed, so that leaving another one out does not change it."""

    kind: str
    seed: int

    def apply(self, data: bytes) -> bytes:
        return MUTATIONS[self.kind](random.Random(self.seed), data)


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True) or [b""]


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def set_value(draw: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    i = draw.randrange(len(lines))
    head, colon, _ = lines[i].partition(b":")
    lines[i] = head + colon + b" " + encoded(draw.choice(VALUES)) + b"\n"
    return b"".join(lines)


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


def set_well(draw: random.Random, data: bytes) -> bytes:
    """One more key, in its section or at the end, or another value of one that is there."""
    key = draw.choice(KEYS)
    section, _, name = key.rpartition(".")
    line = f"{name}: {plausible(draw, key)}\n".encode()
    lines = lines_of(data)
    heads = {row.split(b":")[0].decode("utf-8", "replace"): i for i, row in enumerate(lines)}
    if not section and name in heads:
        lines[heads[name]] = line
    elif not section or "." in section:
        return data if section else data + line
    elif section not in heads:
        return data + f"{section}:\n  ".encode() + line
    elif f"  {name}" in heads and name not in ("prompts", "every", "batch_size", "num_steps", "name"):
        lines[heads[f"  {name}"]] = b"  " + line
    else:
        lines.insert(heads[section] + 1, b"  " + line)
    return b"".join(lines)


def append_key(draw: random.Random, data: bytes) -> bytes:
    section, _, name = draw.choice(KEYS).rpartition(".")
    value = draw.choice(VALUES)
    text = f"{section}: {{{name}: {value}}}\n" if section and "." not in section else f"{name}: {value}\n"
    return data + encoded(text)


def misspell(draw: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    i = draw.randrange(len(lines))
    head, colon, rest = lines[i].partition(b":")
    lines[i] = head + draw.choice([b"x", b"s", b"_", "é".encode()]) + colon + rest
    return b"".join(lines)


def repeat_line(draw: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    return b"".join([*lines, lines[draw.randrange(len(lines))]])


def remove_line(draw: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def insert_bytes(draw: random.Random, data: bytes) -> bytes:
    place = draw.randrange(len(data) + 1)
    odd = (b"\0", b"\xff", b"\xe9", b"\t", b"\r\n", b"\xef\xbb\xbf", b"{", b"]", b'"', b"'", b"&a", b"*a", b"<<: ",
           b"---\n", b"...\n", b"%YAML 3.0\n", "\u2028".encode(), b"\x07", b"," * 50, b":" * 3, b"!")  # fmt: skip
    return data[:place] + draw.choice(odd) + data[place:]


def cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def bomb(draw: random.Random, data: bytes) -> bytes:
    rows = [b"reward: {options: {toy: {a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f", a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]".encode() for i in range(1, draw.choice([3, 12, 100]))]
    return data.replace(b"reward:", b"unused:") + b"".join(rows) + b"}}}\n"


def encode_otherwise(draw: random.Random, data: bytes) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(draw.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"]))


def grow(draw: random.Random, data: bytes) -> bytes:
    row = draw.choice([b"# comment\n", b"lora: 1\n", b"- 1\n", b'"a prompt"\n', b"node slots=1\n", b"[1, 2, 3], "])
    return data + row * draw.choice([1000, 30_000])


MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    function.__name__: function
    for function in (
        set_value,
        append_key,
        misspell,
        repeat_line,
        remove_line,
        insert_bytes,
        cut,
        bomb,
        encode_otherwise,
        grow,
        set_well,
    )
}
OFTEN = ("set_value",) * 4 + ("append_key",) * 4 + ("set_well",) * 40


def odd_word(draw: random.Random) -> list[str]:
    """An override, mostly of a key that exists, mostly spelled as one."""
    key, value = draw.choice([*KEYS, *SECTIONS, "reward.options.toy.size", "reward.weights.VQ"]), draw.choice(VALUES)
    value = plausible(draw, key) if key in KEYS and draw.random() < 0.7 else value.replace("\0", "")
    forms = [
        [f"--{key}={value}"], [f"--{key}", value], [f"--{key}+={value}"], [f"{key}={value}"], [f"-{key}={value}"],
        [f"\u2013{key}={value}"], [f"--{key}"], [f"--{key[:-1]}={value}"], [f"--{key}x={value}"], ["--"], ["--="],
        ["---"], [""], [f"--{key}.x={value}"], [f"--config={value}"], ["--print_conf"], ["--caf\udce9=1"],
        [f"--{key.replace('.', '-')}={value}"], ["--help.x"], ["nowhere.yaml"], [str(ROOT)],
    ]  # fmt: skip
    return draw.choice(forms[:1] * 80 + forms[1:2] * 20 + forms)


@dataclass(frozen=True)
class Case:
    """Input that is read (`config`, `words`, or a kind of file), from which mutations and words it is made."""

    kind: str
    mutations: tuple[Mutation, ...] = ()
    words: tuple[tuple[str, ...], ...] = ()

    def smaller(self) -> Iterator["Case"]:
        for i in range(len(self.mutations)):
            yield Case(self.kind, self.mutations[:i] + self.mutations[i + 1 :], self.words)
        for i in range(len(self.words)):
            yield Case(self.kind, self.mutations, self.words[:i] + self.words[i + 1 :])

    def content(self) -> bytes:
        data = BASES[self.kind]
        for mutation in self.mutations:
            data = mutation.apply(data)
        return data


PROMPTS = b'{"prompt": "a red circle", "index": 3, "seed": 7}\n"a blue square"\n{"prompt": "x", "seed": null}\n'
BASES = {
    "config": PRESET.read_bytes(),
    "words": PRESET.read_bytes(),
    "prompts.csv": b'prompt,index,seed\n"a red circle, moving left",0,7\na blue square,1,\n',
    "prompts.jsonl": PROMPTS,
    "prompts.txt": b"a red circle\na blue square\n",
}
KINDS = ["config"] * 5 + ["words"] * 4 + ["prompts.csv", "prompts.jsonl", "prompts.jsonl", "prompts.txt"]


def case_of(seed: int) -> Case:
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    names = [*MUTATIONS, *(OFTEN if kind == "config" else ())]
    count = draw.randint(1, 4) if kind != "words" else 0
    mutations = tuple(Mutation(draw.choice(names), draw.randrange(2**32)) for _ in range(count))
    words = tuple(tuple(odd_word(draw)) for _ in range(draw.randint(1, 4))) if kind == "words" else ()
    return Case(kind, mutations, words)


class Hang(BaseException):
    """Not an Exception, so that no handler in the code that hangs takes it for its own."""


@contextlib.contextmanager
def watchdog() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(case: Case, folder: Path) -> tuple[bool, str | None]:
    """True if a case is accepted, and a word on it where it ends neither accepted nor refused."""
    path = folder / (case.kind if "." in case.kind else "case.yaml")
    path.write_bytes(case.content())
    words = [word for group in case.words for word in group]
    output = io.StringIO()
    try:
        with watchdog(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            status = READERS.get(case.kind, read_prompt_file)(path, words)
    except Hang:
        return False, f"no end after {SECONDS} s"
    except SystemExit as end:
        return False, None if end.code == 2 else f"SystemExit({end.code!r})"
    except Exception as error:  # noqa: BLE001 - whatever else it is, it would be a traceback
        return False, f"{type(error).__name__}: {str(error)[:300]}"
    if status not in (0, 2):
        return False, f"status {status}"
    accepted = status == 0 and bool(output.getvalue())
    return accepted, ignored_key(case, words, output.getvalue()) if accepted else None


def run_train(path: Path, words: Sequence[str]) -> int:
    return main(["train", str(path), *words, "--print_config"])


def read_prompt_file(path: Path, _: Sequence[str]) -> int:
    try:
        read_prompts(path)
    except (ValueError, OSError) as error:
        assert str(error).startswith(str(path)), f"no path in: {error}"
        return 2
    return 0


READERS: dict[str, Callable[[Path, Sequence[str]], int]] = {"config": run_train, "words": run_train}


def ignored_key(case: Case, words: Sequence[str], printed: str) -> str | None:
    """A key of an accepted configuration that does not stand in the resolved one as it was given."""
    if key := repeated_key(yaml.compose(case.content().decode("utf-8-sig"))):
        return f"{key!r} is given twice and accepted"
    resolved = by_dotted_key(yaml.safe_load(printed), WHOLE)
    given = by_dotted_key(yaml.safe_load(case.content().decode("utf-8-sig")), WHOLE)
    rest = iter(words)
    for word in rest:
        key, separator, value = word.partition("=")
        key = key.removeprefix("--")
        value = value if separator else next(rest, "")
        if key in SECTIONS:
            given |= by_dotted_key(yaml.safe_load(value) or {}, WHOLE, f"{key}.")
        elif key in KEYS:
            given[key] = Raw(value)
        else:
            for part in WHOLE + tuple(k for k in KEYS if f"{k}+" == key):
                if key.startswith(part):
                    given.pop(part, None)  # an append, or one name of a mapping
                    break
            else:
                if word not in ("--", "---"):
                    return f"the word {word!r} is accepted, and is no key"
    for key, value in given.items():
        if key not in resolved:
            return f"{key} is accepted, and not in the resolved configuration"
        if not same(value, resolved[key]):
            return f"{key} is {value!r}, and {resolved[key]!r} in the resolved configuration"
    return None


def repeated_key(node: yaml.Node | None) -> str | None:
    """A key that a mapping of a document has twice."""
    if not isinstance(node, yaml.MappingNode):
        return None
    names = [key.value for key, _ in node.value]
    inside = (repeated_key(value) for _, value in node.value)
    return next((name for name in names if names.count(name) > 1), None) or next(filter(None, inside), None)


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


def shrunk(case: Case, folder: Path) -> Case:
    """The case with as few mutations and words as still show a problem."""
    for smaller in case.smaller():
        if outcome(smaller, folder)[1]:
            return shrunk(smaller, folder)
    return case


def check(seeds: Sequence[int], folder: Path) -> int:
    """Number of accepted cases; fails with a minimal case where one ends badly."""
    accepted = 0
    for seed in seeds:
        good, problem = outcome(case_of(seed), folder)
        accepted += good
        if problem:
            case = shrunk(case_of(seed), folder)
            pytest.fail(f"seed {seed}: {outcome(case, folder)[1]}\nminimal case: {case}\n{case.content()[-400:]!r}")
    return accepted


def test_a_random_case_is_read_or_refused(tmp_path: Path) -> None:
    check(QUICK, tmp_path)


@pytest.mark.slow
def test_more_random_cases_are_read_or_refused(tmp_path: Path) -> None:
    """Many of them are accepted, else nothing would be found where keys are ignored."""
    accepted = check(ALL, tmp_path)
    assert accepted >= 120


def ends_well(words: Sequence[str], **environment: str) -> tuple[int, str]:
    """Status and stderr of the real program. It is killed where it hangs."""
    result = subprocess.run(
        [sys.executable, "-m", "sage_fast", *words],
        env=os.environ | environment, capture_output=True, timeout=120, errors="replace",
    )  # fmt: skip
    assert result.returncode in (0, 1, 2) and "Traceback" not in result.stderr, (words, result.stderr[-2000:])
    return result.returncode, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("utf8", ["0", "1"])
def test_a_path_beyond_ascii_in_the_c_locale(utf8: str, tmp_path: Path) -> None:
    file = tmp_path / "é猫.yaml"
    file.write_bytes(PRESET.read_bytes() + "logging: {wandb_project: é猫}\n".encode())
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": utf8}
    words = ["train", str(file), f"--output_dir={tmp_path / 'é'}"]
    status, errors = ends_well([*words, "--print_config"], **ascii_only)
    assert status == 0 or (utf8 == "0" and "not UTF-8" in errors)
    status, errors = ends_well([*words, f"--data.prompts={tmp_path / '猫.txt'}"], **ascii_only)
    assert status == 2 and "error: " in errors


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2006))
def test_random_cases_as_real_processes(seed: int, tmp_path: Path) -> None:
    while (case := case_of(seed)).kind not in ("config", "words"):
        seed += 1000
    path = tmp_path / "case.yaml"
    path.write_bytes(case.content())
    words = [word for group in case.words for word in group if "\0" not in word]
    ends_well(["train", str(path), f"--output_dir={tmp_path / 'run'}", *words, "--print_config"])
