"""LangSmith's side of the SDK's upload: takes `POST /runs/multipart` and puts the runs together again, as an export would hold them."""

from __future__ import annotations

import email
import email.policy
import json
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class LangSmith:
    """`with LangSmith() as service: Client(api_url=service.url, api_key="x")`; `runs` is what came, by run id."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        app = Starlette(routes=[Route("/info", self._info), Route("/runs/multipart", self._multipart, methods=["POST"])])
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
