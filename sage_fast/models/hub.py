"""Folders of weights: here, in the hub's local cache, or missing, and then the command
that fetches them.

A path may be a folder or the id of a repository on the Hugging Face hub, which counts
as present when it is in the local cache. Nothing is downloaded here.
"""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_fast.models.stored import read_json


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """Some files that must be there. `missing`: patterns that nothing matches; `fetch`:
    the command that gets them; `repository`: of the hub, where they come from one;
    `gigabytes`: 1e9 bytes that the command fetches, at most; `licence`: what it
    forbids, where that stops some users.

    Example: `Requirement(name="VideoAlign", where="models/VideoReward",
    missing=["model_config.json"], fetch="hf ...")`
    """

    name: str
    where: str
    missing: list[str]
    fetch: str
    repository: str | None = None
    gigabytes: float = 0.0
    licence: str = ""


def download_folder(requirement: Requirement) -> Path:
    """Where the command of a requirement puts the files: the hub's cache, or the folder
    that is named.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    where = requirement.where
    return Path(HF_HUB_CACHE) if is_repository(where) else Path(where).expanduser()


def fetch_command(
    repository: str, *include: str, folder: str | Path | None = None
) -> str:
    """The command that downloads a repository, or what matches the patterns `include`,
    to a folder or the hub's cache.

    Every pattern has a separate `--include`: the hub's command takes a second one
    behind it for a file's name.

    Example: `fetch_command("a/b", "*.json")` is `"hf download a/b --include '*.json'"`.
    """
    chosen = [word for pattern in include for word in ("--include", pattern)]
    # A shell leaves `~` alone between quotes.
    target = [] if folder is None else ["--local-dir", str(Path(folder).expanduser())]
    return shlex.join(["hf", "download", repository, *chosen, *target])


def require(
    name: str,
    path: str,
    patterns: Sequence[str],
    repository: str,
    *include: str,
    gigabytes: float = 0.0,
) -> Requirement:
    """A requirement that one repository of the hub fulfils.

    Args:
        path: a folder, or the id of the repository or of another one like it.
        patterns: glob patterns of its files; `a|b` is matched by either.
        repository: where the files come from when `path` is a folder.
        include: glob patterns of what is downloaded; none are everything.
        gigabytes: 1e9 bytes of that, at most.
    """
    folder = None if is_repository(path) else path
    if folder is None:
        repository = path
    return Requirement(
        name=name,
        where=path,
        missing=missing_files(local_folder(path), patterns),
        fetch=fetch_command(repository, *include, folder=folder),
        repository=repository,
        gigabytes=gigabytes,
    )


def missing_files(folder: Path | None, patterns: Sequence[str]) -> list[str]:
    """Patterns that no file of the folder matches; `a|b` is matched by either."""
    return [
        p
        for p in patterns
        if folder is None or not any(any(folder.glob(part)) for part in p.split("|"))
    ]


def local_folder(path: str) -> Path | None:
    """The folder that a path means: itself, or a repository's snapshot in the hub's
    local cache; None for neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not is_repository(path):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def stored_value(path: str, file: str, key: str) -> Any:
    """A value of a JSON file in the folder that a path means; None where it is not here
    or damaged.
    """
    with suppress(OSError, ValueError):  # the loader's checks name what is wrong
        return read_json((local_folder(path) or Path("/nowhere")) / file).get(key)
    return None


def is_repository(path: str) -> bool:
    """Tell whether a path means `owner/name` on the hub. Where its parent is a folder,
    as in models/VideoReward, a folder is meant, here or not.
    """
    return (
        re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None
        and not Path(path).parent.is_dir()
    )


def checkpoint_folder(path: str, key: str, *include: str) -> Path:
    """The folder of a checkpoint: a local one, or the cached snapshot of a hub id.

    Nothing is downloaded: a cluster without network answers at once, and a run starts
    no download by itself.

    Args:
        path: folder or hub id.
        key: the config key it comes from.
        include: glob patterns of what has to be downloaded; none are everything.

    Raises:
        OSError: there is none; the message says how to fetch it.
    """
    folder = local_folder(path)
    if folder is None:
        if not is_repository(path):
            raise OSError(
                f"{path!r} does not exist. Set {key} to a folder or a hub id."
            )
        raise OSError(
            f"{path!r} is neither a folder nor in the hub's local cache. Fetch it with "
            f"`{fetch_command(path, *include)}`, or set {key} to a folder that holds "
            "it."
        )
    return folder


def stored_bytes(path: str) -> int:
    """Bytes of the weight files in a folder or in the hub's local cache; 0 where there
    are none.
    """
    folder = local_folder(path)
    files = folder.rglob("*") if folder is not None else ()
    return sum(
        file.stat().st_size for file in files if file.suffix in (".safetensors", ".pth")
    )
