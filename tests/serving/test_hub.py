"""Uploads, to a stand-in of the hub's HTTP API on this machine."""

import base64
import http.server
import json
import re
import threading

import pytest

from empax.core.config import ConfigError
from empax.serving import hub


class Hub(http.server.BaseHTTPRequestHandler):
    """What a repository needs for `create_repo` and `upload_folder`; whoever has no token is refused."""

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != "Bearer mine":
            return self.answer({"error": "Invalid username or password."}, 401)
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            address = f"http://127.0.0.1:{self.server.server_port}/me/talker"
            return self.answer({"url": address, "name": "me/talker", "id": "1"})
        if path == "/api/models/me/talker/preupload/main":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if path == "/api/models/me/talker/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"http://127.0.0.1:{self.server.server_port}/me/talker/commit/{'0' * 40}"
            return self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": address, "hookOutput": ""})
        return self.answer({})

    def answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as found:
        found.asked, found.made, found.files = [], [], {}
        threading.Thread(target=found.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{found.server_port}")
        monkeypatch.setenv("HF_TOKEN", "mine")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield found
        found.shutdown()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# Talker\n")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_folder_arrives_file_by_file_in_a_private_repository(server, folder):
    address = hub.push(folder, "talker")
    assert address.endswith("/me/talker")
    assert server.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    ((made),) = server.made
    assert made["name"] == "talker"
    assert made.get("private") is True or made.get("visibility") == "private"


def test_who_may_not_write_is_told_so_and_keeps_the_folder(server, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "another")
    with pytest.raises(ConfigError, match=r"--push=me/talker: .*Log in with `hf auth login` or set HF_TOKEN"):
        hub.push(folder, "me/talker")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=re.escape(f"The exported files stay in {folder}")):
        hub.push(folder, "me/talker")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "mine")
    assert hub.push(folder, "me/talker")


def test_a_wrong_name_is_refused_before_anything_is_written():
    hub.check_name("me/talker")
    with pytest.raises(
        ConfigError, match=r"--push=me/my/talker is not the name of a repository .*; write --push=USER/NAME"
    ):
        hub.check_name("me/my/talker")
