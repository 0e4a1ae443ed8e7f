"""A stand-in for the Hugging Face hub on this machine: models to fetch, and uploads to look at."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.forkserver import server

SHA = "a" * 40
TOKEN = "hf_good"


class Hub(ThreadingHTTPServer):
    """The server; `models` are folders by name, `asked` all requests, `commits` the uploads."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, models: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.asked = models, list[str]()
        self.commits: list[dict[str, Any]] = []

    def run(self, *words: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command of megasink that knows no other hub."""
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HOME": str(cwd / "hf")}
        drop = ("HF_HUB_OFFLINE", "HF_TOKEN")
        outer = {name: value for name, value in os.environ.items() if name not in drop}
        argv = ["tests.hub_command", *map(str, words), "--device", "cpu"]
        return server().run(argv, env=outer | {"OMP_NUM_THREADS": "1"} | own | env, cwd=cwd)


@contextlib.contextmanager
def serving(models: dict[str, Path]) -> Iterator[Hub]:
    with Hub(models) as hub:
        thread = Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, code: int = 200) -> None:
        self._send(code, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            good = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self._json({"name": "me", "type": "user"}, 200 if good else 401)
        if info := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/\w+)?", path):
            folder = self.server.models.get(info[1])
            if folder is None:
                return self._send(404, b"", X_Error_Code="RepoNotFound")
            names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
            siblings = [{"rfilename": name} for name in names]
            return self._json({"id": info[1], "sha": SHA, "siblings": siblings})
        if tree := re.fullmatch(rf"/api/models/([^/]+/[^/]+)/tree/{SHA}", path):
            folder = self.server.models[tree[1]]
            files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            return self._json(
                [
                    {"type": "file", "path": str(p.relative_to(folder))}
                    | {"size": p.stat().st_size, "oid": hashlib.sha1(p.read_bytes()).hexdigest()}
                    for p in files
                ]
            )
        if file := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{SHA}/(.+)", path):
            body = (self.server.models[file[1]] / file[2]).read_bytes()
            tag = f'"{hashlib.sha1(body).hexdigest()}"'
            return self._send(200, body, X_Repo_Commit=SHA, ETag=tag)
        return self._send(404, b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = f"http://127.0.0.1:{self.server.server_port}/me/exported"
        if self.path == "/api/repos/create":
            return self._json({"url": url, "id": "me/exported", "name": "me/exported"})
        if self.path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            names = [entry["path"] for entry in json.loads(body)["files"]]
            made = {"uploadMode": "regular", "shouldIgnore": False}
            return self._json({"files": [{"path": name} | made for name in names]})
        if "/commit/" in self.path:
            self.server.commits += map(json.loads, body.splitlines())
            return self._json({"commitUrl": f"{url}/commit/{SHA}", "commitOid": SHA})
        return self._send(404, b"")
