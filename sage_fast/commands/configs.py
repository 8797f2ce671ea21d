"""List the presets, or print one.

examples:
  sage-fast configs                          every preset with one line, and how far it was tried
  sage-fast configs show toy_cpu             the whole of one; `> mine.yaml` starts one of your own

A preset is named wherever a YAML file is: `sage-fast train toy_cpu`. Those under
ablations/ are laid over another: `sage-fast train toy_cpu ablations/kl_none`. Other
files that ship are shown too, such as prompts/general_train.csv and
launch/slurm.sbatch.
"""

import argparse
from collections.abc import Sequence

from sage_fast.config.errors import ConfigError

USAGE = "[show NAME]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words."""
    parser.add_argument(
        "config",
        nargs="*",
        metavar="show NAME",
        help="print all of a preset, or another file",
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the list or the file."""
    from sage_fast.config.load import (
        EVIDENCE,
        find_shipped,
        preset_evidence,
        preset_names,
        preset_summary,
    )

    match options.config:
        case []:
            names = preset_names()
            width = max(map(len, names))
            text = "".join(
                f"{name:{width}}  {preset_evidence(name):4}  {preset_summary(name)}\n"
                for name in names
            )
            tried = "".join(f"  {key:7}  {said}\n" for key, said in EVIDENCE.items())
            text += f"\nThe word after a name says how far it was tried:\n{tried}"
        case ["show", name]:
            file = find_shipped(name)
            text = file.read_text("utf-8")
            if file.suffix == ".yaml" and "\nextends: " in text:
                from sage_fast.config.load import dump_tree, read_config_file

                # Its own comment stays on top, and what it extends is written out
                # below.
                text = text.partition("extends: ")[0] + dump_tree(
                    read_config_file(file)
                )
        case words:
            raise ConfigError(
                f"configs does not take {' '.join(words)}. Write: sage-fast configs "
                "show NAME"
            )
    print(text, end="")
    return 0
