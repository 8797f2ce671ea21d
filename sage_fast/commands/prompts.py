"""`sage-fast prompts`: prompt files that fit the model."""

import argparse
from collections.abc import Sequence
from pathlib import Path

EPILOG = """\
examples:
  sage-fast prompts check my.csv                                     length, repeats, languages, quoted text
  sage-fast prompts compose --count 512 --seed 0 --output train.csv  captions of 60 to 150 words
  sage-fast prompts rewrite short.txt --model Qwen/Qwen2.5-7B-Instruct --output long.csv

HunyuanVideo-1.5 is used with rewritten prompts of 80 to 200 words. `rewrite` expands short ones with any chat model of
transformers that is on this machine; nothing is downloaded.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its three actions."""
    parser = commands.add_parser(
        "prompts",
        help="check, compose or rewrite prompt files",
        description="Check a prompt file, compose captions, or rewrite short prompts into captions.",
        epilog=EPILOG,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{check,compose,rewrite}")

    check = actions.add_parser("check", help="say what is in a prompt file")
    check.add_argument("config", nargs=1, metavar="FILE", help="prompt file")

    compose = actions.add_parser("compose", help="write captions drawn from the shipped scenes")
    compose.set_defaults(config=[])
    compose.add_argument("--count", type=int, required=True, help="number of captions")
    compose.add_argument("--seed", type=int, default=0, help="of the draw; default 0")
    compose.add_argument("--without", type=Path, help="prompt file whose captions are not drawn again")
    compose.add_argument("--first-index", type=int, default=0, help="index of the first caption; default 0")
    compose.add_argument("--output", type=Path, required=True, help="CSV file to write")

    rewrite = actions.add_parser("rewrite", help="expand short prompts with a local chat model")
    rewrite.add_argument("config", nargs=1, metavar="FILE", help="prompt file")
    rewrite.add_argument("--model", required=True, help="folder or cached hub id of a chat model of transformers")
    rewrite.add_argument("--device", default="auto", help="auto (a GPU where there is one), cpu, cuda or cuda:N")
    rewrite.add_argument("--output", type=Path, required=True, help="CSV file to write")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Do what the action says."""
    from sage_fast.config.errors import ConfigError
    from sage_fast.records import Prompt
    from sage_fast.run.prompt_files import read_prompts, write_prompts

    if overrides:
        raise ConfigError(f"prompts {options.action} does not take {' '.join(overrides)}; see --help.")
    try:
        if options.action == "check":
            from sage_fast.tools.composer import describe_prompts

            print(describe_prompts(read_prompts(options.config[0])))
            return 0
        if options.action == "compose":
            from sage_fast.tools.composer import compose

            known = [prompt.text for prompt in read_prompts(options.without)] if options.without else []
            captions = compose(options.count, options.seed, without=known)
            prompts = [Prompt(text=text, index=options.first_index + i) for i, text in enumerate(captions)]
        else:
            from sage_fast.tools.rewriting import Rewriter

            prompts = Rewriter(options.model, options.device).rewrite(read_prompts(options.config[0]))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    write_prompts(prompts, options.output)
    print(f"Wrote {len(prompts)} prompts to {options.output}.")
    return 0
