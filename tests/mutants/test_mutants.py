"""The mutants still apply: a text that has moved in its file would otherwise be noticed
by nobody.
"""

from tests.mutants.run import main


def test_every_mutant_has_its_text_once() -> None:
    assert main(["--check"]) == 0
