"""What the documents state is what the code, the tests and the committed results say."""

import re
from pathlib import Path

import pytest

from benchmarks import report
from sage_fast.sde import SDE_TYPES, sigma_schedule, transition_table
from tests.commands.programs import check_command
from tests.test_sde import marginal_rows

ROOT = Path(__file__).resolve().parents[2]


COMMAND = re.compile(r"(?:    |#   |  )((?:[A-Z_]+=\S+ )*(?:hf|torchrun|sage-fast|modelscope) .*)")
"""A line of a document's code block, of a configuration's header, or of a command's help."""


def documented_commands() -> list[str]:
    """Every command that is shown to be typed, without what explains it."""
    found = []
    for pattern in ("README.md", "docs/*.md", "configs/**/*.*", "sage_fast/commands/*.py"):
        for file in sorted(ROOT.glob(pattern)):
            lines = iter(file.read_text(encoding="utf-8").splitlines())
            for line in lines:
                if (match := COMMAND.fullmatch(line)) is None:
                    continue
                command = match[1]
                while command.endswith("\\"):
                    command = command.rstrip("\\") + next(lines).strip()
                found.append(re.split(r"\s+#|\s{3,}", command)[0])
    return list(dict.fromkeys(found))


def test_the_documents_are_full_of_commands() -> None:
    programs = [command.split()[0] for command in documented_commands()]
    assert programs.count("sage-fast") >= 35 and programs.count("hf") >= 6 and programs.count("torchrun") >= 6


@pytest.mark.parametrize("command", documented_commands())
def test_a_documented_command_is_one(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_command(command)


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/reliability.md").read_text(encoding="utf-8"))
    assert len(named) > 15
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


def test_documents_are_what_the_committed_results_say() -> None:
    """`python -m benchmarks report --write` mends this one."""
    found = report.read_results(report.committed_files())
    for name in report.DOCUMENTS:
        text = (ROOT / name).read_text("utf-8")
        assert report.document(text, found) == text, name


def test_every_block_stands_in_a_document() -> None:
    text = "".join((ROOT / name).read_text("utf-8") for name in report.DOCUMENTS)
    assert all(f"<!-- benchmark {name}: begin -->" in text for name in report.BLOCKS)


@pytest.mark.parametrize("spread", [0.5, 0.1])
def test_the_documented_table_is_what_the_code_gives(spread: float) -> None:
    document = (ROOT / "docs/algorithm.md").read_text(encoding="utf-8")
    assert "\n".join(marginal_rows(spread)) in document


def test_noise_left_in_the_sample_is_ranked_as_the_readme_says() -> None:
    """At the defaults: 20 steps, shift 5, eta 0.5."""
    left = {sde: float(transition_table(sde, sigma_schedule(20, 5.0), 0.5).std[-1]) for sde in SDE_TYPES}
    assert left["cps"] == 0 < left["sage_grpo"] < left["flow_grpo"] < left["dance_grpo"]
    ranked = "grows from `cps` (none) over `sage_grpo` and `flow_grpo` to `dance_grpo`"
    assert ranked in (ROOT / "README.md").read_text(encoding="utf-8")
