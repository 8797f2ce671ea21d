"""Short prompts to captions by a chat model that is on this machine, any one that transformers loads."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from sage_fast.config.errors import ConfigError
from sage_fast.models.hub import fetch_command
from sage_fast.records import Prompt

INSTRUCTION = """\
You turn a short video idea into one caption for a text-to-video model. Write one paragraph of 80 to 150 words in the \
language of the idea. Keep every subject, action, number, colour and name of the idea and contradict none of them. \
Copy text in quotation marks exactly, with its quotation marks. Add, in this order: what the subject looks like, how \
it moves, the setting, what moves in the background, the camera, the light, the visual style. Describe only what \
can be seen. Answer with the caption alone."""

MAX_NEW_TOKENS = 400


class Rewriter:
    """A chat model and the instruction it is given.

    Args:
        model: folder, or hub id in the local cache. Nothing is downloaded.
        device: `auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: the model cannot be loaded, or has no chat template.
    """

    def __init__(self, model: str, device: str = "auto") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
            self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--model {model!r} cannot be loaded: {str(error).splitlines()[0]} Give the folder of a chat model, or "
                f"fetch it first: {fetch_command(model)}"
            ) from error
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"--model {model!r} has no chat template. Give an instruction-tuned model.")
        self.model.to(device).eval()

    @torch.no_grad()
    def rewrite(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The same prompts with longer texts; the same for the same model, because nothing is sampled.

        Raises:
            ConfigError: the model left out a text in quotation marks, or gave no caption.
        """
        return [replace(prompt, text=self._caption(prompt.text)) for prompt in tqdm(prompts, unit="prompt")]

    def _caption(self, text: str) -> str:
        messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}]
        tokens = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.model.device)
        output = self.model.generate(**tokens, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answer = self.tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
        # Models that reason aloud put their thoughts before the answer.
        caption = " ".join(answer.rpartition("</think>")[2].split())
        missing = [quote for quote in re.findall(r"[\"\u201c]([^\"\u201d]+)[\"\u201d]", text) if quote not in caption]
        if not caption or missing:
            lost = f"left out {missing[0]!r}" if missing else "answered with nothing"
            raise ConfigError(
                f"The model {lost} when it rewrote {text!r}. Rewrite it by hand, or give another --model."
            )
        return caption
