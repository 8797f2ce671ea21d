"""Documents against code: commands parse, Python blocks import, tables are those of
code and committed results.
"""

import ast
import json
import pkgutil
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import yaml

import sage_fast
from benchmarks import report
from docs.tools import english
from sage_fast.commands.cli import COMMANDS, main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import dump_config, load_config, meanings
from sage_fast.config.schema import RunConfig
from tests.commands.programs import (
    check_command,
    check_extras,
    own_programs,
    run_module,
)
from tests.test_sde import dispersion_rows, leftover_rows

ROOT = Path(__file__).resolve().parents[2]


DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "kernels/README.md",
    "docs/**/*.md",
)

PROGRAMS = (
    r"hf|torchrun|sage-fast|modelscope|make|python -m|pytest|(?:\.venv/bin/)?pip|sbatch|configs/launch/torchrun\.sh"
    r"|\.ci/run|tensorboard|git|source|ulimit|touch"
)
COMMAND = re.compile(rf"(?:    |#   |  )((?:[A-Z_]+=\S+ )*(?:{PROGRAMS})(?: .*)?)")
"""A line of a document's code block, of a configuration's header, of a docstring, or of
a command's help.
"""
INLINE = re.compile(
    r"(?<!`)`((?:[A-Z_]+=\S+ )*(?:sage-fast|python -m|make|torchrun[^`]* -m sage_fast)\s[^`{}<]+)`(?!`)"
)
"""A command of this project in the text; one with braces is put together when the
program runs.
"""
STANDS_FOR = {
    "PRESET": "toy_cpu",
    "CONFIG": "toy_cpu",
    "...": "toy_cpu",
    "COMMAND": "plan",
}
STANDS_FOR |= {"KEY": "table1", "SEED": "0"}
"""Words of a document that the reader replaces."""
CODE = [
    f"{folder}/**/*.py"
    for folder in ("sage_fast", "kernels/sage_kernels", "benchmarks", "experiments")
]
SOURCES = (
    *DOCUMENTS,
    "SECURITY.md",
    "configs/**/*.*",
    ".github/**/*.*",
    "examples/*.py",
    "docs/tools/*.py",
    *CODE,
)
TEXTS = {
    file: file.read_text("utf-8")
    for pattern in SOURCES
    for file in sorted(ROOT.glob(pattern))
}


def typed(lines: Iterable[str]) -> list[str]:
    """Commands without what explains them and where their output goes, each once."""
    plain = [
        re.split(r"\s+#|\s{3,}|\s>+\s", " ".join(line.split("\n")))[0] for line in lines
    ]
    names = "|".join(map(re.escape, STANDS_FOR))
    return list(
        dict.fromkeys(
            re.sub(rf"(?<!\S)(?:{names})(?!\S)", lambda m: STANDS_FOR[m[0]], one)
            for one in plain
        )
    )


def documented_commands() -> list[str]:
    """Every command that is shown to be typed."""
    found = []
    for text in TEXTS.values():
        lines = iter(text.splitlines())
        for line in lines:
            if (match := COMMAND.fullmatch(line)) is None or re.match(
                r"\w+ = ", match[1]
            ):
                continue
            command = match[1]
            while command.endswith("\\"):
                command = command.rstrip("\\") + next(lines).strip()
            found.append(command)
    return typed(found)


def named_commands() -> list[str]:
    """Every command that a sentence names, maybe without all that it needs."""
    return typed(command for text in TEXTS.values() for command in INLINE.findall(text))


def test_the_documents_are_full_of_commands() -> None:
    found = Counter(command.split()[0] for command in documented_commands())
    assert found >= Counter(
        {"sage-fast": 35, "python": 15, "make": 9, "hf": 6, "torchrun": 6}
    )


@pytest.mark.parametrize("command", documented_commands())
def test_a_documented_command_parses(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for part in command.split(" && "):
        if not part.startswith("cd "):
            check_command(part)


def test_what_make_runs_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    values = dict(re.findall(r"^(\w+) \?= ?(.*)$", makefile, re.M)) | {"JOBS": "2"}
    recipes = re.findall(
        r"^\t(?:\w+=\S+ )*\$\(BIN\)/((?:sage-fast|python -m (?:pytest|benchmarks|docs)).*)$",
        makefile,
        re.M,
    )
    assert len(recipes) == 7
    for recipe in recipes:
        check_command(
            re.sub(
                r"\$\((\w+)\)",
                lambda m: values[m[1]],
                recipe.replace("$$((4 * $$(nproc)))", "8"),
            )
        )


@pytest.mark.parametrize("command", named_commands())
def test_a_command_in_a_sentence_is_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may name its program alone, and leave out what the program requires."""
    monkeypatch.chdir(ROOT)
    match command.split():
        case ["sage-fast", name]:
            assert name in (*COMMANDS, "--version")
        case ["python", "-m", module]:
            assert find_spec(module) is not None
        case _:
            try:
                check_command(command)
            except SystemExit as end:
                assert (
                    not end.code or "arguments are required" in capsys.readouterr().err
                )


@pytest.mark.parametrize("module", own_programs())
def test_every_program_explains_itself(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_module(module, ["--help"])
    assert not end.value.code and "usage: " in "".join(capsys.readouterr())


COMMANDS_IN_ORDER = (
    "sage-fast configs",
    "sage-fast doctor hv15_quick_lora_1gpu",
    "sage-fast plan hv15_quick_lora_1gpu",
    "sage-fast train toy_cpu --dry-run",
    "sage-fast train hv15_quick_lora_1gpu --output_dir runs/mine",
    "sage-fast status runs",
    "sage-fast train runs/mine --resume auto",
    "sage-fast evaluate runs/mine --output_dir scores",
    "sage-fast export runs/mine --output_dir exported",
    "sage-fast train toy_cpu --output_dir runs/dance --rollout.sde_type=dance_grpo",
    (
        'sage-fast generate runs/dance --prompt "a red circle moving left" '
        "--output_dir runs/dance/videos"
    ),
    "sage-fast compare runs/demo runs/dance --output_dir runs/compared",
    "sage-fast profile toy_cpu --output_dir profile",
)
"""Of the README and the demo's page: each command of `sage-fast` once."""

PROGRAMS_IN_ORDER = (
    "python -m docs.tools.english README.md",
    "python -m sage_kernels.readme",
    "python -m sage_kernels.parity --op adaln",
    "python -m benchmarks guard --only block",
)

STARTED_BY = {
    "python -m sage_fast": "distributed/test_failures.py::test_torchrun_restarts_and_the_run_goes_on_by_itself",
    "python -m sage_fast.rewards.server": "rewards/test_server.py::test_the_command_serves_a_preset",
    "python -m experiments": "experiments/test_runner.py::test_the_command_measures_what_is_missing",
    "python -m experiments.measures": "experiments/test_runner.py::test_the_command_measures_what_is_missing",
    "python -m experiments.pretrain": "experiments/test_pretrain.py::test_the_command_line",
    "python -m examples.demo_controls": "tools/test_documented_api.py::test_the_controls_of_the_demo",
    "python -m sage_kernels.aot": "kernels/test_aot.py::test_kernels_stay_within_limits",
    "python -m tests.kernels.guard_pages": "kernels/test_guard_pages.py::test_no_access_lies_beside_its_tensor",
    "python -m tests.tiny.true_size": "models/hunyuan15/test_loading.py::test_random_weights_of_the_true_width",
    "python -m benchmarks": "benchmarks/test_session.py::test_every_command_measures_its_first_cells",
}
"""Programs with an option or a size that no document shows, which makes them small:
their tests.
"""

PACKAGES = (
    "sage_fast",
    "sage_kernels",
    "benchmarks",
    "experiments",
    "examples",
    "docs",
    "tests",
)
NOT_STARTED = {"python -m experiments.readers": "EasyOCR"}
"""Programs that need a library which is not installed for the tests; their arguments
are parsed.
"""


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_the_commands_run_one_after_another(
    tiny_run: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model, and otherwise word for word."""
    file = tmp_path / "tiny.yaml"
    file.write_text(
        dump_config(
            tiny_run("--training.num_updates=1", "--data.prompts=prompts/toy_train.csv")
        )
    )
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS_IN_ORDER:
        words = shlex.split(
            re.sub(r"\b(?:hv15_quick_lora_1gpu|toy_cpu)\b", str(file), command)
        )
        assert (
            main([word.replace("runs/demo", "runs/mine") for word in words[1:]]) == 0
        ), command


@pytest.mark.slow
@pytest.mark.parametrize("command", PROGRAMS_IN_ORDER)
@pytest.mark.usefixtures("in_the_repository")
def test_a_program_runs(command: str) -> None:
    _, _, module, *words = command.split()
    try:
        run_module(module, words)
    except SystemExit as end:
        assert not end.code


def test_every_documented_program_is_started_by_a_test() -> None:
    commands = {
        re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
        for line in (*documented_commands(), *named_commands())
    }
    assert {*COMMANDS_IN_ORDER} <= commands
    assert {command.split()[1] for command in COMMANDS_IN_ORDER} == COMMANDS.keys()
    programs = {
        " ".join(words[: 3 if words[0] == "python" else 1])
        for words in map(str.split, commands)
    }
    own = {
        program for program in programs if program.split()[-1].split(".")[0] in PACKAGES
    }
    started = {
        " ".join(command.split()[:3]) for command in PROGRAMS_IN_ORDER
    } | STARTED_BY.keys()
    assert own - started == NOT_STARTED.keys()
    for place in STARTED_BY.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text("utf-8"), place


PAGES = {
    str(file.relative_to(ROOT)): file.read_text("utf-8")
    for name in DOCUMENTS
    for file in sorted(ROOT.glob(name))
}


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_code_block_is_an_unknown_command(page: str) -> None:
    """A line with an option, of a program that `COMMAND` does not know, would be shown
    without being checked.
    """
    continued = False
    for line in PAGES[page].splitlines():
        if re.match(r"    \S.* --[a-z]", line) and not continued:
            assert COMMAND.fullmatch(line), line
        continued = line.endswith("\\")


def test_every_extra_that_is_named_exists() -> None:
    for text in PAGES.values():
        check_extras(text)


KEYS = meanings()
SECTIONS = {key.rpartition(".")[0] for key in KEYS} - {""}
SETTING = re.compile(r"(?:^|(?<= ))(--)?([a-z_]+(?:\.\w+)*)(: |=| |$)(\S*)")
"""A key of the configuration in a piece of inline code, and its value."""


def settings(text: str) -> Iterator[tuple[list[str], Any]]:
    """Keys that may be meant, and the value, of what inline code and YAML blocks say of
    the configuration.
    """
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        yield from leaves(yaml.safe_load(block))
    for code in re.findall(
        r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    ):
        for option, key, sign, value in SETTING.findall(" ".join(code.split())):
            # `data trainer` are words, `--only fig3` is an option of a command,
            # `forward_process.py` a file.
            known = key in KEYS and (option or "." in key or sign != " ")
            if known or (
                key.split(".")[0] in SECTIONS
                and re.search(r"\.(?!(?:py|md|png|pth)$)", key)
            ):
                yield [key], value
            elif sign == ": " and not option and value != "...":
                yield [full for full in KEYS if full.endswith(f".{key}")], value


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[list[str], Any]]:
    for name, value in tree.items():
        if (key := prefix + name) in SECTIONS:
            yield from leaves(value, f"{key}.")
        else:
            yield [key], value


def allowed(key: str, value: Any) -> bool:
    """True if the configuration has the key and can have the value; one in capitals, or
    a letter, stands for any.
    """
    if value == "" or re.fullmatch(r"[A-Z_]+|[a-z]|\.\.\.", str(value)):
        return key in KEYS or key.startswith("reward.options.")
    try:
        load_config("toy_cpu", {key: value})
    # that it does not go with the preset's other keys is not the document's fault
    except ConfigError as error:
        return not re.search("unknown key|but it must be", str(error))
    return True


def test_every_setting_that_the_documents_name_exists() -> None:
    configs = {
        str(file.relative_to(ROOT)): file.read_text("utf-8")
        for file in ROOT.glob("configs/**/*.yaml")
    }
    found = [
        (page, *setting)
        for page, text in (PAGES | configs).items()
        for setting in settings(text)
    ]
    assert len(found) > 200
    assert [
        setting
        for setting in found
        if not any(allowed(key, setting[2]) for key in setting[1])
    ] == []


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "training.guidance: conditional",
            "guidance: conditional",
            "training.update forward_proces",
            "gone: 3",
        ),
        *(
            "--rollout.eta=-1",
            "--model.adaln=table --lora.rank=0",
            "training.guide: split",
            "training.train_on",
        ),
        "data.shuffle: 1",
    ],
)
def test_a_setting_that_does_not_exist_is_found(wrong: str) -> None:
    text = (
        f"With `{wrong}`, as with `training.guidance:\nsplit`, `seed: 3`, `--only "
        "fig3` and `data trainer`."
    )
    assert [
        any(allowed(key, value) for key in keys) for keys, value in settings(text)
    ].count(False) == 1


EXAMPLES = [
    (page, code)
    for page, text in PAGES.items()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
"""Page and source of every Python block."""


@pytest.mark.parametrize(("page", "code"), EXAMPLES)
def test_a_python_block_parses_and_imports_what_exists(page: str, code: str) -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    exec(compile(ast.Module(imports, []), page, "exec"), {})


def test_the_readme_shows_the_demos_results() -> None:
    """Each row is a training of docs/results/demo.jsonl; its errors count captions and
    noises.
    """
    rows = [
        json.loads(line)
        for line in (ROOT / "docs/results/demo.jsonl").read_text("utf-8").splitlines()
    ]
    assert {(r["preset"], r["updates"], r["prompts"], r["noises"]) for r in rows} == {
        ("toy_nft", 20, 60, 16)
    }
    assert (
        "20 updates of 128 videos: 60 held-out captions, 16 noises each"
        in PAGES["README.md"]
    )
    for r in rows:
        reward, aligned, distance = r["reward"], r["aligned"], r["manifold_distance"]
        cells = (
            f"| {r['seed']} | {100 * aligned['before']:.0f} → "
            f"{100 * aligned['after']:.0f} % "
            f"| {reward['before']:.3f} → {reward['after']:.3f} | "
            f"{reward['mean']:+.3f} ± {reward['stderr']:.3f} "
            f"| {distance['before']:.4f} → {distance['after']:.4f} |"
        )
        assert cells in PAGES["README.md"]
        # A large gain that is not bought with the pictures.
        assert aligned["mean"] > 0.25 and distance["after"] < 1.1 * distance["before"]


def test_the_demo_page_shows_its_controls() -> None:
    """Rewards that say nothing gain nothing over the seeds; guidance alone is worth
    less than the training.
    """
    rows = [
        json.loads(line)
        for line in (ROOT / "docs/results/demo_controls.jsonl")
        .read_text("utf-8")
        .splitlines()
    ]
    assert {(r["prompts"], r["noises"]) for r in rows} == {(60, 16)}
    for r in rows:
        reward, aligned, distance = r["reward"], r["aligned"], r["manifold_distance"]
        cells = (
            f"| {r['control']} | {100 * aligned['before']:.0f} → "
            f"{100 * aligned['after']:.0f} % "
            f"| {reward['before']:.3f} → {reward['after']:.3f} | "
            f"{reward['mean']:+.3f} ± {reward['stderr']:.3f} "
            f"| {distance['before']:.4f} → {distance['after']:.4f} |"
        )
        assert cells in PAGES["docs/tutorials/demo.md"]
    # A run's standard error counts captions and noises. A training by noise moves at
    # random too: seeds count that.
    gains = [r["reward"]["mean"] for r in rows if "shuffled" in r["control"]]
    assert abs(fmean(gains)) < 2 * stdev(gains) / len(gains) ** 0.5
    demo = [
        json.loads(line)
        for line in (ROOT / "docs/results/demo.jsonl").read_text("utf-8").splitlines()
    ]
    least = min(row["reward"]["mean"] for row in demo)
    assert all(3 * abs(r["reward"]["mean"]) < least for r in rows)


def test_the_page_of_words_shows_its_results() -> None:
    """A judge that no training sees reads 20 points more of the words; shuffled rewards
    gain nothing over the seeds.
    """
    rows = [
        json.loads(line)
        for line in (ROOT / "docs/results/words.jsonl").read_text("utf-8").splitlines()
    ]
    assert {
        (
            r["prompts"],
            r["noises"],
            r["OCR_right"]["before"],
            r["judge_right"]["before"],
        )
        for r in rows
    } == {(48, 16, 0.316406, 0.304688)}

    def mean_and_error(tests: list[dict[str, float]]) -> tuple[float, float]:
        """Of the gains of several seeds; words and noises are those of every seed, so
        their error does not shrink.
        """
        gains = [test["mean"] for test in tests]
        seeds = stdev(gains) ** 2 / len(gains) if len(gains) > 1 else 0.0
        return fmean(gains), (
            fmean(test["stderr"] ** 2 for test in tests) + seeds
        ) ** 0.5

    for (_, rate, updates), group in groupby(
        rows, key=lambda r: (r["arm"], r["rate"], r["updates"])
    ):
        seeds = list(group)
        reward, judge = ([r[name] for r in seeds] for name in ("OCR", "judge_right"))
        read, judged = (
            100 * fmean(r[name]["after"] for r in seeds)
            for name in ("OCR_right", "judge_right")
        )
        each = (
            ", ".join(f"{100 * test['mean']:+.0f}" for test in judge) + ": "
            if len(seeds) > 1
            else ""
        )
        (gain, error), (gained, of_reward) = (
            mean_and_error(judge),
            mean_and_error(reward),
        )
        start = f"| {updates} | {rate:g} |" if updates else "| 0 | |"
        cells = (
            f"{start} {read:.0f} % | {judged:.0f} % | {each}{100 * gain:+.0f} ± "
            f"{100 * error:.0f} "
            f"| {gained:+.3f} ± {of_reward:.3f} |"
        )
        assert cells in PAGES["docs/words.md"], cells
    best = [
        r["judge_right"]
        for r in rows
        if (r["arm"], r["rate"]) == ("forward_process", 0.03)
    ]
    assert len(best) == 3 and all(
        gain["mean"] > 0.2 and gain["mean"] > 5 * gain["stderr"] for gain in best
    )
    tuned = [
        r["judge_right"]["mean"]
        for r in rows
        if (r["arm"], r["updates"]) == ("best_of_group", 42)
    ]
    path = [
        r["judge_right"]["mean"]
        for r in rows
        if (r["arm"], r["rate"]) == ("path_two_levels", 0.03)
    ]
    shown = " ".join(PAGES["README.md"].split())
    assert (
        f"reads {100 * fmean(gain['mean'] for gain in best):.0f} points more" in shown
    )
    assert len(tuned) == 3 and f"at the same cost {100 * fmean(tuned):.0f}." in shown
    assert (
        len(path) == 3
        and (
            f"and {100 * fmean(path):.0f} more after SAGE-GRPO at its sampler's own "
            "states"
        )
        in shown
    )
    control = [r["judge_right"]["mean"] for r in rows if r["arm"] == "shuffled"]
    assert (
        len(control) == 3
        and abs(fmean(control)) < 2 * stdev(control) / len(control) ** 0.5
    )


def test_the_page_of_words_has_the_signal_of_each_gradient() -> None:
    shown = " ".join(PAGES["docs/words.md"].split())
    for line in (ROOT / "docs/results/signal.jsonl").read_text("utf-8").splitlines():
        signals = json.loads(line)["signals"]
        assert (
            f"{fmean(signals):.3f} ± {stdev(signals) / len(signals) ** 0.5:.3f}"
            in shown
            and len(signals) == 16
        )


def test_the_page_of_objectives_says_what_the_path_loses() -> None:
    rows = [
        json.loads(line)
        for line in (ROOT / "docs/results/path_toy.jsonl")
        .read_text("utf-8")
        .splitlines()
    ]
    path, (noised,) = rows[:-1], rows[-1:]
    assert (
        len(path) == 4
        and noised["arm"].startswith("noised")
        and {row["prompts"] for row in rows} == {60}
    )
    shown = " ".join(PAGES["docs/objectives.md"].split())

    def between(name: str, digits: int) -> str:
        values = [row[name]["after"] for row in path]
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    assert (
        f"aligned {between('aligned', 2)}, but a reward of {between('reward', 2)}"
        in shown
    )
    assert f"a distance of {between('manifold_distance', 3)}" in shown
    own = [
        f"{noised[name]['after']:.{digits}f}"
        for name, digits in [("reward", 2), ("aligned", 2)]
    ]
    assert (
        f"have {own[0]}, {own[1]} and {noised['manifold_distance']['after']:.3f}"
        in shown
    )


def test_the_api_page_names_what_exists() -> None:
    names = re.findall(r"^::: ([\w.]+)$", PAGES["docs/reference/api.md"], re.M)
    for name in names:
        pkgutil.resolve_name(name)
    public = {name: getattr(sage_fast, name).__module__ for name in sage_fast.__all__}
    assert not [
        name
        for name, module in public.items()
        if not {module, f"{module}.{name}"} & set(names)
    ]


def test_every_test_that_a_page_names_is_there() -> None:
    for page, text in PAGES.items():
        for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(
                encoding="utf-8"
            ), (page, test)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Whether it holds."""\nx = 1', 1),
        ("x = 1  # it is no file; besides, this is to change", 3),
        (
            (
                'def f():\n    """Return x. What has no name\n    was told anew of '
                'its own."""'
            ),
            4,
        ),
        (
            (
                '"""True if there is no file, which is no longer than 3; that is not '
                'code: `told`, "anew"."""'
            ),
            0,
        ),
        (
            (
                '"""The weights as diffusers has it, in place of None is all; a '
                'forward more, which would not do."""'
            ),
            5,
        ),
        (
            (
                '"""Diffusers has it; one forward more than before, as many as in the '
                'code."""'
            ),
            0,
        ),
        ('raise ValueError(f"{path} is no run")', 1),
        ('logger.warning("which is what hears of it %s", 3)', 2),
        ('parser.add_argument("--x", help="besides" " this")', 1),
        ('call("is no run", name="besides")', 0),
    ],
)
def test_the_check_of_the_english(text: str, count: int) -> None:
    parts = english.prose_of_code(text)
    assert (
        len(
            [
                c
                for _, part, opening in parts
                for c in english.complaints(part, opening=opening)
            ]
        )
        == count
    )


def test_a_long_sentence_is_found_and_a_short_one_is_not() -> None:
    words = "word " * english.MAX_WORDS
    page = (
        f"# Title\n\n{words}. [{words}](x.md). `a b` v1.5 {words}\n\n| {words}| "
        f"{words}|\n\n    {words}{words}\n"
    )
    assert [line for line, _ in english.long_sentences(page)] == [3]
    assert not list(english.long_sentences(f"{words}\n\n{words}\n* {words}\n* {words}"))
    assert [
        line for line, _ in english.long_sentences(f"One.\nTwo {words[:60]}\n{words}")
    ] == [2]


def test_a_wide_line_of_code_is_found() -> None:
    wide = "x" * (english.MAX_COLUMNS + 1)
    page = (
        f"{wide}\n\n    "
        f"{wide}\n\n```python\n{wide}\n```\n{wide}\n```mermaid\n{wide}\n```\n    "
        f"{wide[5:]}\n"
    )
    assert [line for line, _ in english.wide_lines(page)] == [3, 6]


def test_documents_are_what_the_committed_results_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`python -m benchmarks report --write` mends this one."""
    for name, page in (
        ("presets", "docs/how_to/which_card.md"),
        ("cards", "README.md"),
    ):  # planned in tests/config/test_presets.py
        there = (
            PAGES[page].split(f"<!-- benchmark {name}: begin -->\n")[1].split("<!--")[0]
        )
        monkeypatch.setitem(report.BLOCKS, name, lambda found, there=there: there)
    found = report.read_results(report.committed_files())
    texts = {name: (ROOT / name).read_text("utf-8") for name in report.DOCUMENTS}
    for name, text in texts.items():
        assert report.document(text, found) == text, name
    assert all(
        f"<!-- benchmark {name}: begin -->" in "".join(texts.values())
        for name in report.BLOCKS
    )


def test_the_documented_tables_are_what_the_code_gives() -> None:
    document = (ROOT / "docs/algorithm.md").read_text(encoding="utf-8")
    for rows in (leftover_rows(), dispersion_rows(0.1)):
        assert "\n".join(rows) in document
