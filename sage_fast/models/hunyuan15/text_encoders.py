"""Prompts to conditioning with the two text encoders of HunyuanVideo-1.5, each prompt once.

Qwen2.5-VL reads the prompt in a chat template, ByT5 reads what the prompt puts in quotation marks. Both go through the
static encode methods of diffusers' `HunyuanVideo15Pipeline`, so template, crop and hidden layer are the stock ones.
Their results are kept on disk, a file per prompt under a hash of everything it depends on, and read when a rollout
needs them. The encoders (14 GiB) are in memory only while something is missing there.
"""

import gc
import hashlib
import inspect
import json
import logging
import os
import re
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts, format_text_input
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from sage_fast.config.files import fingerprint, replacing
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.records import SHORT_CAPTION, PromptEmbeds, word_count

logger = logging.getLogger(__name__)

CACHE_VERSION = 2
"""Part of every key; raised when the meaning of an entry changes."""

ROUND_SECONDS = 5.0
"""How long a rank encodes before it tells the others how far it is, so that nobody waits for anybody's whole share."""

MAX_TEXT_TOKENS = 1000
MAX_GLYPH_TOKENS = 256
"""Tokens beyond these are cut off, as in the stock pipeline."""

_QUOTED = re.compile(r'"[^"\n]*"|“[^”\n]*”')
"""A quotation as the stock pipeline finds it."""

_MARKER = "\x00prompt\x00"

_TEMPLATE = {
    name: parameter.default
    for name, parameter in inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters.items()
    if parameter.default is not inspect.Parameter.empty
}
"""System message, crop and hidden layer of the stock pipeline."""


@dataclass(kw_only=True)
class HunyuanPromptEncoder:
    """Encodes prompts, or finds them in its cache.

    Both encoders compute in the data type that their weights are stored in.
    """

    text_encoder: Path
    """Folder of Qwen2.5-VL's text model."""
    tokenizer: Path
    """Folder of its tokenizer."""
    glyph_encoder: Path
    """Folder of ByT5's encoder."""
    glyph_tokenizer: Path
    """Folder of its tokenizer."""
    cache: Path
    """Folder of the encoded prompts; created when missing."""
    device: torch.device | str = "cpu"
    """Where the encoders run."""
    _identity: str | None = field(default=None, init=False)

    def prepare(
        self,
        texts: Sequence[str],
        world: World = SINGLE_PROCESS,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[tuple[int, int]]:
        """As in `PromptEncoder`: encode into the cache what it lacks. Ranks whose cache is the same folder share that.

        A rank that is killed loses what it was encoding at that moment; the next start goes on with the rest.

        Raises:
            ValueError: the tokenizer does not belong to the model.
            OSError: the cache cannot be written.
        """
        unique = list(dict.fromkeys(texts))
        ranks = self._ranks_that_share(world, unique)
        place, count = ranks.index(world.rank), len(ranks)
        # A prompt or two may be a trial, or the empty one of guidance.
        if world.is_main and len(unique) > 2 and (median := statistics.median(map(word_count, unique))) < SHORT_CAPTION:
            logger.warning(
                "The median prompt has %d words; HunyuanVideo-1.5 is used with captions of 80 to 200.", median
            )
        share = range(place, len(unique), count)
        counts: dict[int, tuple[int, int]] = {}
        for number in share:
            if (found := self._read(unique[number], checked=False)) is not None:
                counts[number] = found[1]
        absent = world.gather([number for number in share if number not in counts])
        todo = sorted(number for rank in ranks for number in absent[rank])
        if todo and place == 0:
            known = len(unique) - len(todo)
            logger.info("Encoding %d prompts on %s; %d are in the cache %s.", len(todo), self.device, known, self.cache)
        own = todo[place::count]
        encoded = self._encode_in_rounds([unique[number] for number in own], sum(map(len, absent)), world, progress)
        counts |= dict(zip(own, encoded, strict=True))
        everywhere = world.gather(counts)
        by_text = {unique[number]: count for rank in ranks for number, count in everywhere[rank].items()}
        if world.is_main:
            _warn_of_unread(by_text)
        return [(min(by_text[text][0], MAX_TEXT_TOKENS), min(by_text[text][1], MAX_GLYPH_TOKENS)) for text in texts]

    def _encode_in_rounds(
        self, own: Sequence[str], total: int, world: World, progress: Callable[[int, int], None]
    ) -> list[tuple[int, int]]:
        """Encode this rank's share of the `total` texts, and return their numbers of tokens. Collective."""
        counts: list[tuple[int, int]] = []
        with (
            closing(self._encode(own)) as encoded,
            tqdm(total=total, desc="prompts", unit="prompt", disable=None if total and world.is_main else True) as bar,
        ):
            while left := sum(world.gather(len(own) - len(counts))):
                progress(total - left, total)
                bar.update(total - left - bar.n)
                end = time.monotonic() + ROUND_SECONDS
                while len(counts) < len(own) and time.monotonic() < end:
                    counts.append(next(encoded))
            bar.update(total - bar.n)
        return counts

    def encode(self, texts: Sequence[str]) -> list[PromptEmbeds]:
        """One record per text, valid tokens only, on the CPU: text (L, 3584) and glyph (Lg, 1472).

        Lg is 0 for a text without quotation marks. The empty text is the unconditional prompt, which the stock pipeline
        encodes as one space. Texts that the cache lacks, or has damaged, are encoded. Raises as `prepare`.
        """
        found = [self._read(text) for text in texts]
        if any(read is None for read in found):
            self.prepare(texts)
            found = [self._read(text) for text in texts]
        return [read[0] for read in found if read is not None]

    def _ranks_that_share(self, world: World, texts: Sequence[str]) -> list[int]:
        """The ranks that have this rank's cache and look for the same in it, itself among them.

        Nodes may have separate caches. That all have read the same prompts is checked later.
        """
        if world.size == 1:
            return [0]
        wanted = hashlib.blake2b("".join(self.path_of(text).name for text in texts).encode()).digest()
        self.cache.mkdir(parents=True, exist_ok=True)
        # A file that is never changed is known by its number and its date, on every node that sees it.
        descriptor = os.open(self.cache / ".identity", os.O_CREAT | os.O_RDONLY, 0o666)
        try:
            file = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        identities = world.gather((file.st_ino, file.st_mtime_ns, wanted))
        return [rank for rank, identity in enumerate(identities) if identity == identities[world.rank]]

    @torch.no_grad()
    def encode_plainly(self, text: str) -> Tensor:
        """The text tokens (L, 3584) of one prompt: the conversation as it is, from where the prompt begins.

        Neither padded nor read from the cache, and the system message is found rather than counted; what `encode` is
        held against.
        """
        encoder, tokenizer = self._load_text_encoder()
        try:
            head, tail = self._conversation(tokenizer).split(_MARKER)
            prefix, whole = (
                tokenizer(part, add_special_tokens=False, return_tensors="pt").input_ids.to(self.device)
                for part in (head, f"{head}{text or ' '}{tail}")
            )
            layers = encoder(input_ids=whole, output_hidden_states=True).hidden_states
            states: Tensor = layers[-1 - _TEMPLATE["num_hidden_layers_to_skip"]][0, prefix.shape[1] :].cpu()
            return states[:MAX_TEXT_TOKENS]
        finally:
            del encoder
            self._release()

    # ------------------------------------------------------------------------------------------ cache

    def path_of(self, text: str) -> Path:
        """The file of a text's conditioning: a hash of the text, the encoders' files and the template."""
        if self._identity is None:
            folders = (self.text_encoder, self.tokenizer, self.glyph_encoder, self.glyph_tokenizer)
            kinds = (".json", ".jinja", ".txt", ".safetensors", ".bin")
            files = [[path for path in folder.iterdir() if path.suffix in kinds] for folder in folders]
            self._identity = json.dumps([CACHE_VERSION, _TEMPLATE, *map(fingerprint, files)])
        key = hashlib.blake2b(f"{self._identity}\n{text}".encode(), digest_size=20).hexdigest()
        return self.cache / key[:2] / f"{key}.safetensors"

    def _read(self, text: str, *, checked: bool = True) -> tuple[PromptEmbeds, tuple[int, int]] | None:
        """The conditioning of a text, and its numbers of tokens before any were cut off.

        None where the cache lacks it. A damaged entry is removed, with a warning.

        Args:
            checked: read and compare the checksum. Otherwise the tensors are mapped into memory, and nothing is read.
        """
        path = self.path_of(text)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in ("text", "glyph")}
                metadata = file.metadata() or {}
            if checked:
                # Copied, because the run may outlive the mapped file.
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            if metadata.get("prompt") != text or (checked and metadata.get("checksum") != _checksum(tensors)):
                raise ValueError("its content does not match its checksum")
            count = json.loads(metadata.get("tokens", ""))
        except FileNotFoundError:
            return None
        except (SafetensorError, ValueError, OSError) as error:
            logger.warning("Cached prompt %s is damaged (%s): it is encoded again.", path, error)
            path.unlink(missing_ok=True)
            return None
        return PromptEmbeds(**tensors), (count[0], count[1])

    def _write(self, text: str, embeds: PromptEmbeds, count: tuple[int, int]) -> None:
        tensors = {"text": embeds.text.cpu().contiguous(), "glyph": embeds.glyph.cpu().contiguous()}
        # Not waiting for the disk: an entry that a loss of power has cut off is found damaged, and encoded again.
        with replacing(self.path_of(text), lasting=False) as partial:
            metadata = {"prompt": text, "checksum": _checksum(tensors), "tokens": json.dumps(count)}
            save_file(tensors, partial, metadata=metadata)

    # ------------------------------------------------------------------------------------------ encoders

    def _encode(self, texts: Sequence[str]) -> Generator[tuple[int, int], None, None]:
        """Load the encoders, write the conditioning of the texts to the cache, one by one, free the encoders.

        Yields the numbers of tokens of each text before any were cut off. A text goes through the language model alone
        and without padding, which its tokens do not see: what is cached depends on nothing but the text.
        """
        if not texts:
            return
        encode_glyphs = self._load_glyph_encoder() if any(map(extract_glyph_texts, texts)) else None
        width = json.loads((self.glyph_encoder / "config.json").read_text(encoding="utf-8"))["d_model"]
        no_glyphs = torch.zeros(0, width)
        encoder, tokenizer = self._load_text_encoder()
        try:
            for text in texts:
                messages = format_text_input([text], _TEMPLATE["system_message"])
                (ids,) = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
                length = len(ids) - _TEMPLATE["crop_start"]
                with torch.no_grad():
                    (states,), _ = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
                        encoder,
                        tokenizer,
                        text,
                        torch.device(self.device),
                        tokenizer_max_length=min(length, MAX_TEXT_TOKENS),
                    )
                glyph, glyph_length = no_glyphs.to(states.dtype), 0
                if encode_glyphs is not None and (quoted := extract_glyph_texts(text)):
                    glyph, glyph_length = encode_glyphs(text, quoted)
                self._write(text, PromptEmbeds(text=states, glyph=glyph), (length, glyph_length))
                yield length, glyph_length
        finally:
            del encoder, encode_glyphs
            self._release()

    def _load_glyph_encoder(self) -> Callable[[str, str], tuple[Tensor, int]]:
        """Function from a text and its quotations to ByT5's tokens (Lg, 1472) of these, and their number uncut."""
        from transformers import ByT5Tokenizer, T5EncoderModel

        encoder = self._load(T5EncoderModel, self.glyph_encoder)
        tokenizer = ByT5Tokenizer.from_pretrained(self.glyph_tokenizer)

        @torch.no_grad()
        def encode(text: str, quoted: str) -> tuple[Tensor, int]:
            states, mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
                tokenizer, encoder, text, torch.device(self.device), tokenizer_max_length=MAX_GLYPH_TOKENS
            )
            return states[0, mask[0].bool()].cpu(), len(tokenizer(quoted).input_ids)

        return encode

    def _load_text_encoder(self) -> tuple[nn.Module, Any]:
        from transformers import AutoTokenizer, Qwen2_5_VLTextModel

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, padding_side="right")
        self._check_template(tokenizer)
        return self._load(Qwen2_5_VLTextModel, self.text_encoder), tokenizer

    def _load(self, model_class: Any, folder: Path) -> Any:
        """A transformers model in its files' type, read straight to the device. ValueError when weights are missing."""
        verbosity = transformers_logging.get_verbosity()
        # Missing weights are reported below.
        transformers_logging.set_verbosity_error()
        try:
            model, info = model_class.from_pretrained(
                folder, dtype="auto", device_map=self.device, local_files_only=True, output_loading_info=True
            )
        finally:
            transformers_logging.set_verbosity(verbosity)
        if info["missing_keys"]:
            raise ValueError(
                f"The weights in {folder} lack {len(info['missing_keys'])} tensors of a {model_class.__name__}, among "
                f"them {sorted(info['missing_keys'])[0]}. Download the folder again."
            )
        return model.eval().requires_grad_(False)

    @staticmethod
    def _conversation(tokenizer: Any) -> str:
        """Input of the language model, with a marker in the prompt's place."""
        messages = [
            {"role": "system", "content": _TEMPLATE["system_message"]},
            {"role": "user", "content": _MARKER},
        ]
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def _check_template(self, tokenizer: Any) -> None:
        """ValueError unless the tokens that the pipeline crops are exactly those before the prompt.

        Another tokenizer or chat template would silently cut into the prompt, or leave a part of the system message.
        """
        before = self._conversation(tokenizer).split(_MARKER)[0]
        count = len(tokenizer(before, add_special_tokens=False).input_ids)
        if count != _TEMPLATE["crop_start"]:
            raise ValueError(
                f"The tokenizer in {self.tokenizer} puts {count} tokens before the prompt, but HunyuanVideo-1.5 was "
                f"trained with {_TEMPLATE['crop_start']}: it is not the tokenizer of Qwen2.5-VL-7B-Instruct, or its "
                "chat template was changed. Take the one that was published with the weights."
            )

    def _release(self) -> None:
        """Give the memory of encoders that are no longer referenced back to the device."""
        gc.collect()
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()


def _warn_of_unread(counts: Mapping[str, tuple[int, int]]) -> None:
    """Say which prompts the encoders do not see whole, and which ones are mostly quotations.

    Args:
        counts: text -> its tokens in the language model and in the glyph encoder, uncut.
    """
    for place, (limit, reader) in enumerate(((MAX_TEXT_TOKENS, "language model"), (MAX_GLYPH_TOKENS, "glyph encoder"))):
        if cut := [(text, count[place]) for text, count in counts.items() if count[place] > limit]:
            logger.warning(
                "%d of %d prompts are cut off after %d tokens, of which the %s sees no more; shorten them. The first "
                "has %d: %.60r...",
                *(len(cut), len(counts), limit, reader, cut[0][1], cut[0][0]),
            )
    if quoted := [text for text in counts if 2 * sum(map(len, _QUOTED.findall(text))) > len(text)]:
        logger.warning(
            "%d of %d prompts are mostly in quotation marks, so the glyph encoder is asked to write that "
            "text into the picture. Where this is not meant, take the marks out. The first: %.60r...",
            *(len(quoted), len(counts), quoted[0]),
        )


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
