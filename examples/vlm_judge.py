"""A reward by a vision-language model, behind any OpenAI-compatible chat API: vLLM,
SGLang, or a hosted one.

`judge.yaml`, laid over a preset by `PYTHONPATH=examples sage-fast train toy_cpu
judge.yaml`:

    reward:
      rewards: ["vlm_judge:VLMJudge"]
      options:
        "vlm_judge:VLMJudge": {url: "http://127.0.0.1:8001/v1", model: Qwen/Qwen2.5-VL-7B-Instruct}
      weights: {judge: 1.0}

A key goes into the environment variable OPENAI_API_KEY. Numpy and pillow are all it
needs, so it also runs in another environment (`reward.python`) or for several trainers
at once (`reward.url`); with either, sampling goes on meanwhile.
"""

import base64
import io
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

import numpy as np
from PIL import Image

QUESTION = """These are {frames} frames of one video, in order. The video was generated from this description:

{prompt}

How well does the video show what the description says? 0: nothing of it. 10: everything, and nothing else.
Use the whole range, and decimals. Answer by JSON alone: {{"score": NUMBER}}"""
BEST = 10.0


class VLMJudge:
    """Asks the model for a number from 0 to 10 per video, and gives the tenth of it as
    the score `judge`.

    An answer that is not such a number is asked for again, and after `attempts` of them
    the video has no score: the run stops, or leaves out the group of the video
    (`reward.on_failure`).

    Args:
        url: base of the API, up to /v1.
        model: its name there.
        num_frames: frames that are shown, the middles of that many equal parts of the
            video.
        timeout: seconds without a byte of an answer.
        attempts: per video, with pauses of 1, 2, 4, ... `pause` seconds.
        parallel: videos asked about at once.
    """

    def __init__(
        self,
        url: str,
        model: str,
        num_frames: int = 4,
        timeout: float = 120.0,
        attempts: int = 4,
        pause: float = 1.0,
        parallel: int = 8,
    ) -> None:
        self.url = url.rstrip("/") + "/chat/completions"
        self.model = model
        self.num_frames = num_frames
        self.timeout = timeout
        self.attempts = attempts
        self.pause = pause
        self.parallel = parallel

    def score(self, videos: Any, prompts: Sequence[str]) -> dict[str, list[float]]:
        """{"judge": B numbers from 0 to 1} of videos (B, F, 3, H, W) uint8.
        RuntimeError where one has no score.
        """
        with ThreadPoolExecutor(self.parallel) as pool:
            return {"judge": list(pool.map(self._judge, np.asarray(videos), prompts))}

    def _judge(self, video: Any, prompt: str) -> float:
        frames = min(self.num_frames, len(video))
        text = QUESTION.format(frames=frames, prompt=prompt)
        content: list[Any] = [{"type": "text", "text": text}]
        for i in range(frames):
            picture = data_url(video[(2 * i + 1) * len(video) // (2 * frames)])
            content.append({"type": "image_url", "image_url": {"url": picture}})
        question = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "seed": 0,
            "max_tokens": 64,
        }
        body = json.dumps(question).encode()
        problem = ""
        for attempt in range(self.attempts):
            try:
                return read_score(self._ask(body)) / BEST
            except urllib.error.HTTPError as error:
                problem = f"{error}: {error.read(500).decode(errors='replace')}"
                if error.code < 500 and error.code not in (408, 429):
                    # a wrong key, model or question: the next answer would be the same
                    break
            except (OSError, HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt + 1 < self.attempts:
                time.sleep(self.pause * 2**attempt)
        raise RuntimeError(f"{self.url} gives no score for {prompt!r}: {problem}")

    def _ask(self, body: bytes) -> str:
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}",
        }
        request = urllib.request.Request(self.url, body, headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as reply:
            answer = json.load(reply)
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"not an answer of a chat API: {answer!s:.200}") from error


def read_score(text: str) -> float:
    """The number in {"score": NUMBER}, which may stand between other words. ValueError
    unless it is from 0 to 10.
    """
    found = json.loads(text[text.find("{") : text.rfind("}") + 1] or text)
    score: Any = found.get("score") if isinstance(found, dict) else None
    # True is an int of Python's.
    if type(score) not in (int, float) or not 0 <= score <= BEST:
        raise ValueError(f"not a score from 0 to {BEST:g}: {text:.200}")
    return float(score)


def data_url(frame: Any) -> str:
    """A frame (3, H, W) uint8 as a JPEG in an address."""
    file = io.BytesIO()
    pixels = np.ascontiguousarray(frame.transpose(1, 2, 0))
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
