"""The command line: `sage-fast COMMAND`, see `COMMANDS`.

The commands are in `sage_fast/commands/`; here are the entry point and the printing of
errors. Exit status: 0 done or stopped on request, 1 the run failed, 2 the command or
the configuration is wrong, 130 interrupted twice. `doctor` ends with 1 where the
configuration could not run, `plan` where it does not fit, `status` where a run hangs or
has died.
"""

import argparse
import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sage_fast import __version__
from sage_fast.commands import (
    compare,
    configs,
    doctor,
    evaluate,
    export,
    generate,
    plan,
    profile,
    status,
    train,
)
from sage_fast.commands.common import join_values, split_words
from sage_fast.config.errors import (
    ConfigError,
    RewardError,
    RewardServerError,
    SageError,
)
from sage_fast.distributed.start import (
    configure_logging,
    end_process,
    rank,
    report_error,
    world_size,
)

GROUPS = {
    "before training": (configs, doctor, plan, profile),
    "training": (train, status),
    "after training": (generate, evaluate, compare, export),
}
COMMANDS = {
    module.__name__.rpartition(".")[2]: module
    for modules in GROUPS.values()
    for module in modules
}
MOST_GPUS = 10_000
"""Of --gpus: a plan holds every video of an update, and with more it takes minutes and
fills the memory.
"""

WITHOUT_KEYS = ("status", "compare", "configs")

COMPLETION = """

`sage-fast COMMAND --help` explains a command.
shell completion: pip install argcomplete, and in ~/.bashrc: eval "$(register-python-argcomplete sage-fast)"
"""

USAGE = "CONFIG [MORE.yaml ...] [options] [--section.key=value ...]"


class _Parser(argparse.ArgumentParser):
    """A parser that names the rank of an error, and that takes no abbreviations.

    An abbreviation would change its meaning with the next option that is added.
    """

    def __init__(self, **kwargs: Any) -> None:
        # The examples of a command keep their lines.
        layout = {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**(layout | kwargs | {"allow_abbrev": False}))

    def error(self, message: str) -> NoReturn:
        # every rank was started with the same words
        usage = self.format_usage() if rank() == 0 else ""
        if unknown := re.match("argument COMMAND: invalid choice: '(.*?)'", message):
            close = difflib.get_close_matches(unknown[1], COMMANDS, n=1)
            message += f". Did you mean {close[0]}?" if close else ""
        report_error(f"{usage}{self.prog}: error: {message}")
        self.exit(2)


class _Version(argparse.Action):
    """Prints the release, the commit of a checkout, and the release of torch, which is
    not imported.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        from sage_fast.run.provenance import SOURCE_ROOT, git_commit

        commit = git_commit(SOURCE_ROOT)
        print(
            f"sage-fast {__version__} ({f'commit {commit}, ' if commit else ''}torch "
            f"{version('torch')})"
        )
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    sections = []
    for group, modules in GROUPS.items():
        lines = [f"{group}:"]
        for name, module in COMMANDS.items():
            if module in modules:
                summary, _, _ = (module.__doc__ or "").partition("\n\n")
                lines.append(f"  {name:<10} {' '.join(summary.split()).rstrip('.')}")
        sections.append("\n".join(lines))
    parser = _Parser(
        prog="sage-fast",
        usage="sage-fast COMMAND [options]",
        description="GRPO post-training of text-to-video flow models.",
        epilog="\n\n".join(sections) + COMPLETION,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the versions and exit"
    )
    # Without `prog` a command's errors would begin with the whole usage.
    hidden = {"metavar": "COMMAND", "help": argparse.SUPPRESS}
    add_commands(
        parser.add_subparsers(prog="sage-fast", dest="command", required=True, **hidden)
    )
    return parser


def add_commands(parsers: "argparse._SubParsersAction[Any]") -> None:
    """Declare every command; its module's docstring is its help."""
    for name, module in COMMANDS.items():
        summary, _, more = (module.__doc__ or "").partition("\n\n")
        usage = f"sage-fast {name} {getattr(module, 'USAGE', USAGE)}"
        parser = parsers.add_parser(name, usage=usage, description=summary, epilog=more)
        module.add_arguments(parser)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options of a command, with all its files in `config`, and the
    `--section.key=value` overrides.

    Options are written with hyphens or underscores, and so are keys without a section,
    such as --output_dir.
    """
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    options, rest = parser.parse_known_args(join_values(words or ["--help"]))
    # as they were typed, for the processes that `train --gpus` starts
    options.words = words
    options.config, overrides = split_words([*options.config, *rest])
    return options, overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    if world_size() == 1:
        status = _tell(_run, arguments)
        # Looked up and not imported: a command without rewards has none of their
        # threads.
        guard = sys.modules.get("sage_fast.rewards.guard")
        if guard is not None and guard.running_threads():
            guard.end_processes()
            end_process(status)  # a normal exit would wait for these threads of rewards
        return status
    from torch.distributed.elastic.multiprocessing.errors import record

    status = 1
    try:
        # torchrun shows the error of the rank that has failed first
        status = _tell(record(_run), arguments)
    except Exception:  # noqa: BLE001  whatever it is: the other ranks wait for this one
        traceback.print_exc()
    # A normal exit could wait for collectives that no other rank will join.
    end_process(status)


def _tell(
    run: Callable[[Sequence[str] | None], int | None], arguments: Sequence[str] | None
) -> int:
    """Run a command; returns the exit status. An error that its message explains loses
    its traceback.
    """
    # no command needs its library to be known
    from sage_fast.rewards.server import lasting_streams

    # Ctrl-C also ends the `tee` that a command writes to, and a log's disk may be full.
    with lasting_streams():
        try:
            return run(arguments) or 0
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except ConfigError as error:
            report_error(f"error: {error}")
            return 2
        except (RuntimeError, OSError, MemoryError) as error:
            if not (isinstance(error, SageError | OSError) or _is_out_of_memory(error)):
                # with its traceback: the message alone does not tell the user what
                # happened
                raise
            command = (sys.argv[1:] if arguments is None else [*arguments])[0]
            report_error(f"error: {_describe(error, command)}")
            return 1


def _run(arguments: Sequence[str] | None) -> int:
    options, overrides = parse(arguments)
    configure_logging()
    # Releases of huggingface_hub that ask through it would have every request logged.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    command = options.command
    if command != "train" and world_size() > 1:
        raise ConfigError(
            f"{command} is for one process, but {world_size()} were started "
            "(WORLD_SIZE), and each would do the "
            f"same. Start it without torchrun: sage-fast {command} ..."
        )
    if (
        gpus := getattr(options, "gpus", None)
    ) is not None and not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(
            f"--gpus is {gpus}; it must be at least 1 and at most {MOST_GPUS}."
        )
    if overrides and command in WITHOUT_KEYS:
        raise ConfigError(
            f"{command} takes no keys of a configuration, such as {overrides[0]}."
        )
    return COMMANDS[command].run(options, overrides)


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "DefaultCPUAllocator: can't allocate memory" in str(error)


HOW_TO_GO_ON = {
    "train": "--resume auto continues from the last checkpoint.",
    "generate": "The same command continues with the missing videos.",
    "evaluate": "The same command continues with the unfinished model.",
}


def _describe(error: Exception, command: str) -> str:
    go_on = HOW_TO_GO_ON.get(command, "")
    if _is_out_of_memory(error):
        advice = (
            "Lower evaluation.batch_size, or the size of the video (video.num_frames, "
            "height, width)."
        )
        if command == "train":
            advice = (
                "Set training.guidance to split or model.checkpointing to selective "
                "or full, or lower "
                "rollout.micro_batch_size or evaluation.batch_size."
            )
        return f"out of memory: {str(error).splitlines()[0]}\n{advice} {go_on}".rstrip()
    if isinstance(error, OSError | RewardError | RewardServerError) and go_on:
        return (
            f"{error}\nWhat was written before is intact; once the cause is fixed: "
            f"{go_on}"
        )
    return str(error)
