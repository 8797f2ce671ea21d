"""Levers: every one is an option of a run, and the committed predictions are those of the planner."""

import json

import pytest
import yaml

from benchmarks import levers
from sage_fast.config.schema import to_dict

COMMITTED = json.loads(levers.FILE.read_text("utf-8"))


LEVERS = (*levers.EXACT, *levers.UNBIASED, *levers.OTHER)


@pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.name.replace(" ", "-"))
def test_a_lever_is_an_option_of_a_run(lever: levers.Lever) -> None:
    without, with_it = (to_dict(levers.recipe(lever.overrides(on=on))) for on in (False, True))
    key, _, value = lever.option.partition("=")
    for name in key.split("."):
        without, with_it = without[name], with_it[name]
    assert with_it == yaml.safe_load(value) != without


def test_the_committed_file_has_every_lever() -> None:
    rows = {row["name"]: row for row in COMMITTED["levers"]}
    assert set(rows) == {lever.name for lever in LEVERS} | {"anchor pass skipped after a refresh"}
    for lever in LEVERS:
        row = rows[lever.name]
        assert (row["option"], row["kind"], row["note"]) == (lever.option.replace("=", ": "), lever.kind, lever.note)
        assert row["factor"] == row["without"]["seconds"] / row["with"]["seconds"]


@pytest.mark.slow
def test_the_committed_predictions_are_those_of_the_planner() -> None:
    """`python -m benchmarks levers` and `python -m benchmarks report --write` mend this one."""
    (lever,) = [lever for lever in LEVERS if lever.name == "condition-only gradient"]
    (row,) = [row for row in COMMITTED["levers"] if row["name"] == lever.name]
    found = levers.record(lever)
    assert found["factor"] == pytest.approx(row["factor"], rel=1e-3)
    assert found["without"]["peak_gb"] == pytest.approx(row["without"]["peak_gb"], rel=1e-3)
    # A backward pass less in the update, which is 4 of 7 passes' worth of linear work and more of attention's.
    assert 1.2 < found["factor"] < 1.5
