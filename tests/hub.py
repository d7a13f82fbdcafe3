"""A small Hub on the loopback interface, for tests: the endpoints `huggingface_hub` calls to create
a repository, upload to it and download from it. Small files go inside the commit, safetensors by
LFS, as on the real one; Xet is not spoken.

    with FakeHub() as hub:
        subprocess.run(..., env={**os.environ, **hub.environment(tmp_path)})
        hub.repositories["me/net"]["config.json"]
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_" + "x" * 34
COMMIT = "c0ffee" + "0" * 34
USER = "me"


class FakeHub:
    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}  # LFS, by SHA-256
        self.commits: list[list[str]] = []  # the files of each
        self.requests: list[str] = []
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def add(self, name: str, files: dict[str, bytes]) -> None:
        """A public repository that somebody else filled."""
        self.repositories[name], self.private[name] = dict(files), False

    def environment(self, home: Path, token: str = TOKEN) -> dict[str, str]:
        """Settings for a subprocess that talks to this Hub alone, with a Hugging Face home of its
        own.
        """
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "*",
            "no_proxy": "*",
        }


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        path, body = self._begin()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid credentials in Authorization header"}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            self._preupload(match[1], json.loads(body))
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif path == "/lfs/verify":
            wanted = json.loads(body)
            stored = self.hub.objects.get(wanted["oid"], b"")
            self._json({}, 200 if len(stored) == wanted["size"] else 404)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._json({"error": f"unknown endpoint {path}"}, 404)

    def do_PUT(self) -> None:
        path, body = self._begin()
        oid = path.removeprefix("/lfs/objects/")
        if hashlib.sha256(body).hexdigest() == oid:  # signed addresses carry no token
            self.hub.objects[oid] = body
            self._send(200, b"")
        else:
            self._send(400, b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _ = self._begin()
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            self._info(match[1])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            self._tree(match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._resolve(match[1], match[2])
        elif path == "/api/whoami-v2":
            self._json({"type": "user", "name": USER, "orgs": []})
        else:
            self._json({"error": f"unknown endpoint {path}"}, 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        url = {"url": f"{self.hub.endpoint}/{name}", "name": name}
        if name in self.hub.repositories:
            self._json({**url, "error": "You already created this model repo"}, 409)
        else:
            self.hub.repositories[name] = {}
            self.hub.private[name] = wanted.get("visibility") == "private" or wanted.get(
                "private", False
            )
            self._json(url)

    def _preupload(self, name: str, wanted: dict[str, Any]) -> None:
        if name not in self.hub.repositories:
            self._missing()
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in wanted["files"]
        ]
        self._json({"files": files})

    def _batch(self, wanted: dict[str, Any]) -> None:
        answers = []
        for item in wanted["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                upload = {"href": f"{self.hub.endpoint}/lfs/objects/{item['oid']}"}
                answer["actions"] = {
                    "upload": upload,
                    "verify": {"href": f"{self.hub.endpoint}/lfs/verify"},
                }
            answers.append(answer)
        self._json({"transfer": "basic", "objects": answers})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        changed = []
        for line in lines[1:]:  # the first is the message
            value = line["value"]
            content = (
                base64.b64decode(value["content"])
                if line["key"] == "file"
                else self.hub.objects[value["oid"]]
            )
            self.hub.repositories[name][value["path"]] = content
            changed.append(value["path"])
        self.hub.commits.append(sorted(changed))
        self._json(
            {
                "success": True,
                "commitOid": COMMIT,
                "commitUrl": f"{self.hub.endpoint}/{name}/commit/{COMMIT}",
                "hookOutput": "",
            }
        )

    def _info(self, name: str) -> None:
        if name not in self.hub.repositories:
            self._missing()
            return
        siblings = [{"rfilename": file} for file in sorted(self.hub.repositories[name])]
        self._json(
            {
                "id": name,
                "modelId": name,
                "sha": COMMIT,
                "private": self.hub.private[name],
                "siblings": siblings,
            }
        )

    def _tree(self, name: str) -> None:
        if name not in self.hub.repositories:
            self._missing()
            return
        rows: list[dict[str, Any]] = []
        for file, content in sorted(self.hub.repositories[name].items()):
            row: dict[str, Any] = {
                "type": "file",
                "path": file,
                "size": len(content),
                "oid": _git_oid(content),
            }
            if file.endswith(".safetensors"):
                oid = hashlib.sha256(content).hexdigest()
                row["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
            rows.append(row)
        self._json(rows)

    def _resolve(self, name: str, file: str) -> None:
        if file not in self.hub.repositories.get(name, {}):
            self._json(
                {"error": "Entry not found"},
                404,
                {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT},
            )
            return
        content = self.hub.repositories[name][file]
        lfs = file.endswith(".safetensors")
        etag = hashlib.sha256(content).hexdigest() if lfs else _git_oid(content)
        self._send(
            200,
            content,
            {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "X-Linked-Size": str(len(content))},
        )

    def _missing(self) -> None:
        self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _begin(self) -> tuple[str, bytes]:
        path = self.path.split("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return path, body
        return path, self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(
            status,
            json.dumps(value).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
