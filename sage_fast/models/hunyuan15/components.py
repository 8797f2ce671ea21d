"""HunyuanVideo-1.5's text encoders, and for image-to-video its vision encoder.

Qwen2.5-VL reads the prompt in a chat template, ByT5 reads what the prompt puts in
quotation marks. SigLIP and the video autoencoder read the picture. All go through the
static encode methods of diffusers' pipelines, so template, crop and hidden layer are
the stock ones, and how a picture is scaled. The encoders are 14 GiB.
"""

import inspect
import logging
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.image_processor import (
    HunyuanVideo15ImageProcessor,
)
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import (
    extract_glyph_texts,
    format_text_input,
)
from torch import Tensor, nn

from sage_fast.config.files import loads
from sage_fast.models.hub import load_vae
from sage_fast.models.media_files import check_pictures, read_picture
from sage_fast.models.prompt_cache import CachedPromptEncoder
from sage_fast.records import Pictured, PromptEmbeds, text_of

logger = logging.getLogger(__name__)

MAX_TEXT_TOKENS = 1000
MAX_GLYPH_TOKENS = 256
"""Tokens beyond these are cut off, as in the stock pipeline."""

ENCODERS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
"""Folders of Qwen2.5-VL's text model and of ByT5's encoder, each with its tokenizer."""
VISION = ("image_encoder", "feature_extractor", "vae")
"""Folders of SigLIP, of its processor and of the video autoencoder, for image-to-video.
"""

_QUOTED = re.compile(r'"[^"\n]*"|“[^”\n]*”')
"""A quotation as the stock pipeline finds it."""

# Stands for the prompt where a conversation is split; no template has such characters.
_MARKER = "\x00prompt\x00"

_TEMPLATE = {
    name: parameter.default
    for name, parameter in inspect.signature(
        HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    ).parameters.items()
    if parameter.default is not inspect.Parameter.empty
}
"""System message, crop and hidden layer of the stock pipeline."""


@dataclass(kw_only=True)
class HunyuanPromptEncoder(CachedPromptEncoder):
    """Encodes prompts, or finds them in its cache: text (L, 3584), glyph (Lg, 1472),
    image (729, 1152) and frame.

    Lg is 0 for a text without quotation marks, and a text alone has no image. The stock
    pipeline encodes the unconditional prompt as one space. The encoders compute in the
    data type that their weights are stored in.
    """

    parts: Sequence[str] = ENCODERS

    template = _TEMPLATE
    limits = (MAX_TEXT_TOKENS, MAX_GLYPH_TOKENS)
    readers = ("language model", "glyph encoder")
    usual = ("HunyuanVideo-1.5", "80 to 200")

    @torch.no_grad()
    def encode_plainly(self, text: str) -> Tensor:
        """The text tokens (L, 3584) of one prompt: the conversation as it is, from
        where the prompt begins.

        Neither padded nor read from the cache, and the system message is found rather
        than counted; what `encode` is held against.
        """
        encoder, tokenizer = self._load_text_encoder()
        try:
            head, tail = self._conversation(tokenizer).split(_MARKER)
            prefix, whole = (
                tokenizer(
                    part, add_special_tokens=False, return_tensors="pt"
                ).input_ids.to(self.device)
                for part in (head, f"{head}{text or ' '}{tail}")
            )
            layers = encoder(input_ids=whole, output_hidden_states=True).hidden_states
            states: Tensor = layers[-1 - _TEMPLATE["num_hidden_layers_to_skip"]][
                0, prefix.shape[1] :
            ].cpu()
            return states[:MAX_TEXT_TOKENS]
        finally:
            # The name goes first: `_release` frees what nothing references.
            del encoder
            self._release()

    def encode_each(
        self, texts: Sequence[str | Pictured]
    ) -> Generator[tuple[PromptEmbeds, tuple[int, ...]], None, None]:
        check_pictures(texts)  # before the encoders are loaded, which takes minutes
        if any(extract_glyph_texts(text_of(t)) for t in texts):
            encode_glyphs = self._load_glyph_encoder()
        else:
            encode_glyphs = None
        if all(isinstance(text, str) for text in texts):
            encode_picture = None
        else:
            encode_picture = self._load_vision()
        width = loads(
            (self.root / "text_encoder_2" / "config.json").read_text(encoding="utf-8")
        )["d_model"]
        no_glyphs = torch.zeros(0, width)
        encoder, tokenizer = self._load_text_encoder()
        try:
            for asked in texts:
                text = text_of(asked)
                # Counted first, because the pipeline pads to a fixed length: with this
                # one nothing is padded.
                messages = format_text_input([text], _TEMPLATE["system_message"])
                (ids,) = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True
                ).input_ids
                length = len(ids) - _TEMPLATE["crop_start"]
                with torch.no_grad():
                    (states,), _ = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
                        encoder,
                        tokenizer,
                        text,
                        torch.device(self.device),
                        tokenizer_max_length=min(length, MAX_TEXT_TOKENS),
                    )
                glyph = no_glyphs.to(states.dtype)
                glyph_length = 0
                if encode_glyphs is not None and (quoted := extract_glyph_texts(text)):
                    glyph, glyph_length = encode_glyphs(text, quoted)
                embeds = PromptEmbeds(text=states, glyph=glyph)
                count = [length, glyph_length]
                if encode_picture is not None and isinstance(asked, Pictured):
                    image, frame = encode_picture(asked)
                    embeds = replace(embeds, image=image, frame=frame)
                    count.append(len(image))
                yield embeds, tuple(count)
        finally:
            del encoder, encode_glyphs, encode_picture
            self._release()

    def _load_vision(self) -> Callable[[Pictured], tuple[Tensor, Tensor]]:
        """Function from a picture to its tokens (Li, 1152) and to the latents (C, 1, H,
        W) of the first frame.

        The autoencoder computes in float32: it is one frame.
        """
        # Here, because where torchvision is missing transformers warns of it.
        from diffusers import HunyuanVideo15ImageToVideoPipeline as stock
        from transformers import SiglipImageProcessor, SiglipVisionModel

        assert "image_encoder" in self.parts, (
            "a run without pictures in its model refuses them"
        )
        siglip = self._load(SiglipVisionModel, "image_encoder")
        vae = load_vae(AutoencoderKLHunyuanVideo15, self.root / "vae", "float32").to(
            self.device
        )
        scaling = HunyuanVideo15ImageProcessor(
            vae_scale_factor=vae.spatial_compression_ratio, do_resize=False
        )
        features = SiglipImageProcessor.from_pretrained(self.root / "feature_extractor")

        @torch.no_grad()
        def encode(asked: Pictured) -> tuple[Tensor, Tensor]:
            size = {"height": asked.height, "width": asked.width}
            # SigLIP sees the cropped picture too.
            picture = scaling.resize(
                read_picture(asked.image), **size, resize_mode="crop"
            )
            tokens = stock._get_image_embeds(
                siglip, features, picture, torch.device(self.device)
            )
            latents = stock._get_image_latents(
                vae, scaling, picture, **size, device=torch.device(self.device)
            )
            return tokens[0], latents[0]

        return encode

    def _load_glyph_encoder(self) -> Callable[[str, str], tuple[Tensor, int]]:
        """Function from a text and its quotations to ByT5's tokens (Lg, 1472) of these,
        and their number uncut.
        """
        from transformers import ByT5Tokenizer, T5EncoderModel

        encoder = self._load(T5EncoderModel, "text_encoder_2")
        tokenizer = ByT5Tokenizer.from_pretrained(self.root / "tokenizer_2")

        @torch.no_grad()
        def encode(text: str, quoted: str) -> tuple[Tensor, int]:
            states, mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
                tokenizer,
                encoder,
                text,
                torch.device(self.device),
                tokenizer_max_length=MAX_GLYPH_TOKENS,
            )
            return states[0, mask[0].bool()].cpu(), len(tokenizer(quoted).input_ids)

        return encode

    def _load_text_encoder(self) -> tuple[nn.Module, Any]:
        """Qwen2.5-VL's text model and its tokenizer.

        ValueError unless the tokens that the pipeline crops are exactly those before
        the prompt.
        """
        from transformers import AutoTokenizer, Qwen2_5_VLTextModel

        folder = self.root / "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
        # Another tokenizer or chat template would silently cut into the prompt, or
        # leave a part of the system message.
        before = self._conversation(tokenizer).split(_MARKER)[0]
        count = len(tokenizer(before, add_special_tokens=False).input_ids)
        if count != _TEMPLATE["crop_start"]:
            raise ValueError(
                f"The tokenizer in {folder} puts {count} tokens before the prompt, "
                "but HunyuanVideo-1.5 was "
                f"trained with {_TEMPLATE['crop_start']}: it is not the tokenizer of "
                "Qwen2.5-VL-7B-Instruct, or its "
                "chat template was changed. Take the one that was published with the "
                "weights."
            )
        return self._load(Qwen2_5_VLTextModel, "text_encoder"), tokenizer

    @staticmethod
    def _conversation(tokenizer: Any) -> str:
        """Input of the language model, with a marker in the prompt's place."""
        messages = [
            {"role": "system", "content": _TEMPLATE["system_message"]},
            {"role": "user", "content": _MARKER},
        ]
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def _warn_of_unread(self, counts: Mapping[str, tuple[int, ...]]) -> None:
        """Also say which prompts are mostly quotations."""
        super()._warn_of_unread(counts)
        if quoted := [
            text
            for text in counts
            if 2 * sum(map(len, _QUOTED.findall(text))) > len(text)
        ]:
            logger.warning(
                "%d of %d prompts are mostly in quotation marks, so the glyph encoder "
                "is asked to write "
                "that text into the picture. Where this is not meant, take the marks "
                "out. The first: %.60r...",
                *(len(quoted), len(counts), quoted[0]),
            )
