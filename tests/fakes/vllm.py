"""A stand-in for vLLM's interpreter: a script that answers like vLLM's API server as far as starting, watching and swapping go.

It has no model and needs no vLLM, so that what happens when servers are slow, broken, foreign or killed can be tested in
milliseconds. What it was asked is in `asked.jsonl` beside its log; a file `say` there makes it misbehave (one word; what follows
`crash` is what the next one says).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SERVER = r"""#!PYTHON
import json, os, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

args = sys.argv[1:]
if "-c" in args:
    print(json.dumps({"cpu": "0.32.0", "gpu": None, "trap": []}))
    sys.exit(0)
option = dict(zip(args, args[1:]))
here = Path.cwd()
say = (here / "say").read_text().strip() if (here / "say").exists() else ""
if say == "dies":
    print("ValueError: the model is broken", flush=True)
    sys.exit(3)
if say == "port":
    (here / "say").unlink()
    print("OSError: [Errno 98] Address already in use", flush=True)
    sys.exit(1)
if say == "hangs":
    print("still loading", flush=True)
    time.sleep(60)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(here / "worker").write_text(str(worker.pid))
key, name = os.environ["VLLM_API_KEY"], option["--served-model-name"]
state = {"paused": False, "version": "default", "adapters": [], "healthy": True}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body):
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.answer(json.loads(raw) if raw else {})

    def answer(self, body):
        path = self.path.partition("?")[0]
        with (here / "asked.jsonl").open("a") as file:
            file.write(json.dumps({"path": self.path, "body": body, "resume_after": self.headers.get("x-mappa-resume-after")}) + "\n")
        if path == "/health":
            return self.reply(200 if state["healthy"] else 503, {})
        if self.headers.get("authorization") != "Bearer " + key:
            return self.reply(401, {"error": "Unauthorized"})
        say = (here / "say").read_text().strip() if (here / "say").exists() else ""
        if path == "/v1/models":
            cards = [{"id": name, "parent": None, "max_model_len": 128}] + [{"id": a, "parent": name} for a in state["adapters"]]
            return self.reply(200, {"data": cards})
        if path == "/openapi.json":
            return self.reply(200, {"paths": {p: {} for p in ("/v1/load_lora_adapter", "/update_weights")}})
        if path == "/version":
            return self.reply(200, {"version": "0.32.0"})
        if path == "/v1/completions":
            span = 1.0 if say == "raw" else 1.0 / body["temperature"]
            top = {"token_id:%d" % i: -span * i for i in range(10)}
            choice = {"index": 0, "text": "x", "token_ids": [1], "prompt_token_ids": [1, 2, 3], "logprobs": {"top_logprobs": [top]}}
            return self.reply(200, {"choices": [choice]})
        if path == "/v1/chat/completions":
            if say.startswith("crash"):
                (here / "say").write_text(say.removeprefix("crash").strip())
                os._exit(9)
            if say in ("sick", "late"):
                threading.Timer(0.2 if say == "late" else 0.0, state.update, [{"healthy": False}]).start()
                (here / "say").unlink()
                return self.reply(500, {"error": {"message": "EngineCore encountered an issue"}})
            entry = {"token": "x", "logprob": -1.0, "top_logprobs": []}
            message = {"role": "assistant", "content": body["model"]}
            choice = {"index": 0, "message": message, "token_ids": [5], "logprobs": {"content": [entry]}, "finish_reason": "stop"}
            return self.reply(200, {"choices": [choice], "prompt_token_ids": [1]})
        if path == "/v1/load_lora_adapter":
            state["adapters"].append(body["lora_name"])
            return self.reply(200, {})
        if path == "/v1/unload_lora_adapter":
            state["adapters"].remove(body["lora_name"])
            return self.reply(200, {})
        if path == "/pause":
            state["paused"] = True
        if path == "/resume" and say != "stuck":
            state["paused"] = False
        if path == "/is_paused":
            return self.reply(200, {"is_paused": state["paused"]})
        while path == "/update_weights" and say == "slow" and (here / "say").exists():
            time.sleep(0.01)
        if path == "/update_weights" and say == "breaks":
            return self.reply(500, {"error": {"message": "Worker failed with error 'out of memory', please check the stack trace above"}})
        if path in ("/finish_weight_update", "/update_weight_version"):
            state["version"] = body.get("weight_version") or body.get("new_version") or state["version"]
        if path == "/weight_info":
            return self.reply(200, {"weight_version": "other@v9" if say == "liar" else state["version"]})
        self.reply(200, {})


ThreadingHTTPServer(("127.0.0.1", int(option["--port"])), Handler).serve_forever()
"""


def make_interpreter(folder: Path) -> Path:
    """Writes the script into `folder`."""
    path = folder / "python"
    path.write_text(SERVER.replace("PYTHON", sys.executable, 1), encoding="utf-8")
    path.chmod(0o755)
    return path


def asked(folder: Path) -> list[dict[str, object]]:
    """What the servers whose logs are in `folder` were asked, in order."""
    path = folder / "asked.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
