"""`sage-fast configs`: the presets that ship."""

import argparse
from collections.abc import Sequence

EPILOG = """\
examples:
  sage-fast configs                          every preset with one line
  sage-fast configs show toy_cpu             the whole of one; `> mine.yaml` starts one of your own

A preset is named wherever a YAML file is: `sage-fast train toy_cpu`. Those under ablations/ are laid
over another: `sage-fast train toy_cpu ablations/kl_none`. Other files that ship are shown too, such as
prompts/general_train.csv and launch/slurm.sbatch.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its action."""
    parser = commands.add_parser(
        "configs",
        help="list the presets, or show one",
        description="List the presets that ship, or print one.",
        epilog=EPILOG,
    )
    parser.set_defaults(config=[], name=None)
    actions = parser.add_subparsers(dest="action", metavar="{show}")
    show = actions.add_parser(
        "show", help="print all keys that a preset sets, those of the one that it extends included"
    )
    show.set_defaults(config=[])
    show.add_argument("name", metavar="NAME", help="a preset, or another file that ships")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the list or the file."""
    from sage_fast.config.errors import ConfigError
    from sage_fast.config.presets import find_shipped, preset_names, preset_summary

    if overrides or options.config:
        raise ConfigError(f"configs does not take {' '.join([*options.config, *overrides])}; see --help.")
    if options.name is not None:
        file = find_shipped(options.name)
        text = file.read_text("utf-8")
        if file.suffix == ".yaml" and "\nextends: " in text:
            from sage_fast.config.load import dump_tree, read_config_file

            text = text.partition("\nextends: ")[0] + "\n" + dump_tree(read_config_file(file))
        print(text, end="")
        return 0
    names = preset_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {preset_summary(name)}")
    return 0
