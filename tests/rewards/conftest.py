"""Fixtures of the tests of rewards."""

import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer

import pytest


@pytest.fixture
def started() -> Iterator[Callable[[ThreadingHTTPServer], str]]:
    """Run a server in a thread, and give its address."""
    running = []

    def start(server: ThreadingHTTPServer) -> str:
        running.append(server)
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for each in running:
        each.shutdown()
        each.server_close()
