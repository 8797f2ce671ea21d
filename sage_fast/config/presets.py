"""The presets that ship: where they lie, what they are called, and what a relative path
in a configuration means.

They are written in `configs/` of the repository, and a wheel has that folder as
`sage_fast/configs`. A preset is named by its path there, without extension: `toy_cpu`,
`ablations/kl_none`.
"""

import difflib
import functools
import importlib.resources
import os
from pathlib import Path
from typing import TypeVar

from sage_fast.config.errors import ConfigError

T = TypeVar("T")


@functools.cache
def presets_folder() -> Path:
    """`configs/` of the installed package, or of the repository where it is installed
    to be edited.
    """
    package = Path(str(importlib.resources.files("sage_fast")))
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def preset_names() -> list[str]:
    """All presets: whole runs first, then what is laid over one."""
    root = presets_folder()
    names = (
        path.relative_to(root).with_suffix("").as_posix()
        for path in root.rglob("*.yaml")
    )
    return sorted(names, key=lambda name: ("/" in name, name))


def preset_summary(name: str) -> str:
    """The first comment line of a preset."""
    return find_shipped(name).read_text("utf-8").partition("\n")[0].removeprefix("# ")


def find_shipped(name: str) -> Path:
    """The file of a preset, or another file that ships, such as
    `prompts/toy_train.csv`.

    ConfigError where there is none of that name.
    """
    root = presets_folder()
    for file in (root / f"{name}.yaml", root / name):
        # A name with .. in it could lead out of the folder, to a file that does not
        # ship.
        if os.path.isfile(file) and file.resolve().is_relative_to(root.resolve()):
            return file
    raise ConfigError(f"There is no preset {name!r}.{similar_preset(name)}")


def config_file(name: str | Path) -> Path:
    """The file that a word means: a file of that path, else a preset of that name, else
    the path as it is.
    """
    path = Path(name)
    # os.path's tests are False for a word that no file can be called, where Path's
    # raise: too long, or with a NUL.
    return (
        presets_folder() / f"{name}.yaml"
        if not os.path.isfile(path) and str(name) in preset_names()
        else path
    )


def similar_preset(name: str) -> str:
    """End of a message about a name that nothing has: the presets that may be meant,
    and where all are listed.
    """
    word = name.removeprefix("configs/").removesuffix(".yaml")
    names = preset_names()
    close = [known for known in names if word in (known, known.rpartition("/")[2])]
    close = close or difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"{hint} `sage-fast configs` lists the presets; your own file goes by its path."
    )


def locate(path: str, folder: Path | None = None) -> str:
    """The absolute path of a file that a configuration names; the path as it is where
    there is no such file.

    Args:
        path: looked for in the YAML's folder, then in the working directory, then among
            the files that ship, so that a copy of a preset works wherever it lies. A
            preset's own files are those that ship.
        folder: of the YAML that names it; None for the command line.
    """
    shipped = presets_folder()
    path = os.path.expanduser(path)
    if folder is not None and folder.absolute().is_relative_to(shipped):
        bases = [folder, shipped]
    # runs of earlier versions have saved configs/prompts/..., relative to the
    # repository
    else:
        bases = [folder or Path(), Path(), shipped, shipped.parent]
    found = (base / path for base in bases)
    return next(
        (os.path.abspath(file) for file in found if path and os.path.exists(file)), path
    )


def portable(path: T) -> T | str:
    """The inverse of `locate` for a file that ships: its name there, which means the
    same on every machine.
    """
    shipped = presets_folder()
    if not isinstance(path, str):
        return path
    return (
        Path(path).relative_to(shipped).as_posix()
        if Path(path).is_relative_to(shipped)
        else path
    )
