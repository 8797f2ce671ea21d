"""examples/vlm_judge.py against a stub of a chat API that is right, silent or lying."""

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from examples.vlm_judge import VLMJudge
from sage_fast.config.schema import RunConfig
from sage_fast.run.run import build_trainer

NAME = "examples.vlm_judge:VLMJudge"
GREYS = (0, 51, 204)
VIDEOS = torch.stack(
    [torch.full((6, 3, 16, 16), grey, dtype=torch.uint8) for grey in GREYS]
)
PROMPTS = ["a black square", "a dark square", "a light square"]
Answer = Callable[[dict[str, Any], int], Any]


def brightness(question: dict[str, Any]) -> float:
    """Mean brightness of the frames in a question, from 0 to 10."""
    pixels = []
    for part in question["messages"][0]["content"][1:]:
        jpeg = base64.b64decode(part["image_url"]["url"].partition(",")[2])
        pixels.append(np.asarray(Image.open(io.BytesIO(jpeg))))
    return round(float(np.mean(pixels)) / 25.5, 3)


def says(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def honest(question: dict[str, Any], call: int) -> Any:
    return says(f'Here it is: ```json\n{{"score": {brightness(question)}}}\n```')


@pytest.fixture
def stub() -> Iterator[Callable[[Answer], str]]:
    """Serve a chat API that answers the nth question by answer(question, n), and give
    its address.
    """
    running = []

    def start(answer: Answer) -> str:
        calls = iter(range(10**6))

        class Chat(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                length = int(self.headers["Content-Length"])
                found = answer(json.loads(self.rfile.read(length)), next(calls))
                if found == "silence":
                    time.sleep(0.3)
                status = 200
                if isinstance(found, dict):
                    status = found.get("status", 200)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(
                    found if isinstance(found, bytes) else json.dumps(found).encode()
                )

            def log_message(self, *args: Any) -> None: ...

        running.append(ThreadingHTTPServer(("127.0.0.1", 0), Chat))
        threading.Thread(
            target=running[-1].serve_forever, args=[0.01], daemon=True
        ).start()
        return f"http://127.0.0.1:{running[-1].server_port}/v1"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def judge(url: str, **options: Any) -> VLMJudge:
    return VLMJudge(url, "stub", **{"pause": 0.01, "timeout": 0.2, **options})


EXPECTED = pytest.approx([grey / 255 for grey in GREYS], abs=1e-3)


def test_an_honest_model_is_believed(stub: Callable[[Answer], str]) -> None:
    asked: list[list[dict[str, Any]]] = []

    def answer(question: dict[str, Any], call: int) -> Any:
        asked.append(question["messages"][0]["content"])
        return honest(question, call)

    reward = judge(stub(answer), num_frames=2)
    assert reward.score(VIDEOS.numpy(), PROMPTS)["judge"] == EXPECTED
    assert sorted(text["text"].split("\n")[2] for text, *_ in asked) == PROMPTS
    assert [len(frames) for _, *frames in asked] == [2] * 3


WORDS = ("I would say nine.", '{"score": "9"}', '{"score": true}', '{"score": 11}')
LIES: list[Any] = [b"<html>", {"choices": []}, "silence", {"status": 500}]
LIES += [{"status": 429}, *map(says, (*WORDS, '{"score": NaN}'))]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_lie_is_asked_again_and_never_believed(
    lie: Any, stub: Callable[[Answer], str]
) -> None:
    once = stub(lambda question, call: lie if call < 3 else honest(question, call))
    assert judge(once).score(VIDEOS, PROMPTS)["judge"] == EXPECTED
    with pytest.raises(RuntimeError, match="gives no score for 'a black square': "):
        judge(stub(lambda question, call: lie), attempts=2).score(VIDEOS, PROMPTS)


def test_a_wrong_key_is_asked_once(stub: Callable[[Answer], str]) -> None:
    calls = []

    def answer(question: dict[str, Any], call: int) -> Any:
        calls.append(call)
        return {"status": 401, "error": "no such key"}

    url = stub(answer)
    with pytest.raises(RuntimeError, match="401.*no such key"):
        judge(url).score(VIDEOS[:1], PROMPTS[:1])
    assert calls == [0]


def test_the_toy_model_trains_on_it(
    stub: Callable[[Answer], str], tiny_run: Callable[..., RunConfig]
) -> None:
    options = json.dumps({NAME: {"url": stub(honest), "model": "stub"}})
    words = [
        f"--reward.rewards=[{NAME}]",
        f"--reward.options={options}",
        "--reward.weights={judge: 1.0}",
    ]
    record = build_trainer(tiny_run(*words)).iterate()
    assert 0 < record["reward/judge_mean"] < 1
