"""A server of rewards that is killed, and connections that break or must not be heard."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.torch import save

from sage_fast.rewards.remote import SERVER, RemoteReward
from sage_fast.rewards.server import RewardServer
from tests.rewards import support
from tests.rewards.support import VIDEOS, here

PROMPTS = ["a red circle moving left", "a blue square", "c"]


Started = Callable[[ThreadingHTTPServer], str]


def answer_to(server: RewardServer, head: str, body: bytes) -> bytes:
    """All that the server sends on a connection."""
    answer = b""
    address = ("127.0.0.1", server.server_port)
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while part := connection.recv(4096):
                answer += part
    return answer


def test_what_comes_with_a_wrong_token_is_not_read(started: Started) -> None:
    """Neither as a batch nor as the next request."""
    body = b"GET /health HTTP/1.1\r\nAuthorization: Bearer right\r\n\r\n"
    head = (
        "POST /score HTTP/1.1\r\nAuthorization: Bearer wrong\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    server = RewardServer({"rewards": {here("brightness"): {}}}, token="right")
    started(server)
    answer = answer_to(server, head, body)
    assert b" 401 " in answer.splitlines()[0] and answer.count(b"HTTP/1.") == 1


def test_half_a_batch_is_not_scored(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = []
    body = save({"videos": VIDEOS}, {"prompts": json.dumps(PROMPTS)})
    head = f"POST /score HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
    server = RewardServer({"rewards": {here("brightness"): {}}})
    started(server)
    work = server.work
    monkeypatch.setattr(
        server, "work", lambda *request: scored.append(request) or work(*request)
    )
    assert answer_to(server, head, body[:-100]) == b"" and not scored
    answer = answer_to(server, head, body)
    expected = support.brightness(VIDEOS, PROMPTS).tolist()
    found = json.loads(answer.partition(b"\r\n\r\n")[2])["scores"]
    assert found == {"brightness": expected} and len(scored) == 1


def start_process(nap: Path, port: int = 0) -> tuple["subprocess.Popen[str]", str]:
    """Start a server of `support.drowsy` as another process, and read its address."""
    config = nap.with_suffix(".json")
    config.write_text(json.dumps({"rewards": {here("drowsy"): {}}}))
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, SERVER, config, "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "NAP": str(nap)},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


@pytest.mark.slow
def test_a_batch_whose_server_is_killed_goes_to_the_next_one(tmp_path: Path) -> None:
    nap = tmp_path / "nap"
    process, url = start_process(nap)
    pending = ThreadPoolExecutor(1).submit(
        RemoteReward(url, None).score, VIDEOS, PROMPTS
    )
    while not nap.exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process, _ = start_process(nap, int(url.rpartition(":")[2]))
    try:
        expected = support.brightness(VIDEOS, PROMPTS).tolist()
        assert pending.result(60) == {"drowsy": expected}
    finally:
        process.kill()
        process.wait()
