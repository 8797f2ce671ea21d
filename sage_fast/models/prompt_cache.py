"""Prompts to conditioning, each prompt once, whatever the encoders are.

The results are kept on disk, a file per prompt under a hash of everything it depends
on, and read when a rollout needs them. The encoders are in memory only while something
is missing there.
"""

import gc
import hashlib
import json
import logging
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from sage_fast.config.files import content_digest, fingerprint, loads, replacing
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.models.stored import load_pretrained
from sage_fast.records import SHORT_CAPTION, Pictured, PromptEmbeds, text_of, word_count

logger = logging.getLogger(__name__)

CACHE_VERSION = 2
"""Part of every key; raised when the meaning of an entry changes."""

ROUND_SECONDS = 5.0
"""How long a rank encodes before it tells the others how far it is, so that nobody
waits for anybody's whole share.
"""


@dataclass(kw_only=True)
class CachedPromptEncoder(ABC):
    """A `PromptEncoder` that encodes prompts, or finds them in its cache."""

    root: Path
    """Folder of the model, in diffusers' layout."""
    parts: Sequence[str] = ("text_encoder", "tokenizer")
    """Folders in it of the encoders and tokenizers."""
    cache: Path
    """Folder of the encoded prompts; created when missing."""
    device: torch.device | str = "cpu"
    """Where the encoders run."""
    template: ClassVar[Any] = None
    """All that the conditioning depends on beside the files of the encoders, as JSON
    holds it.
    """
    limits: ClassVar[int | tuple[int, ...]]
    """Tokens beyond which a prompt is cut off; of several encoders a tuple."""
    readers: ClassVar[str | tuple[str, ...]] = "text encoder"
    """Names of the encoders that see no more than that."""
    usual: ClassVar[tuple[str, str] | None] = None
    """Name of the model, and the words of the captions that it is used with."""
    _identity: str | None = field(default=None, init=False)

    @abstractmethod
    def encode_each(
        self, texts: Sequence[Any]
    ) -> Generator[tuple[PromptEmbeds, int | tuple[int, ...]], None, None]:
        """Load the encoders, yield the conditioning of the texts one by one, free the
        encoders.

        With each goes its number of tokens before any were cut off, as a tuple where
        there are several `limits`, and then those of a picture. A text goes through its
        encoder alone and without padding, which its tokens do not see: what is cached
        depends on nothing but the text and its picture.
        """

    def prepare(
        self,
        texts: Sequence[str | Pictured],
        world: World = SINGLE_PROCESS,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[tuple[int, ...]]:
        """As in `PromptEncoder`: encode into the cache what it lacks. Ranks whose cache
        is the same folder share that.

        A rank that is killed loses what it was encoding at that moment; the next start
        goes on with the rest.

        Raises:
            ValueError: the tokenizer does not belong to the model.
            OSError: the cache cannot be written.
        """
        unique = list(dict.fromkeys(texts))
        ranks = self._ranks_that_share(world, unique)
        place = ranks.index(world.rank)
        count = len(ranks)
        # A prompt or two may be a trial, or the empty one of guidance.
        if self.usual and world.is_main and len(unique) > 2:
            median = statistics.median(word_count(text_of(text)) for text in unique)
            if median < SHORT_CAPTION:
                logger.warning(
                    "The median prompt has %d words; %s is used with captions of %s.",
                    median,
                    *self.usual,
                )
        share = range(place, len(unique), count)
        counts: dict[int, tuple[int, ...]] = {}
        for number in share:
            # Mapped and not read: the counts are wanted here, and `encode` compares the
            # checksum.
            found = self._read(unique[number], checked=False)
            if found is not None:
                counts[number] = found[1]
        # Collective, as are the rounds and the gather behind them: a rank that lacks
        # nothing takes part.
        absent = world.gather([number for number in share if number not in counts])
        todo = sorted(number for rank in ranks for number in absent[rank])
        if todo and place == 0:
            known = len(unique) - len(todo)
            logger.info(
                "Encoding %d prompts on %s; %d are in the cache %s.",
                len(todo),
                self.device,
                known,
                self.cache,
            )
        # Dealt out once more: all missing texts may have been in the share of one rank.
        own = todo[place::count]
        encoded = self._encode_in_rounds(
            [unique[number] for number in own], sum(map(len, absent)), world, progress
        )
        counts |= dict(zip(own, encoded, strict=True))
        everywhere = world.gather(counts)
        by_text = {
            unique[number]: count
            for rank in ranks
            for number, count in everywhere[rank].items()
        }
        if world.is_main:
            self._warn_of_unread(
                {text_of(text): count for text, count in by_text.items()}
            )
        # Behind those of two encoders stands a picture's, which is never cut off.
        return [
            (*map(min, by_text[text], _each(self.limits)), *by_text[text][2:])
            for text in texts
        ]

    def _encode_in_rounds(
        self,
        own: Sequence[str | Pictured],
        total: int,
        world: World,
        progress: Callable[[int, int], None],
    ) -> list[tuple[int, ...]]:
        """Encode this rank's share of the `total` texts, and return their numbers of
        tokens. Collective.
        """
        counts: list[tuple[int, ...]] = []
        with (
            # Closing runs the generator's `finally`, which frees the encoders, after an
            # error too.
            closing(self.encode_each(own)) as encoded,
            tqdm(
                total=total,
                desc="prompts",
                unit="prompt",
                disable=None if total and world.is_main else True,
            ) as bar,
        ):
            # Ranks that are done go round with the others: the gather is collective.
            while left := sum(world.gather(len(own) - len(counts))):
                progress(total - left, total)
                bar.update(total - left - bar.n)
                end = time.monotonic() + ROUND_SECONDS
                while len(counts) < len(own) and time.monotonic() < end:
                    embeds, count = next(encoded)
                    counts.append(_each(count))
                    self._write(own[len(counts) - 1], embeds, counts[-1])
            bar.update(total - bar.n)
        return counts

    def encode(self, texts: Sequence[str | Pictured]) -> list[PromptEmbeds]:
        """One record per text, valid tokens only, on the CPU. The empty text is the
        unconditional prompt.

        Texts that the cache lacks, or has damaged, are encoded. Raises as `prepare`.
        """
        found = [self._read(text) for text in texts]
        if any(read is None for read in found):
            # By this rank alone: the others may lack nothing.
            self.prepare(texts)
            found = [self._read(text) for text in texts]
        return [read[0] for read in found if read is not None]

    def _ranks_that_share(
        self, world: World, texts: Sequence[str | Pictured]
    ) -> list[int]:
        """The ranks that have this rank's cache and look for the same in it, itself
        among them.

        Nodes may have separate caches. That all have read the same prompts is checked
        later.
        """
        if world.size == 1:
            return [0]
        wanted = hashlib.blake2b(
            "".join(self.path_of(text).name for text in texts).encode()
        ).digest()
        self.cache.mkdir(parents=True, exist_ok=True)
        # A file that is never changed is known by its number and its date, on every
        # node that sees it.
        identity = self.cache / ".identity"
        os.close(os.open(identity, os.O_CREAT | os.O_RDONLY, 0o666))
        file = identity.stat()
        identities = world.gather((file.st_ino, file.st_mtime_ns, wanted))
        own = identities[world.rank]
        return [rank for rank, other in enumerate(identities) if other == own]

    # ----------------------------------------------------------------------------------
    # cache

    def path_of(self, text: str | Pictured) -> Path:
        """The file of a text's conditioning: a hash of the text, the encoders' files
        and the template.

        With a picture also of the picture's content and of the size that it is cropped
        to.
        """
        if self._identity is None:
            # Files that an encoder or a tokenizer is read from; any other would change
            # the keys for nothing.
            kinds = (".json", ".jinja", ".txt", ".safetensors", ".bin")
            files = [
                [file for file in (self.root / part).iterdir() if file.suffix in kinds]
                for part in self.parts
            ]
            self._identity = json.dumps(
                [CACHE_VERSION, self.template, *map(fingerprint, files)]
            )
        asked = f"{self._identity}\n{text_of(text)}"
        if not isinstance(text, str):
            asked += f"\n{content_digest(text.image)} {self.extent(text)} on white"
        key = hashlib.blake2b(asked.encode(), digest_size=20).hexdigest()
        return self.cache / key[:2] / f"{key}.safetensors"

    def extent(self, asked: Pictured) -> str:
        """Part of a video's size that the conditioning depends on."""
        return f"{asked.height}x{asked.width}"

    def _read(
        self, text: str | Pictured, *, checked: bool = True
    ) -> tuple[PromptEmbeds, tuple[int, ...]] | None:
        """The conditioning of a text, and its numbers of tokens before any were cut
        off.

        None where the cache lacks it. A damaged entry is removed, with a warning.

        Args:
            checked: read and compare the checksum. Otherwise the tensors are mapped
                into memory, and nothing is read.
        """
        path = self.path_of(text)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
                metadata = file.metadata() or {}
            if checked:
                # Copied, because the run may outlive the mapped file.
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            if metadata.get("prompt") != text_of(text) or (
                checked and metadata.get("checksum") != _checksum(tensors)
            ):
                raise ValueError("its content does not match its checksum")
            count = tuple(loads(metadata.get("tokens", "")))
            embeds = PromptEmbeds(**tensors)
        except FileNotFoundError:
            return None
        except (SafetensorError, TypeError, ValueError, OSError) as error:
            logger.warning(
                "Cached prompt %s is damaged (%s): it is encoded again.", path, error
            )
            path.unlink(missing_ok=True)
            return None
        return embeds, count

    def _write(
        self, text: str | Pictured, embeds: PromptEmbeds, count: tuple[int, ...]
    ) -> None:
        tensors = {
            name: value.cpu().contiguous()
            for name, value in vars(embeds).items()
            if value is not None
        }
        # Not waiting for the disk: an entry that a loss of power has cut off is found
        # damaged, and encoded again.
        with replacing(self.path_of(text), lasting=False) as partial:
            metadata = {
                "prompt": text_of(text),
                "checksum": _checksum(tensors),
                "tokens": json.dumps(count),
            }
            save_file(tensors, partial, metadata=metadata)

    def _load(self, model_class: Any, part: str) -> Any:
        """A transformers model of a folder, in its files' type, read straight to the
        device.

        ValueError as `load_pretrained`.
        """
        model = load_pretrained(
            model_class, self.root / part, dtype="auto", device_map=self.device
        )
        return model.requires_grad_(False)

    def _release(self) -> None:
        """Give the memory of encoders that are no longer referenced back to the device."""
        # Encoders that only a cycle of references holds are freed too.
        gc.collect()
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def _warn_of_unread(self, counts: Mapping[str, tuple[int, ...]]) -> None:
        """Say which prompts the encoders do not see whole.

        Args:
            counts: text -> its tokens by encoder, uncut.
        """
        for place, limit in enumerate(_each(self.limits)):
            cut = [text for text, count in counts.items() if count[place] > limit]
            if cut:
                logger.warning(
                    "%d of %d prompts are cut off after %d tokens, of which the %s "
                    "sees no more; shorten them. The first has %d: %.60r...",
                    *(len(cut), len(counts), limit, _each(self.readers)[place]),
                    *(counts[cut[0]][place], cut[0]),
                )


def _each(value: Any) -> tuple[Any, ...]:
    """Values of several encoders, or of the only one."""
    return value if isinstance(value, tuple) else (value,)


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(
            f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode()
        )
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
