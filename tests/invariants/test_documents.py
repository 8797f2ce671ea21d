"""What the documents state is what the code, the tests and the committed results say."""

import re
from pathlib import Path

import pytest

from benchmarks import report
from sage_fast.sde import SDE_TYPES
from tests.commands.programs import check_command
from tests.test_sde import dispersion, dispersion_rows, leftover, leftover_rows

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


NOISY = tuple(sde for sde in SDE_TYPES if sde != "ode")


def test_the_documented_tables_are_what_the_code_gives() -> None:
    document = (ROOT / "docs/algorithm.md").read_text(encoding="utf-8")
    for rows in (leftover_rows(), dispersion_rows(0.5), dispersion_rows(0.1)):
        assert "\n".join(rows) in document


def test_noise_left_in_the_sample_is_ranked_as_the_documents_say() -> None:
    """At the defaults: 20 steps, shift 5, eta 0.5."""
    left = {sde: leftover(sde, 20) for sde in SDE_TYPES}
    assert left["sage_exact"] == left["cps"] == 0 < left["sage_grpo"] < left["flow_grpo"] < left["dance_grpo"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "grows from `sage_exact` and `cps` (none) over `sage_grpo` and `flow_grpo` to `dance_grpo`" in readme
    for sde, noise in left.items():
        assert re.search(rf"^\| `{sde}` \|.*\| {noise:.3f} \|", readme, re.M), sde
    document = (ROOT / "docs/algorithm.md").read_text(encoding="utf-8")
    assert "most: `sage_exact` and `cps` (none), `sage_grpo`, `flow_grpo`, `dance_grpo`" in document


def test_dispersion_is_ranked_as_the_documents_say() -> None:
    """Narrow data at 20 steps: what is said below the tables of docs/algorithm.md."""
    for num_steps in (10, 20):
        error = {sde: abs(dispersion(sde, num_steps, 0.1)) for sde in SDE_TYPES}
        assert min(error, key=lambda sde: error[sde]) == "dance_grpo"
    assert error["dance_grpo"] < error["ode"] < error["sage_exact"] < error["cps"] < error["ode"] + 0.003
    assert error["cps"] < error["sage_grpo"] < error["flow_grpo"]
    converging = {sde for sde in NOISY if abs(dispersion(sde, 6400, 0.5)) < 0.005 and sde != "flow_grpo"}
    assert converging == {"sage_grpo", "sage_exact", "dance_grpo"}  # flow_grpo: tests/test_sde.py
    assert {sde for sde in converging if leftover(sde, 20) == 0} == {"sage_exact"}
