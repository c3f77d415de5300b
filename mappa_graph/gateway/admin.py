"""Publishing into a gateway that runs in another process: the paths under `/admin`, and the client that speaks to them.

A deployment leaves its address and a key of its own in `control.json`, readable by its owner only, for as long as it runs. The one thing
to know: the key opens `/admin` alone; clients' API keys don't, and without the key every path there answers 401.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import GatewayError, MappaError
from .deployment import Deployment, write_aside
from .engine import RequestRefused

CONTROL = "control.json"
KEY_VARIABLE = "MAPPA_ADMIN_KEY"
"""Names the key of a deployment on another machine, which is given by its address."""


class Admin:
    """Serves `/admin/...` of one deployment. `routes` go to the gateway; `deployment` is set once that runs."""

    def __init__(self, key: str | None = None) -> None:
        self.key = key or os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(24)
        self.deployment: Deployment | None = None
        self._lock = asyncio.Lock()

    def routes(self) -> list[Route]:
        posted: dict[str, Callable[[Deployment, dict[str, Any]], Awaitable[Any]]] = {
            "publish": _publish,
            "promote": lambda d, body: d.promote(_policy(body)),
            "rollback": lambda d, body: d.rollback(_policy(body)),
        }
        made = [Route(f"/admin/{name}", self._posted(act), methods=["POST"]) for name, act in posted.items()]
        return [*made, Route("/admin/status", self._status, methods=["GET"])]

    def _posted(self, act: Callable[[Deployment, dict[str, Any]], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            deployment = self._admitted(request)
            try:
                body = await request.json()
            except (ValueError, RecursionError) as error:
                raise RequestRefused(f"the body is not JSON: {type(error).__name__}") from error
            if not isinstance(body, dict):
                raise RequestRefused(f"the body is a {type(body).__name__}, not an object")
            try:
                async with self._lock:  # one change after another, so that the history is a line
                    done = await act(deployment, body)
            except RequestRefused:
                raise
            except MappaError as error:
                raise RequestRefused(str(error), status=409, code=error.kind, type=f"{error.kind}_error") from error
            return JSONResponse({"release": None if done is None else asdict(done)})

        return answer

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self._admitted(request).status())

    def _admitted(self, request: Request) -> Deployment:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
            raise RequestRefused("the admin key is missing or wrong", status=401, code="invalid_api_key", type="authentication_error")
        if self.deployment is None:
            raise RequestRefused("the deployment is starting; try again soon", status=503, code="starting", type="server_error")
        return self.deployment

    @contextmanager
    def announced(self, folder: Path, url: str) -> Iterator[None]:
        """Leaves address and key in the folder while this is open."""
        path = folder / CONTROL
        write_aside(path, json.dumps({"url": url.removesuffix("/v1"), "key": self.key, "pid": os.getpid()}), mode=0o600)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds a deployment's folder. Raises `GatewayError` where another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".serving").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise GatewayError(f"another deployment runs in {folder}", hint="end it, or give another folder: --run FOLDER") from error
        yield


async def _publish(deployment: Deployment, body: dict[str, Any]) -> Any:
    weights, share, source = body.get("weights"), body.get("share", 1.0), body.get("source", "")
    if not isinstance(weights, str) or not weights:
        raise RequestRefused(f"weights is {weights!r}; give the path of a folder", param="weights")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise RequestRefused(f"share is {share!r}; give a number above 0 and at most 1", param="share")
    if not isinstance(source, str):
        raise RequestRefused(f"source is {source!r}; give a text", param="source")
    return await deployment.publish(_policy(body), Path(weights), share=float(share), source=source)


def _policy(body: dict[str, Any]) -> str:
    policy = body.get("policy")
    if not isinstance(policy, str):
        raise RequestRefused(f"policy is {policy!r}; give its name", param="policy")
    return policy


class Control:
    """Speaks to a running deployment.

    Args:
        where: the deployment's folder, or its address (`http://host:port`; the key is then taken from MAPPA_ADMIN_KEY).
        timeout_s: for one request; loading large weights takes its time.

    Raises `GatewayError` where none runs, the key is wrong, or the deployment refuses.
    """

    def __init__(self, where: Path | str, *, timeout_s: float = 600.0) -> None:
        self.url, key = _address(where)
        self._client = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def status(self) -> dict[str, Any]:
        """See `Deployment.status`."""
        return self._send("GET", "/admin/status")

    def publish(self, policy: str, weights: Path, *, share: float = 1.0, source: str = "") -> dict[str, Any]:
        """Serves the weights in a folder; returns the release."""
        body = {"policy": policy, "weights": str(weights.resolve()), "share": share, "source": source}
        release: dict[str, Any] = self._send("POST", "/admin/publish", body)["release"]
        return release

    def promote(self, policy: str) -> dict[str, Any]:
        """Gives all calls to the version on trial; returns its release."""
        release: dict[str, Any] = self._send("POST", "/admin/promote", {"policy": policy})["release"]
        return release

    def rollback(self, policy: str) -> dict[str, Any] | None:
        """Goes back; returns the release that serves now, None where it was a trial that ended."""
        release: dict[str, Any] | None = self._send("POST", "/admin/rollback", {"policy": policy})["release"]
        return release

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = self._client.request(method, path, json=body)
            data = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            raise GatewayError(
                f"the deployment at {self.url} does not answer: {type(error).__name__}: {error}", hint="is `mappa-graph serve` running?"
            ) from error
        if reply.status_code != 200:
            told = data.get("error") if isinstance(data, dict) else None
            raise GatewayError(f"the deployment at {self.url} refused: {(told or {}).get('message', reply.text[:500])}")
        return dict(data)


def _address(where: Path | str) -> tuple[str, str]:
    if str(where).startswith(("http://", "https://")):
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise GatewayError(f"the deployment at {where} needs its key", hint=f"set the environment variable {KEY_VARIABLE}")
        return str(where).rstrip("/").removesuffix("/v1"), key
    path = Path(where) / CONTROL
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        os.kill(int(data["pid"]), 0)  # a file that a crash left behind must not send its key to whoever has the port now
        return str(data["url"]), str(data["key"])
    except ProcessLookupError:
        raise GatewayError(f"the deployment in {where} has ended without a word", hint="start it again: mappa-graph serve CONFIG") from None
    except FileNotFoundError:
        raise GatewayError(f"no deployment runs in {where}", hint="start one: mappa-graph serve CONFIG --run FOLDER") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GatewayError(f"{path} can't be read: {type(error).__name__}", hint="start the deployment again") from error


def running(root: Path = Path("runs")) -> list[Path]:
    """Folders under `root` in which a deployment runs, by their process."""
    found = []
    for path in sorted(root.glob(f"*/{CONTROL}")):
        try:
            os.kill(int(json.loads(path.read_text(encoding="utf-8"))["pid"]), 0)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append(path.parent)
    return found
