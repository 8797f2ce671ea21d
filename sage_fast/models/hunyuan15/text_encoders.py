"""Prompts to conditioning with the two text encoders of HunyuanVideo-1.5, each prompt once.

Qwen2.5-VL reads the prompt in a chat template, ByT5 reads what the prompt puts in quotation marks. Both go through the
static encode methods of diffusers' `HunyuanVideo15Pipeline`, so template, crop and hidden layer are the stock ones.
Their results are kept on disk under a hash of everything they depend on, and the encoders (14 GiB) are in memory only
while something is missing there.
"""

import gc
import hashlib
import inspect
import json
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from sage_fast.config.files import exclusive, fingerprint, replacing
from sage_fast.records import SHORT_CAPTION, PromptEmbeds, word_count

logger = logging.getLogger(__name__)

CACHE_VERSION = 1
"""Part of every key; raised when the meaning of an entry changes."""

LOG_SECONDS = 60
"""Seconds between two lines of progress where there is no terminal for a bar."""

MAX_TEXT_TOKENS = 1000
MAX_GLYPH_TOKENS = 256
"""Tokens beyond these are cut off, as in the stock pipeline."""

_MARKER = "\x00prompt\x00"

_TEMPLATE = {
    name: parameter.default
    for name, parameter in inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters.items()
    if parameter.default is not inspect.Parameter.empty
}
"""System message, crop and hidden layer of the stock pipeline."""


class HunyuanPromptEncoder:
    """Encodes prompts, or finds them in its cache.

    Args:
        text_encoder: folder of Qwen2.5-VL: the text model alone, or the whole model.
        tokenizer: folder of its tokenizer.
        glyph_encoder: folder of ByT5's encoder.
        glyph_tokenizer: folder of its tokenizer.
        cache: folder of the encoded prompts; created when missing.
        dtype: of the language model, such as float16; `auto` is the one that its weights are stored in.
        device: where the encoders run.
        batch_size: prompts per forward pass.

    The glyph encoder computes in the data type that its weights are stored in.
    """

    def __init__(
        self,
        *,
        text_encoder: Path,
        tokenizer: Path,
        glyph_encoder: Path,
        glyph_tokenizer: Path,
        cache: Path,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        batch_size: int = 8,
    ) -> None:
        self.text_encoder, self.tokenizer = text_encoder, tokenizer
        self.glyph_encoder, self.glyph_tokenizer = glyph_encoder, glyph_tokenizer
        self.cache = cache
        self.dtype = dtype
        self.device = device
        self.batch_size = batch_size
        self._identity: str | None = None

    def encode(self, texts: Sequence[str]) -> list[PromptEmbeds]:
        """One record per text, valid tokens only, on the CPU: text (L, 3584) and glyph (Lg, 1472).

        Lg is 0 for a text without quotation marks. The empty text is the unconditional prompt, which the stock pipeline
        encodes as one space.

        Raises:
            ValueError: the tokenizer does not belong to the model.
            OSError: the cache cannot be written.
        """
        unique = list(dict.fromkeys(texts))
        self._warn_of_short_prompts(unique)
        found = self._read(unique)
        if len(found) < len(unique):
            # Another rank may be encoding the same prompts: wait for it, then look again.
            with exclusive(self.cache):
                found |= self._read([t for t in unique if t not in found])
                self._encode([t for t in unique if t not in found], known=len(found))
                found |= self._read([t for t in unique if t not in found])
        return [found[text] for text in texts]

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

    @staticmethod
    def _warn_of_short_prompts(texts: Sequence[str]) -> None:
        # A prompt or two may be a trial, or the empty one of guidance.
        if len(texts) > 2 and (median := statistics.median(map(word_count, texts))) < SHORT_CAPTION:
            logger.warning(
                "The median prompt has %d words; HunyuanVideo-1.5 is used with captions of 80 to 200. "
                "`sage-fast prompts rewrite` expands short ones.",
                median,
            )

    # ------------------------------------------------------------------------------------------ cache

    def path_of(self, text: str) -> Path:
        """The file of a text's conditioning: a hash of the text, the encoders' files and the template."""
        if self._identity is None:
            folders = (self.text_encoder, self.tokenizer, self.glyph_encoder, self.glyph_tokenizer)
            files = [
                [
                    path
                    for path in folder.iterdir()
                    if path.suffix in (".json", ".jinja", ".txt", ".safetensors", ".bin")
                ]
                for folder in folders
            ]
            chosen = [] if self.dtype == "auto" else [self.dtype]
            self._identity = json.dumps([CACHE_VERSION, _TEMPLATE, *map(fingerprint, files), *chosen])
        key = hashlib.blake2b(f"{self._identity}\n{text}".encode(), digest_size=20).hexdigest()
        return self.cache / key[:2] / f"{key}.safetensors"

    def _read(self, texts: Sequence[str]) -> dict[str, PromptEmbeds]:
        """The conditioning of the texts that the cache holds. A damaged entry is removed, with a warning."""
        result = {}
        for text in texts:
            path = self.path_of(text)
            if not path.exists():
                continue
            try:
                with safe_open(path, framework="pt") as file:
                    # Copied, because the run may outlive the mapped file.
                    tensors = {name: file.get_tensor(name).clone() for name in ("text", "glyph")}
                    metadata = file.metadata() or {}
                if metadata.get("prompt") != text or metadata.get("checksum") != _checksum(tensors):
                    raise ValueError("its content does not match its checksum")
            except (SafetensorError, ValueError, OSError) as error:
                logger.warning("Cached prompt %s is damaged (%s): it is encoded again.", path, error)
                path.unlink(missing_ok=True)
                continue
            result[text] = PromptEmbeds(**tensors)
        return result

    def _write(self, text: str, embeds: PromptEmbeds) -> None:
        tensors = {"text": embeds.text.cpu().contiguous(), "glyph": embeds.glyph.cpu().contiguous()}
        with replacing(self.path_of(text)) as partial:
            save_file(tensors, partial, metadata={"prompt": text, "checksum": _checksum(tensors)})

    # ------------------------------------------------------------------------------------------ encoders

    def _encode(self, texts: Sequence[str], *, known: int) -> None:
        """Load the encoders, write the conditioning of the texts into the cache, and free the encoders."""
        if not texts:
            return
        logger.info("Encoding %d prompts on %s; %d are in the cache %s.", len(texts), self.device, known, self.cache)
        quoting = [text for text in texts if extract_glyph_texts(text)]
        tokens = self._encode_glyphs(quoting) if quoting else {}
        no_glyphs = torch.zeros(0, self._glyph_width())
        encoder, tokenizer = self._load_text_encoder()
        said = time.monotonic()
        try:
            with torch.no_grad(), tqdm(total=len(texts), desc="prompts", unit="prompt", disable=None) as bar:
                for first in range(0, len(texts), self.batch_size):
                    batch = texts[first : first + self.batch_size]
                    states, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
                        encoder, tokenizer, list(batch), torch.device(self.device), tokenizer_max_length=MAX_TEXT_TOKENS
                    )
                    for text, row, valid in zip(batch, states, mask.bool(), strict=True):
                        if valid.all():
                            logger.warning("A prompt is cut off after %d tokens: %.60r...", MAX_TEXT_TOKENS, text)
                        glyph = tokens.get(text, no_glyphs.to(row.dtype))
                        self._write(text, PromptEmbeds(text=row[valid], glyph=glyph))
                    bar.update(len(batch))
                    if bar.disable and time.monotonic() - said > LOG_SECONDS:
                        said = time.monotonic()
                        logger.info("Encoded %d of %d prompts.", first + len(batch), len(texts))
        finally:
            del encoder
            self._release()

    def _encode_glyphs(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """ByT5's tokens (Lg, 1472) of what each text quotes."""
        from transformers import ByT5Tokenizer, T5EncoderModel

        encoder = _load(T5EncoderModel, self.glyph_encoder).to(self.device)
        tokenizer = ByT5Tokenizer.from_pretrained(self.glyph_tokenizer)
        result = {}
        try:
            with torch.no_grad():
                for text in texts:
                    states, mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
                        tokenizer, encoder, text, torch.device(self.device), tokenizer_max_length=MAX_GLYPH_TOKENS
                    )
                    result[text] = states[0, mask[0].bool()].cpu()
        finally:
            del encoder
            self._release()
        return result

    def _load_text_encoder(self) -> tuple[nn.Module, Any]:
        from transformers import AutoTokenizer, Qwen2_5_VLModel, Qwen2_5_VLTextModel

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, padding_side="right")
        self._check_template(tokenizer)
        config = json.loads((self.text_encoder / "config.json").read_text(encoding="utf-8"))
        if config.get("model_type") == "qwen2_5_vl_text":
            return _load(Qwen2_5_VLTextModel, self.text_encoder, self.dtype).to(self.device), tokenizer
        # The published Qwen2.5-VL: its vision tower and head are not needed.
        return _load(Qwen2_5_VLModel, self.text_encoder, self.dtype).language_model.to(self.device), tokenizer

    @staticmethod
    def _conversation(tokenizer: Any) -> str:
        """What the language model reads, with a marker in the prompt's place."""
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

    def _glyph_width(self) -> int:
        config = json.loads((self.glyph_encoder / "config.json").read_text(encoding="utf-8"))
        return int(config["d_model"])

    def _release(self) -> None:
        """Give the memory of encoders that are no longer referenced back to the device."""
        gc.collect()
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()


def _load(model_class: Any, folder: Path, dtype: str = "auto") -> Any:
    """A transformers model, ready for inference. ValueError when weights are missing.

    Args:
        dtype: `auto` is that of its files.
    """
    verbosity = transformers_logging.get_verbosity()
    # Missing weights are reported below. The head, which only the whole Qwen2.5-VL has, is not one of them.
    transformers_logging.set_verbosity_error()
    try:
        model, info = model_class.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    finally:
        transformers_logging.set_verbosity(verbosity)
    if info["missing_keys"]:
        raise ValueError(
            f"The weights in {folder} lack {len(info['missing_keys'])} tensors of a {model_class.__name__}, among them "
            f"{sorted(info['missing_keys'])[0]}. Download the folder again."
        )
    return model.eval().requires_grad_(False)


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
