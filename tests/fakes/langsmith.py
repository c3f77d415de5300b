"""LangSmith's side of the SDK: takes `POST /runs/multipart` and puts the runs together again; and answers what an import asks.

It speaks the endpoints that the real SDK calls: `/sessions`, `/runs/query` with pages and cursors and a part of the filter language,
`/runs/{id}`, and `/feedback` (create, change, list). `refuse` holds answers to give instead, by path: `(429, {"Retry-After": "0"})`.
"""

from __future__ import annotations

import email
import email.policy
import json
import re
import threading
from collections import Counter, deque
from datetime import datetime
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

_TIME = "2026-01-01T00:00:00+00:00"


class LangSmith:
    """`with LangSmith() as service: Client(api_url=service.url, api_key="x")`; `runs` is what came, by run id.

    `feedback` is what there is, by id; `page` how many runs a page has; `asked` counts requests by path; `keys` are the API keys seen.
    """

    def __init__(self, page: int = 100) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.feedback: dict[str, dict[str, Any]] = {}
        self.page = page
        self.refuse: dict[str, deque[tuple[int, dict[str, str]]]] = {}
        self.asked: Counter[str] = Counter()
        self.keys: set[str] = set()
        routes = [
            Route("/info", self._info),
            Route("/runs/multipart", self._multipart, methods=["POST"]),
            Route("/sessions", self._sessions),
            Route("/runs/query", self._query, methods=["POST"]),
            Route("/runs/{id}", self._run),
            Route("/feedback", self._feedback, methods=["GET", "POST"]),
            Route("/feedback/{id}", self._change, methods=["PATCH"]),
        ]
        app = Starlette(routes=routes)
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> LangSmith:
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def say(self, run: str, key: str, score: Any = None, *, value: Any = None, comment: str | None = None, source: str = "app") -> str:
        """A person, or a model, says something of a run."""
        id = str(uuid4())
        self.feedback[id] = {
            "id": id, "run_id": run, "trace_id": self.runs[run]["trace_id"], "key": key, "score": score, "value": value, "comment": comment,
            "feedback_source": {"type": source, "metadata": {}}, "created_at": _TIME, "modified_at": _TIME,
        }  # fmt: skip
        return id

    def _refused(self, path: str, request: Request) -> Response | None:
        self.asked[path] += 1
        self.keys.add(request.headers.get("x-api-key", ""))
        waiting = self.refuse.get(path)
        if not waiting:
            return None
        status, headers = waiting.popleft()
        return JSONResponse({"detail": "not now"}, status, headers)

    async def _info(self, _: Request) -> Response:
        ingest = {
            "use_multipart_endpoint": True, "scale_up_qsize_trigger": 1000, "scale_up_nthreads_limit": 16,
            "scale_down_nempty_trigger": 4, "size_limit": 100, "size_limit_bytes": 20_971_520,
        }  # fmt: skip
        return JSONResponse({"version": "1", "batch_ingest_config": ingest, "instance_flags": {}})

    async def _multipart(self, request: Request) -> Response:
        raw = b"content-type: " + request.headers["content-type"].encode() + b"\r\n\r\n" + await request.body()
        for part in email.message_from_bytes(raw, policy=email.policy.HTTP).iter_parts():  # type: ignore[attr-defined]
            _, id, *field = str(part.get_param("name", header="content-disposition")).split(".")
            value = json.loads(part.get_payload(decode=True))
            run = self.runs.setdefault(id, {})
            if field:
                run[field[0]] = value
            else:
                run.update(value)
        return Response(status_code=202)

    # -- what an import asks

    @staticmethod
    def session(name: str) -> str:
        return str(uuid5(NAMESPACE_URL, name))

    async def _sessions(self, request: Request) -> Response:
        refused = self._refused("/sessions", request)
        if refused is not None:
            return refused
        name = request.query_params.get("name")
        found = sorted({r["session_name"] for r in self.runs.values() if name in (None, r["session_name"])})
        return JSONResponse(
            [
                {"id": self.session(n), "name": n, "tenant_id": str(UUID(int=1)), "start_time": _TIME, "reference_dataset_id": None}
                for n in found
            ]
        )

    async def _query(self, request: Request) -> Response:
        refused = self._refused("/runs/query", request)
        if refused is not None:
            return refused
        body = await request.json()
        found = [r for r in self.runs.values() if self.session(r["session_name"]) in body["session"]]
        if body.get("start_time"):
            found = [r for r in found if _at(r["start_time"]) >= _at(body["start_time"])]
        if body.get("filter"):
            found = [r for r in found if self._holds(body["filter"], r)]
        if body.get("trace_filter"):
            found = [r for r in found if self._holds(body["trace_filter"], self.runs[r["trace_id"]])]
        found.sort(key=lambda r: (r["start_time"], r["id"]), reverse=True)
        begin = int(body.get("cursor") or 0)
        shown = found[begin : begin + self.page]
        end = begin + len(shown)
        runs = [{k: v for k, v in self._shown(r).items() if k in body["select"]} for r in shown]
        return JSONResponse({"runs": runs, "cursors": {"next": str(end) if end < len(found) else None}})

    def _shown(self, run: dict[str, Any]) -> dict[str, Any]:
        said = [f for f in self.feedback.values() if f["run_id"] == run["id"]]
        stats = {f["key"]: {"n": sum(g["key"] == f["key"] for g in said)} for f in said}
        status = "error" if run.get("error") else "success" if run.get("end_time") else "pending"
        return {**run, "session_id": self.session(run["session_name"]), "feedback_stats": stats or None, "status": status}

    async def _run(self, request: Request) -> Response:
        run = self.runs.get(request.path_params["id"])
        return JSONResponse({"detail": "not found"}, 404) if run is None else JSONResponse(self._shown(run))

    async def _feedback(self, request: Request) -> Response:
        refused = self._refused(f"{request.method} /feedback", request)
        if refused is not None:
            return refused
        if request.method == "POST":
            body = await request.json()
            if body["run_id"] not in self.runs:
                return JSONResponse({"detail": "no such run"}, 404)
            if body["id"] in self.feedback:
                return JSONResponse({"detail": "there is one with this id"}, 409)
            self.feedback[body["id"]] = {"created_at": _TIME, "modified_at": _TIME, "trace_id": None, **body}
            return JSONResponse(self.feedback[body["id"]])
        wanted = request.query_params.getlist("run")
        found = [f for f in self.feedback.values() if f["run_id"] in wanted]
        begin, limit = int(request.query_params.get("offset") or 0), int(request.query_params.get("limit") or 100)
        return JSONResponse(found[begin : begin + limit])

    async def _change(self, request: Request) -> Response:
        refused = self._refused("PATCH /feedback", request)
        if refused is not None:
            return refused
        known = self.feedback.get(request.path_params["id"])
        if known is None:
            return JSONResponse({"detail": "not found"}, 404)
        known.update(await request.json())
        return JSONResponse(known)

    def _holds(self, text: str, run: dict[str, Any]) -> bool:
        """A part of the filter language: and, or, eq, gte, lte over start_time, name, feedback_key and feedback_score."""
        name, given = _call(text)
        if name in ("and", "or"):
            return (all if name == "and" else any)(self._holds(one, run) for one in given)
        field, wanted = given[0], json.loads(given[1])
        if field.startswith("feedback_"):
            said = [f[field.removeprefix("feedback_")] for f in self.feedback.values() if f["run_id"] == run["id"]]
            return any(_compare(name, one, wanted) for one in said)
        value = run[field]
        return _compare(name, _at(value), _at(wanted)) if field == "start_time" else _compare(name, value, wanted)


def _at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _compare(name: str, value: Any, wanted: Any) -> bool:
    return bool({"eq": lambda: value == wanted, "gte": lambda: value >= wanted, "lte": lambda: value <= wanted}[name]())


def _call(text: str) -> tuple[str, list[str]]:
    """`and(a(x), b(y))` as its name and the texts of its arguments."""
    match = re.fullmatch(r"(\w+)\((.*)\)", text.strip(), re.DOTALL)
    assert match is not None, f"no filter: {text!r}"
    parts, depth, quoted, part = [], 0, False, ""
    for char in match.group(2):
        quoted ^= char == '"'
        depth += 0 if quoted else (char == "(") - (char == ")")
        if char == "," and not depth and not quoted:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return match.group(1), [*parts, part.strip()]
