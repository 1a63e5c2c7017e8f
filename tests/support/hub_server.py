"""A server that speaks the protocol of the Hugging Face hub, and can drop connections."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from paradraft.sources.hub import located

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request."""

    method: str
    path: str
    range: str | None


@dataclass
class Hub:
    """Repositories, what was asked for, and how the next downloads end.

    Args:
        repositories: their files by name.
        gated: repositories whose files nobody gets.
        endings: of each next download, the bytes after which the connection is dropped; 0 for an error of the server.
            When none is left, downloads are whole.
    """

    repositories: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    endings: list[int] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    def downloads(self) -> list[Asked]:
        """The requests for what files hold."""
        return [each for each in self.asked if each.method == "GET" and "/resolve/" in each.path]

    def _answer(self, to: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(to.path).path).lstrip("/")
        self.asked.append(Asked(method=to.command, path=path, range=to.headers["Range"]))
        repo, _, rest = path.removeprefix("api/models/").partition("/resolve/")
        if repo not in self.repositories:
            return _reply(to, 404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        files = self.repositories[repo]
        if not rest:
            told = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return _reply(to, 200, json.dumps(told).encode(), {"Content-Type": "application/json"})
        if repo in self.gated:
            return _reply(to, 403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        name = rest.partition("/")[2]
        if name not in files:
            return _reply(to, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        self._send(to, files[name])

    def _send(self, to: BaseHTTPRequestHandler, content: bytes) -> None:
        first = int((to.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        ending = self.endings.pop(0) if self.endings and to.command == "GET" else None
        if ending == 0:
            return _reply(to, 503, b"", {})
        _reply(to, 206 if first else 200, content[first:], headers, ending)


def _reply(
    to: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str], ending: int | None = None
) -> None:
    to.send_response(status)
    for key, value in {"Content-Length": str(len(body)), **headers}.items():
        to.send_header(key, value)
    to.end_headers()
    if to.command == "HEAD":
        return
    to.wfile.write(body[:ending])
    if ending is not None:
        to.wfile.flush()
        to.close_connection = True
        to.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(hub: Hub) -> Iterator[None]:
    """Inside, the hub answers at its `url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            hub._answer(self)

        do_HEAD = do_GET  # noqa: N815

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def asked_of(hub: Hub, *, cache: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, this process asks this hub, as others do whose environment has its `HF_ENDPOINT`."""
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setenv("NO_PROXY", "127.0.0.1")
    located.cache_clear()
    try:
        yield
    finally:
        located.cache_clear()
