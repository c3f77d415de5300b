"""What is said to a vLLM server beside completions: is it ours, what can it do, take these weights, score these tokens.

The one thing to know: `swap` never leaves a server paused. It resumes in any case, again and again until the server says that it runs, also
when the publish is cancelled; and the pause itself carries a deadline, after which the guard inside the server resumes on its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ...errors import EngineError

log = logging.getLogger("mappa_graph.gateway.vllm")
PAUSE_LIMIT_S = 300.0
"""After that long a server resumes by itself, whatever became of who paused it."""
REFUSED = "refused before anything was loaded"
"""What our weight-transfer engine says of weights that left the model as it was."""
_RESUME_TRIES = 8


class ServerDown(EngineError):
    """The server can't be reached, or broke off."""


class Unusable(EngineError):
    """The server holds the weights of no version: it must not go on."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server was found to do."""

    version: str
    max_model_len: int
    token_ids: bool
    """Whether replies carry the sampled ids."""
    processed_logprobs: bool
    """Whether log-probs are those of the distribution that was sampled from."""
    lora: bool
    """Whether adapters can be loaded while it runs."""
    weights: bool
    """Whether whole weights can be swapped."""
    guarded: bool
    """Whether it resumes by itself after a pause that was forgotten."""


class Control:
    """The control plane of one server; belongs to the event loop that it is used on.

    Args:
        url: the server's address without `/v1`.
        key: its API key.
        timeout_s: longest wait for an answer.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self.url = url
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        # A connection for each request: vLLM closes one on which something failed, and the next request would find it closed.
        limits = httpx.Limits(max_connections=32, max_keepalive_connections=0)
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        self._client = httpx.AsyncClient(base_url=url, headers=self.headers, timeout=timeout, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return await self._ask("GET", path, None, {}, timeout_s)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Any:
        return await self._ask("POST", path, body, headers or {}, timeout_s)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], timeout_s: float | None
    ) -> Any:
        options: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
        try:
            reply = await self._client.request(method, path, json=body, headers=dict(headers), **options)
        except httpx.TransportError as error:
            raise ServerDown(f"{self.url} can't be reached: {type(error).__name__} {error}".rstrip()) from error
        if reply.status_code != 200:
            raise EngineError(f"{self.url}{path.partition('?')[0]} answered {reply.status_code}: {_told(reply)}")
        try:
            return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else reply.text
        except ValueError as error:
            raise EngineError(f"{self.url}{path} answered with something that is no JSON: {error}") from error

    async def healthy(self, timeout_s: float = 10.0) -> bool | None:
        """False: it says that it is broken. None: it did not answer."""
        try:
            reply = await self._client.get("/health", timeout=timeout_s)
        except httpx.TransportError:
            return None
        return reply.status_code == 200

    async def models(self) -> list[Mapping[str, Any]]:
        """The models that it lists, its base first. Raises `EngineError` for a server of another kind."""
        listed = await self.get("/v1/models", timeout_s=10.0)
        try:
            cards = [card for card in listed["data"] if isinstance(card["id"], str)]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.url} does not list its models", hint="is it a vLLM server?") from error
        return sorted(cards, key=lambda card: card.get("parent") is not None)

    async def probe(self, name: str, max_model_len: int) -> Capabilities:
        """Finds out what the server can do, with two short completions of the model `name`."""
        described = await self.get("/openapi.json")
        paths = described.get("paths", {}) if isinstance(described, dict) else {}
        version = str((await self.get("/version")).get("version", "unknown"))
        body = {
            "model": name, "prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 10, "seed": 0, "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        spans = []
        made: Any = {}
        for temperature in (1.0, 0.5):
            made = (await self.post("/v1/completions", {**body, "temperature": temperature}))["choices"][0]
            top = sorted((made["logprobs"]["top_logprobs"] or [{}])[0].values(), reverse=True)[:10]
            spans.append(top[0] - top[-1] if top else math.nan)
        return Capabilities(
            version=version,
            max_model_len=max_model_len,
            token_ids=bool(made.get("token_ids")) and bool(made.get("prompt_token_ids")),
            # Halving the temperature doubles every difference between log-probs that were sampled from, and none between raw ones.
            processed_logprobs=abs(spans[1] - 2 * spans[0]) < abs(spans[1] - spans[0]),
            lora="/v1/load_lora_adapter" in paths,
            weights="/update_weights" in paths,
            guarded=await self._guarded(),
        )

    async def _guarded(self) -> bool:
        """Whether every path asks for the key, which is the guard's doing."""
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=10.0, trust_env=False) as stranger:
                return (await stranger.get("/version")).status_code == 401
        except httpx.TransportError as error:
            raise ServerDown(f"{self.url} can't be reached: {error}") from error

    async def swap(self, label: str, transfer: Callable[[], Awaitable[None]], committed: Callable[[], None]) -> None:
        """Stops the engine between two steps, runs `transfer`, and goes on; running completions are kept and go on with the new weights.

        What was cached of the old weights is dropped, and running completions' keys and values are computed again, so that each token's
        log-prob is that of one version. `committed` is called while nothing runs, once the server has said that it holds `label`.

        Raises `EngineError`; the server runs then too, unless it is a `ServerDown` or `Unusable`.
        """
        usable = True
        limit = {"x-mappa-resume-after": f"{PAUSE_LIMIT_S:g}"}
        try:
            await self.post("/pause?mode=keep&clear_cache=true", headers=limit)
            await transfer()
            await self.check_version(label)
            committed()
        except Unusable:
            usable = False
            raise
        finally:
            if usable:
                await uncancelled(self.resume())

    async def resume(self) -> None:
        """Until the server says that it runs. Raises `ServerDown` where it does not."""
        for attempt in range(_RESUME_TRIES):
            try:
                await self.post("/resume", timeout_s=30.0)
                if not (await self.get("/is_paused", timeout_s=30.0))["is_paused"]:
                    return
            except EngineError as error:
                log.warning("resuming %s failed, try %d: %s", self.url, attempt + 1, error)
            await asyncio.sleep(min(2.0, 0.1 * 2**attempt))
        raise ServerDown(f"{self.url} does not resume after a pause")

    async def take_folder(self, folder: Path, files: Mapping[str, str], label: str) -> None:
        """The weights of a folder that the server sees under the same path. Part of a `swap`."""
        await self.start_update()
        await self.post("/update_weights", folder_body(folder, files))
        await self.post("/finish_weight_update", {"weight_version": label})

    async def start_update(self) -> None:
        """Begins an update; one that somebody began and left is ended first (it had changed nothing yet, or said that it had)."""
        try:
            await self.post("/start_weight_update")
        except ServerDown:
            raise
        except EngineError as error:
            log.warning("an update was under way at %s: %s", self.url, error)
            await self.post("/finish_weight_update")
            await self.post("/start_weight_update")

    async def check_version(self, label: str) -> None:
        """Raises `EngineError` unless the server says that it holds that version."""
        told = (await self.get("/weight_info"))["weight_version"]
        if told != label:
            raise EngineError(f"{self.url} says that it holds {told!r}, {label!r} was published")

    async def steps(self) -> int:
        """How many steps the engine has made."""
        for line in str(await self.get("/metrics")).splitlines():
            if line.startswith("vllm:iteration_tokens_total_count"):
                return int(float(line.rpartition(" ")[2]))
        raise EngineError(f"{self.url} does not count its steps")

    async def score(
        self, name: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float, *, one_pass: bool = True
    ) -> list[float]:
        """Log-prob of each completion id under `softmax(logits / temperature)`; at temperature 0 those of 1.

        At temperature 1 in one pass over the tokens (`prompt_logprobs`, which know no temperature), unless told that this isn't safe. At
        another one each token is what might be sampled next after those before it, and the sampler is asked for its log-prob.
        """
        if not completion_ids:
            return []
        temperature = temperature or 1.0
        if temperature == 1.0 and one_pass:
            return await self._score_pass(name, prompt_ids, completion_ids)
        prompts = [[*prompt_ids, *completion_ids[:i]] for i in range(len(completion_ids))]
        body = {
            "model": name, "prompt": prompts, "max_tokens": 1, "temperature": temperature, "top_p": 1.0, "logprobs": 1,
            "logprob_token_ids": sorted(set(completion_ids)), "return_tokens_as_token_ids": True,
        }  # fmt: skip
        made = await self.post("/v1/completions", body)
        try:
            rows = [choice["logprobs"]["top_logprobs"][0] for choice in sorted(made["choices"], key=lambda c: c["index"])]
            return [float(row[f"token_id:{token}"]) for row, token in zip(rows, completion_ids, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url} gave no log-probs of chosen tokens at temperature {temperature:g}", hint="use temperature 1"
            ) from error

    async def _score_pass(self, name: str, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        ids = [*prompt_ids, *completion_ids]
        made = await self.post("/v1/completions", {"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0})
        try:
            rows = made["choices"][0]["prompt_logprobs"]
            return [float(rows[i][str(ids[i])]["logprob"]) for i in range(len(prompt_ids), len(ids))]
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self.url} gave no prompt_logprobs", hint="a canary needs a vLLM server") from error


def _told(reply: httpx.Response) -> str:
    """What an error reply says, without the wrapping."""
    try:
        told = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:600]
    found = re.search(r"Worker failed with error '(.*)', please check the stack trace", told, re.DOTALL)
    return (found[1] if found else told)[:600]


def folder_body(folder: Path, files: Mapping[str, str]) -> dict[str, Any]:
    """The body of `/update_weights` for our backend: the folder, and the checksum that each of its files must have."""
    return {"update_info": {"folder": str(folder), "files": dict(files)}}


async def uncancelled(work: Awaitable[None]) -> None:
    """Awaits to the end, whoever cancels; the cancellation is raised behind it."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
            if task.cancelled():
                raise
        except EngineError:
            break
    if cancelled:
        if (error := task.exception()) is not None:
            log.error("%s", error)
        raise asyncio.CancelledError
    task.result()
