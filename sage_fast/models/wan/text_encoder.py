"""Prompts to conditioning with the text encoder of Wan, UMT5.

Facts used here (diffusers 0.36 - 0.42, `WanPipeline`):
* a prompt's characters are repaired by ftfy, which changes typographic quotes, its HTML
  entities are resolved, and its whitespace is joined. Without the package ftfy the
  pipeline leaves the first out: the model was trained with it;
* the pipeline's call takes 512 tokens, its `encode_prompt` alone 226;
* only the valid tokens are read; the transformer's call fills them up with zeros.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor

from sage_fast.models.prompt_cache import CachedPromptEncoder
from sage_fast.models.wan.backbone import TEXT_TOKENS
from sage_fast.records import PromptEmbeds


@dataclass(kw_only=True)
class WanPromptEncoder(CachedPromptEncoder):
    """Encodes prompts, or finds them in its cache: text (L, 4096), L <= 512, and no
    glyph tokens.

    The encoder computes in the data type that its weights are stored in.
    """

    # Entries of a version that ran without ftfy too have False.
    template = ("wan", "ftfy", True)
    limits = (TEXT_TOKENS, 1)
    readers = ("text encoder", "glyph encoder")
    usual = ("Wan 2.1", "80 to 100")

    def _encode(self, texts: Sequence[str]) -> Generator[tuple[int, int], None, None]:
        if not texts:
            return
        encoder, tokenizer = self._load_encoder()
        try:
            for text in texts:
                clean = prompt_clean(text)
                cut = tokenizer(
                    clean, return_tensors="pt", truncation=True, max_length=TEXT_TOKENS
                )
                ids = cut.input_ids.to(self.device)
                with torch.no_grad():
                    states = (
                        encoder(ids, torch.ones_like(ids)).last_hidden_state[0].cpu()
                    )
                # Uncut, so that `prepare` can tell what the encoder does not see.
                length = len(tokenizer(clean).input_ids)
                self._write(
                    text,
                    PromptEmbeds(text=states, glyph=torch.zeros(0, 1)),
                    (length, 0),
                )
                yield length, 0
        finally:
            del encoder
            self._release()

    def _load_encoder(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, UMT5EncoderModel

        tokenizer = AutoTokenizer.from_pretrained(self.root / "tokenizer")
        return self._load(UMT5EncoderModel, "text_encoder"), tokenizer

    @torch.no_grad()
    def encode_plainly(self, text: str) -> Tensor:
        """The text tokens (L, 4096) of one prompt, by the pipeline's own method; what
        `encode` is held against.
        """
        from diffusers import WanPipeline

        encoder, tokenizer = self._load_encoder()
        try:
            plain = WanPipeline(
                tokenizer=tokenizer, text_encoder=encoder, vae=None, scheduler=None
            )
            (states,) = plain._get_t5_prompt_embeds(
                text, max_sequence_length=TEXT_TOKENS, device=self.device
            )
            # The method fills up with zeros to 512 again.
            cut = tokenizer(prompt_clean(text), truncation=True, max_length=TEXT_TOKENS)
            return states[: len(cut.input_ids)].cpu()
        finally:
            del encoder
            self._release()
