"""A server that speaks OpenAI's chat completions, answers by rule, and fails where a test says so."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[["Handler"], None]


@dataclass
class FakeServer:
    """What was asked and what is to go wrong.

    Attributes:
        asked: the bodies of all requests, as they came.
        faults: for a question (the last message's content), what to do instead of answering, one for each time asked.
        answer: from a request's body to a choice.
        gate: answers wait while it is closed.
    """

    url: str = ""
    asked: list[dict] = field(default_factory=list)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    answer: Callable[[dict], dict] = lambda body: choice(f"answer to {body['messages'][-1]['content']}")
    models: tuple[str, ...] = ("fake",)
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(10**6))
    keys: set[str | None] = field(default_factory=set)

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.asked]


def choice(content: Any, finish_reason: Any = "stop", **message: Any) -> dict:
    return {"message": {"role": "assistant", "content": content} | message, "finish_reason": finish_reason}


def status(code: int) -> Fault:
    return lambda handler: handler.reply({"error": "no"}, code)


def silence(handler: "Handler") -> None:
    """Says nothing until the client has gone away."""
    handler.rfile.read(1)


def says(body: bytes) -> Fault:
    return lambda handler: handler.send(body, 200)


class Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self):
        self.reply({"data": [{"id": name} for name in self.fake.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.asked.append(body)
        self.fake.keys.add(self.headers.get("Authorization"))
        if faults := self.fake.faults.get(body["messages"][-1]["content"]):
            faults.pop(0)(self)
            return
        self.fake.gate.acquire()
        self.reply({"choices": [self.fake.answer(body)], "usage": {"completion_tokens": 3}})

    def reply(self, body: dict, code: int = 200) -> None:
        self.send(json.dumps(body).encode(), code)

    def send(self, body: bytes, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed or timed out has closed its end; that is the test's doing."""


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    server = QuietServer(("127.0.0.1", 0), type("Handler", (Handler,), {"fake": fake}))
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
