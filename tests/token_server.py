"""An endpoint that gives tokens for a client's credentials, as OAuth 2 has it."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs


@dataclass(kw_only=True)
class TokenServer:
    """What it knows, and what it was asked."""

    client: str
    secret: str
    seconds: float = 300
    """How long a token is good."""
    address: str = ""
    asked: list[str] = field(default_factory=list)
    """The scope of each request whose credentials were right."""

    def token(self, scope: str) -> str:
        """A token that nobody has signed."""
        now = time.time()
        claims = {"sub": self.client, "iat": now, "exp": now + self.seconds, "scope": scope}
        return f"{_part({'alg': 'none'})}.{_part(claims)}."


@contextmanager
def token_server(client: str, secret: str) -> Iterator[TokenServer]:
    """An endpoint, which ends with its context."""
    there = TokenServer(client=client, secret=secret)
    right = f"Basic {base64.b64encode(f'{client}:{secret}'.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
            known = self.headers["authorization"] == right
            scope = form.get("scope", [""])[0]
            answer: dict[str, Any] = {"error": "invalid_client"}
            if known and form["grant_type"] == ["client_credentials"]:
                there.asked.append(scope)
                answer = {"access_token": there.token(scope), "token_type": "Bearer"}
            data = json.dumps(answer).encode()
            self.send_response(200 if known else 401)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    there.address = f"http://127.0.0.1:{server.server_port}/token"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield there
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _part(said: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(said).encode()).rstrip(b"=").decode()
