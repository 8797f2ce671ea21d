"""Documents against code: commands parse, settings exist, Python blocks import."""

import ast
import pkgutil
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import sage_fast
from sage_fast.commands.cli import COMMANDS, main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import dump_config, load_config, meanings
from sage_fast.config.schema import RunConfig, by_dotted_key
from tests.commands.programs import (
    check_command,
    check_extras,
    own_programs,
    run_module,
)

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
    "KEY": "table1",
    "SECONDS": "900",
    "SEED": "0",
}
"""Words of a document that the reader replaces."""
SOURCES = (
    *DOCUMENTS,
    "SECURITY.md",
    "configs/**/*.*",
    ".github/**/*.*",
    "examples/*.py",
    "docs/tools/*.py",
    "sage_fast/**/*.py",
    "kernels/sage_kernels/**/*.py",
    "benchmarks/**/*.py",
    "experiments/**/*.py",
)


def read(*patterns: str) -> dict[str, str]:
    """Texts of the repository's files that match, by path."""
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}


TEXTS = read(*SOURCES)
PAGES = read(*DOCUMENTS)


def typed(lines: Iterable[str]) -> list[str]:
    """Commands without what explains them and where their output goes, each once."""
    found = []
    for line in lines:
        command = re.split(r"\s+#|\s{3,}|\s>+\s", line)[0]
        for name, example in STANDS_FOR.items():
            command = re.sub(rf"(?<!\S){re.escape(name)}(?!\S)", example, command)
        found.append(command)
    return list(dict.fromkeys(found))


def documented_commands() -> list[str]:
    """Every command that is shown to be typed."""
    found = []
    for text in TEXTS.values():
        lines = iter(text.splitlines())
        for line in lines:
            match = COMMAND.fullmatch(line)
            # an assignment, or the end of a sentence
            if match is None or re.match(r"\w+ = |.*\w\.$", match[1]):
                continue
            command = match[1]
            while command.endswith("\\"):
                command = command.rstrip("\\") + next(lines).strip()
            found.append(command)
    return typed(found)


def named_commands() -> list[str]:
    """Every command that a sentence names, maybe without all that it needs."""
    found = []
    for text in TEXTS.values():
        # a message over several lines of source
        whole = re.sub(r"""["']\n\s*f?["']""", "", text)
        found += [" ".join(command.split()) for command in INLINE.findall(whole)]
    return typed(found)


def test_the_documents_are_full_of_commands() -> None:
    assert len(documented_commands()) > 70


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
    programs = r"sage-fast|python -m (?:pytest|benchmarks|docs)"
    recipe = rf"^\t(?:\w+=\S+ )*\$\(BIN\)/((?:{programs}).*)$"
    recipes = re.findall(recipe, makefile, re.M)
    assert len(recipes) == 7
    for command in recipes:
        command = command.replace("$$((4 * $$(nproc)))", "8")
        check_command(re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], command))


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
                said = capsys.readouterr().err
                assert not end.code or "arguments are required" in said


@pytest.mark.parametrize("module", own_programs())
def test_every_program_explains_itself(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_module(module, ["--help"])
    assert not end.value.code
    assert "usage: " in "".join(capsys.readouterr())


COMMANDS_IN_ORDER = (
    "sage-fast configs",
    "sage-fast doctor wan_quick_lora_24gb",
    "sage-fast plan wan_quick_lora_24gb",
    "sage-fast train toy_cpu --dry-run",
    "sage-fast train wan_quick_lora_24gb --output_dir runs/mine",
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
    "python -m docs.tools.rows": "invariants/test_results.py::test_the_readmes_picture_is_two_rows_of_the_whole_one",
    "python -m sage_fast": "distributed/test_failures.py::test_torchrun_restarts_and_the_run_goes_on_by_itself",
    "python -m sage_fast.rewards.server": "rewards/test_server.py::test_the_command_serves_a_preset",
    "python -m experiments": "experiments/test_runner.py::test_the_command_measures_what_is_missing",
    "python -m experiments.inexact": "experiments/test_inexact.py::test_the_experiment_in_miniature",
    "python -m experiments.solvers": "experiments/test_solvers.py::test_the_experiment_in_miniature",
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
NOT_STARTED = {"python -m experiments.readers"}
"""It needs EasyOCR, which is not installed for the tests; its arguments are parsed."""


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_the_commands_run_one_after_another(
    tiny_run: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model, and otherwise word for word."""
    file = tmp_path / "tiny.yaml"
    words = ("--training.num_updates=1", "--data.prompts=prompts/toy_train.csv")
    file.write_text(dump_config(tiny_run(*words)))
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS_IN_ORDER:
        tiny = re.sub(r"\b(?:wan_quick_lora_24gb|toy_cpu)\b", str(file), command)
        tiny = tiny.replace("runs/demo", "runs/mine")
        assert main(shlex.split(tiny)[1:]) == 0, command


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
    commands = set()
    for line in (*documented_commands(), *named_commands()):
        commands.add(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line))
    assert {*COMMANDS_IN_ORDER} <= commands
    assert {command.split()[1] for command in COMMANDS_IN_ORDER} == COMMANDS.keys()
    own = set()
    for command in commands:
        program = re.match(r"python -m (\w+)\S*", command)
        if program and program[1] in PACKAGES:
            own.add(program[0])
    started = {" ".join(command.split()[:3]) for command in PROGRAMS_IN_ORDER}
    assert own - started - STARTED_BY.keys() == NOT_STARTED
    for place in STARTED_BY.values():
        assert_there(*place.split("::"))


def assert_there(file: str, test: str) -> None:
    """A file of the tests has a test."""
    assert f"def {test}(" in (ROOT / "tests" / file).read_text("utf-8"), (file, test)


@pytest.mark.parametrize("page", PAGES | read("*.md"))
def test_a_link_leads_to_a_file(page: str) -> None:
    """mkdocs looks at the pages of docs alone."""
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


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
        for key, value in by_dotted_key(yaml.safe_load(block), KEYS).items():
            yield [key], value
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for code in re.findall(r"`([^`]+)`", prose):
        for option, key, sign, value in SETTING.findall(" ".join(code.split())):
            # `data trainer` are words, `--only fig3` is an option of a command,
            # `forward_process.py` a file.
            known = key in KEYS and (option or "." in key or sign != " ")
            file = re.search(r"\.(py|md|png|pth)$", key)
            of_section = key.split(".")[0] in SECTIONS and "." in key and not file
            if known or of_section:
                yield [key], value
            elif sign == ": " and not option and value != "...":
                yield [full for full in KEYS if full.endswith(f".{key}")], value


def wrong_settings(text: str) -> list[tuple[list[str], Any]]:
    """Settings in a text that no configuration can have."""
    return [
        (keys, value)
        for keys, value in settings(text)
        if not any(allowed(key, value) for key in keys)
    ]


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
    texts = PAGES | read("configs/**/*.yaml")
    assert len(list(settings("".join(texts.values())))) > 200
    for place, text in texts.items():
        assert wrong_settings(text) == [], place


@pytest.mark.parametrize(
    "wrong",
    [
        "training.guidance: conditional",
        "guidance: conditional",
        "training.update forward_proces",
        "gone: 3",
        "--rollout.eta=-1",
        "--model.adaln=table --lora.rank=0",
        "training.guide: split",
        "training.train_on",
        "data.shuffle: 1",
    ],
)
def test_a_setting_that_does_not_exist_is_found(wrong: str) -> None:
    text = (
        f"With `{wrong}`, as with `training.guidance:\nsplit`, `seed: 3`, `--only "
        "fig3` and `data trainer`."
    )
    assert len(wrong_settings(text)) == 1


EXAMPLES = [
    (page, code)
    for page, text in PAGES.items()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
"""Page and source of every Python block."""


@pytest.mark.parametrize(("page", "code"), EXAMPLES)
def test_a_python_block_parses_and_imports_what_exists(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), page, "exec"), {})


def test_the_api_page_names_what_exists() -> None:
    names = re.findall(r"^::: ([\w.]+)$", PAGES["docs/reference/api.md"], re.M)
    for name in names:
        pkgutil.resolve_name(name)
    for name in sage_fast.__all__:
        module = getattr(sage_fast, name).__module__
        assert {module, f"{module}.{name}"} & {*names}, name


def test_every_test_that_a_page_names_is_there() -> None:
    for text in PAGES.values():
        for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
            assert_there(file, test)
