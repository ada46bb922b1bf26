"""A stand-in for the Hugging Face Hub: the API's paths for small model repositories, over HTTP, from folders of this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Hub:
    """Repositories by name, each with folders by revision. `asked`: requests in their order. `pushed`: files by repository."""

    revisions: dict[str, dict[str, Path]]
    private: frozenset[str] = frozenset()
    holds: str = ""  # a file that does not come
    cuts: tuple[str, int] | None = None  # a file whose connection breaks after so many bytes, once
    stands: tuple[str, int] | None = None  # a file of which no more than so many bytes come, once
    resets: tuple[str, int] | None = None  # a file whose connection is reset after so many bytes, once
    serves_wrong: str = ""  # a file that comes with other bytes than it has
    has_cdn: bool = False  # large files are elsewhere, for whoever has a signed address and shows no token
    knows_hashes: bool = True  # SHA-256 of large files
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    url: str = ""

    def commit(self, repo: str, revision: str) -> str | None:
        """Commit (40 hexadecimal digits) of a branch, a tag or a commit."""
        commits = {name: hashlib.sha1(f"{repo}@{name}".encode()).hexdigest() for name in self.revisions[repo]}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def folder(self, repo: str, commit: str) -> Path:
        return next(folder for name, folder in self.revisions[repo].items() if self.commit(repo, name) == commit)


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    """Serve it on a port of this machine."""

    class Handler(_Handler):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.holds = ""
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: Any = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.of.asked.append((self.command, path, self.headers.get("Range", "")))
        if (found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", path)) is not None:
            if "Authorization" in self.headers:
                self._refuse(400, "TwoWaysToSign")
            else:
                self._file(*found.groups(), is_signed=True)
            return
        for pattern, method in (
            (r"/api/models/([^/]+/[^/]+)/revision/(.+)", self._info),
            (r"/api/models/([^/]+/[^/]+)/tree/(.+)", self._tree),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._file),
        ):
            if (found := re.fullmatch(pattern, path)) is not None:
                repo, revision, *rest = found.groups()
                has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                if repo not in self.of.revisions or (repo in self.of.private and not has_token):
                    self._refuse(401 if not has_token else 404, "RepoNotFound")
                elif (commit := self.of.commit(repo, revision)) is None:
                    self._refuse(404, "RevisionNotFound")
                else:
                    method(repo, commit, *rest)
                return
        self._refuse(404, "EntryNotFound")

    def _info(self, repo: str, commit: str) -> None:
        names = [{"rfilename": file.name} for file in sorted(self.of.folder(repo, commit).iterdir())]
        self._answer(200, {"id": repo, "modelId": repo, "sha": commit, "siblings": names, "tags": [], "private": False})

    def _tree(self, repo: str, commit: str) -> None:
        folder = self.of.folder(repo, commit)
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        entries = [
            {"type": "file", "oid": self._etag(f), "size": f.stat().st_size, "path": str(f.relative_to(folder))} for f in files
        ]
        self._answer(200, entries)

    def _file(self, repo: str, commit: str, name: str, *, is_signed: bool = False) -> None:
        file = self.of.folder(repo, commit) / name
        if not file.is_file():
            self._refuse(404, "EntryNotFound")
            return
        content = file.read_bytes() if name != self.of.serves_wrong else bytes(file.stat().st_size)
        headers = {"ETag": f'"{self._etag(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.of.has_cdn and _is_large(file) and not is_signed:
            linked = {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit}
            elsewhere = self.of.url.replace("127.0.0.1", "localhost")
            self._answer(302, Location=f"{elsewhere}/cdn/{repo}/{commit}/{name}?signed", **linked)
            return
        begin = int(found[1]) if (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if self.of.holds == name and self.command == "GET":
            threading.Event().wait(60)  # the test ends whoever asks
            return
        for fault in (self.of.cuts, self.of.stands, self.of.resets):
            if fault is None or fault[0] != name or self.command != "GET":
                continue
            self.send_response(200)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content[: fault[1]])
            if fault is self.of.stands:
                threading.Event().wait(60)  # the test ends whoever asks
            if fault is self.of.resets:
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            self.of.cuts = self.of.stands = self.of.resets = None
            self.close_connection = True
            return
        self._answer(206 if begin else 200, content[begin:], **headers)

    def _etag(self, file: Path) -> str:
        """SHA-256 of large files, as the Hub has it, and another hash of all others."""
        is_known = self.of.knows_hashes and _is_large(file)
        return (hashlib.sha256 if is_known else hashlib.sha1)(file.read_bytes()).hexdigest()

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = self._chunks()
        self.of.asked.append(("POST", path, ""))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "Unauthorized")
        elif path == "/api/repos/create":
            asked = json.loads(content)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            is_private = asked.get("private") or asked.get("visibility") == "private"
            self.of.pushed.setdefault(repo, {})["private"] = str(is_private).encode()
            self._answer(200, {"url": f"{self.of.url}/{repo}"})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif (found := re.fullmatch(r"/api/models/(.+)/preupload/main", path)) is not None:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(content)["files"]]
            self._answer(200, {"files": files})
        elif (found := re.fullmatch(r"/api/models/(.+)/commit/main", path)) is not None:
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    self.of.pushed[found[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(200, {"commitUrl": f"{self.of.url}/{found[1]}/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True})
        else:
            self._refuse(404, "EntryNotFound")

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content


def _is_large(file: Path) -> bool:
    return file.suffix in (".safetensors", ".gguf", ".bin")
