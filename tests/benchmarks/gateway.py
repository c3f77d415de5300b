"""What the gateway adds to a call, beside calling the same upstream directly and through bare reverse proxies.

    python tests/benchmarks/gateway.py [--clients 1 16 64] [--seconds 0.8] [--rounds 5] [--stream | --whole] [--ids] [--json FILE]

The upstream answers at once, in vLLM's shape, with 512 prompt ids, 64 output ids and their log-probs. It and the load generator are
processes of their own that move prepared bytes, so that neither is what is measured. `proxy` is uvicorn, Starlette and the
gateway's own HTTP client; it passes bytes on and records nothing. `httpx-proxy` is the same with httpx. The clients ask as a stock
`ChatOpenAI` does, or with `--ids` for token ids and log-probs as well.

The one thing to know: rounds of the contestants alternate, every ratio is taken within a round, and what is printed is the median
of the rounds' ratios. `cpu_ms` is the processor time of the server's process per call, whose ratio is that of the throughputs where
one core is the limit: on a machine with other work to do, trust that one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).parents[2]
PROMPT, COMPLETION = 512, 64
LATE_S = 0.05
"""How long the upstream holds back all but the first chunk of a stream, where the time to the first one is measured."""
CONTESTANTS = ("direct", "proxy", "httpx-proxy", "gateway")
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


# -- servers


class Upstream(asyncio.Protocol):
    """Prepared bytes for each request: whole or streamed, all at once or (`"user": "late"`) the first chunk before the rest."""

    def __init__(self, whole: bytes, chunks: list[bytes]) -> None:
        self._whole = whole
        self._first, self._rest = chunks[0], b"".join(chunks[1:])
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        told = _LENGTH.search(self._buffer, 0, head)
        if len(self._buffer) < head + 4 + (int(told[1]) if told else 0):
            return
        asked, self._buffer = self._buffer, b""
        if asked.startswith(b"GET"):
            self._transport.write(_answer(b'{"data":[{"id":"served"}]}'))
        elif b'"stream":true' not in asked and b'"stream": true' not in asked:
            self._transport.write(self._whole)
        elif b'"late"' in asked:
            self._transport.write(self._first)
            asyncio.get_running_loop().call_later(LATE_S, self._transport.write, self._rest)
        else:
            self._transport.write(self._first + self._rest)


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def prepared() -> tuple[bytes, list[bytes]]:
    """vLLM's reply to a chat with `return_token_ids` and `logprobs`: whole, and as the pieces of a chunked stream."""
    ids = list(range(1000, 1000 + COMPLETION))
    entries = [{"token": " word", "logprob": -0.51171875, "bytes": [32, 119, 111, 114, 100], "top_logprobs": []} for _ in ids]
    count = {"prompt_tokens": PROMPT, "completion_tokens": COMPLETION, "total_tokens": PROMPT + COMPLETION}
    head = {"id": "chatcmpl-0f3c2f0b6f0e4d1c9a", "created": 1764450000, "model": "served"}
    message = {"role": "assistant", "content": " word" * COMPLETION, "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": {"content": entries}, "finish_reason": "stop", "token_ids": ids}
    prompt_ids = list(range(5000, 5000 + PROMPT))
    whole = {**head, "object": "chat.completion", "choices": [choice], "usage": count, "prompt_token_ids": prompt_ids}
    head["object"] = "chat.completion.chunk"
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events: list[dict[str, Any]] = [{**head, "choices": [first], "prompt_token_ids": prompt_ids}]
    for i, (id, entry) in enumerate(zip(ids, entries, strict=True)):
        end = "stop" if i == COMPLETION - 1 else None
        piece = {"index": 0, "delta": {"content": " word"}, "logprobs": {"content": [entry]}, "finish_reason": end, "token_ids": [id]}
        events.append({**head, "choices": [piece]})
    events.append({**head, "choices": [], "usage": count})
    lines = [*(b"data: %b\n\n" % json.dumps(event).encode() for event in events), b"data: [DONE]\n\n"]
    chunks = [b"%x\r\n%b\r\n" % (len(line), line) for line in lines]
    start = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return _answer(json.dumps(whole).encode()), [start + chunks[0], *chunks[1:], b"0\r\n\r\n"]


def serve_upstream(port: int) -> None:
    whole, chunks = prepared()

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Upstream(whole, chunks), "127.0.0.1", port, backlog=2048)
        await server.serve_forever()

    uvloop.run(serve())


def serve_gateway(port: int, upstream: str, folder: str) -> None:
    from mappa_graph.gateway import Gateway
    from mappa_graph.gateway.server import keep_collector_away
    from mappa_graph.gateway.upstream import UpstreamEngine
    from mappa_graph.store import TraceStore

    with TraceStore(Path(folder) / "trace.db") as store, Gateway(UpstreamEngine(upstream, {"served": "served"}), store, port=port):
        keep_collector_away()  # as `mappa-graph serve` does
        sys.stdin.read()


def serve_proxy(port: int, upstream: str) -> None:
    """Passes bytes on and records nothing, with the gateway's own libraries."""
    from mappa_graph.gateway.http import HttpClient

    client: list[HttpClient] = []

    def connected() -> HttpClient:
        if not client:
            headers = {"content-type": "application/json"}
            client.append(HttpClient(upstream, headers, timeout_s=60, connect_timeout_s=10, max_connections=1024))
        return client[0]

    async def whole(body: bytes) -> tuple[int, bytes]:
        answer = await connected().request("POST", "/chat/completions", body)
        return answer.status, answer.body

    async def pieces(body: bytes) -> Any:
        async with connected().stream("POST", "/chat/completions", body) as answer:
            async for piece in answer.pieces():
                yield piece

    _serve_starlette(port, whole, pieces)


def serve_httpx_proxy(port: int, upstream: str) -> None:
    """The same with httpx, the client that most Python proxies use."""
    import httpx

    limits = httpx.Limits(max_connections=1024, max_keepalive_connections=1024)
    client = httpx.AsyncClient(limits=limits, trust_env=False, timeout=60, headers={"content-type": "application/json"})

    async def whole(body: bytes) -> tuple[int, bytes]:
        answer = await client.post(f"{upstream}/chat/completions", content=body)
        return answer.status_code, answer.content

    async def pieces(body: bytes) -> Any:
        async with client.stream("POST", f"{upstream}/chat/completions", content=body) as answer:
            async for piece in answer.aiter_raw():
                yield piece

    _serve_starlette(port, whole, pieces)


def _serve_starlette(port: int, whole: Callable[[bytes], Any], pieces: Callable[[bytes], Any]) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def forward(request: Request) -> Response:
        body = await request.body()
        if b'"stream": true' in body:
            return StreamingResponse(pieces(body), media_type="text/event-stream")
        status, answer = await whole(body)
        return Response(answer, status, media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="warning", access_log=False, lifespan="off", backlog=2048)


# -- load


@dataclass
class Seen:
    """One round: calls a second, and per call the ms to the first byte of the body and to its end."""

    rate: float = 0.0
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    cpu: float = 0.0
    """Processor time of the server's process per call, in ms."""

    def p(self, q: float) -> float:
        ordered = sorted(self.whole)
        return ordered[min(len(ordered) - 1, int(len(ordered) * q))]


class Client(asyncio.Protocol):
    """One connection of the load generator; `then` is called when an answer is whole."""

    def __init__(self, seen: Seen, request: bytes, then: Callable[[Client], None]) -> None:
        self._seen = seen
        self._request = request
        self._then = then
        self._parts: list[bytes] = []
        self._size = 0
        self._whole = 0
        self._from = 0.0
        self._first = 0.0
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(None)

    def ask(self, due: float | None = None) -> None:
        self._parts, self._size, self._whole, self._first = [], 0, 0, 0.0
        self._from = time.perf_counter() if due is None else due
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if not self._first:
            joined = b"".join(self._parts)
            self._parts = [joined]
            head = joined.find(b"\r\n\r\n")
            if head < 0 or len(joined) <= head + 4:
                return
            assert joined.startswith(b"HTTP/1.1 200"), joined[:300]
            told = _LENGTH.search(joined, 0, head)
            self._whole = head + 4 + int(told[1]) if told else 0
            self._first = time.perf_counter()
        if self._size >= self._whole if self._whole else _ended(self._parts):
            now = time.perf_counter()
            self._seen.first.append((self._first - self._from) * 1e3)
            self._seen.whole.append((now - self._from) * 1e3)
            self._then(self)


def _ended(parts: list[bytes]) -> bool:
    last = parts[-1] if len(parts[-1]) >= 5 or len(parts) == 1 else b"".join(parts[-6:])
    return last.endswith(b"0\r\n\r\n")


def request_bytes(stream: bool, *, ids: bool = False, late: bool = False) -> bytes:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "word " * 400}], "model": "served", "stream": stream, "temperature": 1.0,
        "max_completion_tokens": COMPLETION,
    }  # fmt: skip
    if stream:
        asked["stream_options"] = {"include_usage": True}
    if ids:
        asked |= {"return_token_ids": True, "logprobs": True}
    if late:
        asked["user"] = "late"
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer none\r\naccept: application/json\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def closed(port: int, pid: int, clients: int, seconds: float, request: bytes) -> Seen:
    """Closed loop: each client asks again once it was answered."""
    seen = Seen()
    loop = asyncio.get_running_loop()
    made: list[Client] = []
    end = time.perf_counter() + seconds

    def again(client: Client) -> None:
        if time.perf_counter() < end:
            client.ask()
        else:
            client.transport.close()

    for _ in range(clients):
        made.append((await loop.create_connection(lambda: Client(seen, request, again), "127.0.0.1", port))[1])
    cpu, begun = cpu_seconds(pid), time.perf_counter()
    end = begun + seconds
    for client in made:
        client.ask()
    await asyncio.wait_for(asyncio.gather(*(client.lost for client in made)), seconds + 60)
    seen.rate = len(seen.whole) / (time.perf_counter() - begun)
    seen.cpu = (cpu_seconds(pid) - cpu) * 1e3 / len(seen.whole)
    return seen


async def paced(port: int, pid: int, rate: float, seconds: float, request: bytes) -> Seen:
    """Open loop: `rate` calls a second, whatever the answers; the time of each counts from when it was due."""
    seen = Seen()
    loop = asyncio.get_running_loop()
    free: list[Client] = []
    made: list[Client] = []
    for _ in range(32):
        made.append((await loop.create_connection(lambda: Client(seen, request, free.append), "127.0.0.1", port))[1])
    free.extend(made)
    count = max(1, int(rate * seconds))
    cpu, begun = cpu_seconds(pid), time.perf_counter()
    for i in range(count):
        due = begun + i / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        if not free:
            made.append((await loop.create_connection(lambda: Client(seen, request, free.append), "127.0.0.1", port))[1])
            free.append(made[-1])
        free.pop().ask(due)
    while len(seen.whole) < count:  # noqa: ASYNC110  an event would be set by each answer
        await asyncio.sleep(0.001)
    seen.rate = count / (time.perf_counter() - begun)
    seen.cpu = (cpu_seconds(pid) - cpu) * 1e3 / count
    for client in made:
        client.transport.close()
    await asyncio.gather(*(client.lost for client in made))
    return seen


# -- the comparison


def between(rounds: dict[str, list[Seen]], one: str, other: str, how: Callable[[Seen, Seen], float]) -> float:
    """Median over the rounds of what `how` says of two contestants in the same round."""
    return statistics.median(how(a, b) for a, b in zip(rounds[one], rounds[other], strict=True))


def first_p50(seen: Seen) -> float:
    return statistics.median(seen.first)


def describe(label: str, rounds: dict[str, list[Seen]]) -> list[dict[str, Any]]:
    print(f"\n{label}")
    rows = []
    for name, seen in rounds.items():
        figures = {
            "calls_per_s": round(statistics.median(s.rate for s in seen), 1),
            "p50_ms": round(statistics.median(s.p(0.5) for s in seen), 2),
            "p99_ms": round(statistics.median(s.p(0.99) for s in seen), 2),
            "first_ms": round(statistics.median(map(first_p50, seen)), 2),
            "cpu_ms": round(statistics.median(s.cpu for s in seen), 3),
        }
        print(f"  {name:12}" + "".join(f"  {key} {value:>8}" for key, value in figures.items()))
        rows.append({"measured": label, "contestant": name, **figures})
    return rows


def ratios(label: str, rounds: dict[str, list[Seen]]) -> dict[str, Any]:
    made: dict[str, Any] = {"measured": label}
    for name in [n for n in rounds if n != "direct"]:
        made[f"{name} adds p50 ms"] = round(between(rounds, name, "direct", lambda a, b: a.p(0.5) - b.p(0.5)), 2)
        made[f"{name} adds p99 ms"] = round(between(rounds, name, "direct", lambda a, b: a.p(0.99) - b.p(0.99)), 2)
        made[f"{name} adds to the first byte ms"] = round(between(rounds, name, "direct", lambda a, b: first_p50(a) - first_p50(b)), 2)
    for other in [n for n in rounds if n not in ("direct", "gateway")]:
        made[f"gateway/{other} throughput"] = round(between(rounds, "gateway", other, lambda a, b: a.rate / b.rate), 2)
        made[f"gateway/{other} throughput by processor time"] = round(between(rounds, "gateway", other, lambda a, b: b.cpu / a.cpu), 2)
    for key, value in list(made.items())[1:]:
        print(f"    {key}: {value}")
    return made


def floor() -> dict[str, float]:
    """What a call can't be recorded without, in microseconds of one core: reading the upstream's reply, and one row of a transaction of 16.

    Both are C code (msgspec told to build what is kept alone; SQLite), measured by themselves in a loop.
    """
    from mappa_graph.database import connect, connect_quick
    from mappa_graph.gateway import replies
    from mappa_graph.store import _INSERT_CALL

    body = prepared()[0].partition(b"\r\n\r\n")[2]
    reading = min(_per_call(lambda: replies._decoder.decode(body), 2000) for _ in range(5))
    blobs = [os.urandom(size) for size in (4 * PROMPT, 4 * COMPLETION, 4 * COMPLETION + 1, 2300)]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "trace.db"
        connect(made, read_only=False, busy_timeout_s=1.0).close()
        db = connect_quick(made)
        count = 0

        def write() -> None:
            nonlocal count
            count += 16
            rows = [(f"{count + i:032x}", 0, "served", 0, None, None, "stop", 0.0, 0.0, *blobs) for i in range(16)]
            db.execute("BEGIN IMMEDIATE")
            db.executemany(_INSERT_CALL, rows)
            db.execute("COMMIT")

        writing = min(_per_call(write, 60) for _ in range(5)) / 16
        db.close()
    return {"reading the reply": round(reading, 1), "writing the row": round(writing, 1)}


def _per_call(work: Callable[[], object], count: int) -> float:
    begun = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - begun) / count * 1e6


class Bench:
    """The contestants' processes, up while it is entered."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {name: free_port() for name in CONTESTANTS}

    def __enter__(self) -> Bench:
        upstream = f"http://127.0.0.1:{self.ports['direct']}/v1"
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        for name, port in self.ports.items():
            command = [sys.executable, __file__, "--serve", name, str(port), upstream, self._folder]
            self._processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
            wait_for(port)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()

    def rounds(self, names: tuple[str, ...], count: int, run: Callable[[int, int], Any]) -> dict[str, list[Seen]]:
        """`count` rounds of each, in turn; each round begins with another contestant."""
        seen: dict[str, list[Seen]] = {name: [] for name in names}
        for i in range(count):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                seen[name].append(uvloop.run(run(self.ports[name], self._processes[name].pid)))
        return seen


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(port: int) -> None:
    import socket

    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"nothing listens on {port}")


def measure(bench: Bench, given: argparse.Namespace, stream: bool) -> list[dict[str, Any]]:
    kind = "streamed" if stream else "whole"
    request = request_bytes(stream, ids=given.ids)
    bench.rounds(CONTESTANTS, 1, lambda port, pid: closed(port, pid, 16, 0.5, request))
    made: list[dict[str, Any]] = []
    most = 0.0
    for n in given.clients:
        label = f"{kind}, {n} closed-loop clients"
        rounds = bench.rounds(CONTESTANTS, given.rounds, lambda port, pid, n=n: closed(port, pid, n, given.seconds, request))  # type: ignore[misc]
        made += [*describe(label, rounds), ratios(label, rounds)]
        most = max(most, statistics.median(s.rate for s in rounds["gateway"]))
    names = ("direct", "proxy", "gateway")
    rate = most / 2
    label = f"{kind}, {rate:.0f} calls/s offered (half of the gateway's most)"
    rounds = bench.rounds(names, given.rounds, lambda port, pid: paced(port, pid, rate, given.seconds * 1.5, request))
    made += [*describe(label, rounds), ratios(label, rounds)]
    if stream:
        late = request_bytes(True, ids=given.ids, late=True)
        for n in given.clients[:2]:
            label = f"streamed, {n} clients, all but the first chunk {LATE_S * 1e3:.0f} ms late: is the first one held up?"
            rounds = bench.rounds(names, given.rounds, lambda port, pid, n=n: closed(port, pid, n, given.seconds, late))  # type: ignore[misc]
            made += [*describe(label, rounds), ratios(label, rounds)]
    return made


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        name, port, upstream, folder = sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
        if name == "direct":
            serve_upstream(port)
        elif name == "gateway":
            serve_gateway(port, upstream, folder)
        else:
            (serve_proxy if name == "proxy" else serve_httpx_proxy)(port, upstream)
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=0.8, help="of one round of one contestant")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    options.add_argument("--ids", action="store_true", help="clients ask for token ids and log-probs")
    which = options.add_mutually_exclusive_group()
    which.add_argument("--stream", action="store_true", help="streamed replies only")
    which.add_argument("--whole", action="store_true", help="whole replies only")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"load average at the start: {' '.join(f'{x:.1f}' for x in os.getloadavg())} on {os.cpu_count()} cores")
    least = floor()
    print("recording can't do without, us a call:", ", ".join(f"{name} {value}" for name, value in least.items()))
    rows.append({"measured": "floor, us", **least})
    with tempfile.TemporaryDirectory() as folder, Bench(folder) as bench:
        for stream in [True] if given.stream else [False] if given.whole else [False, True]:
            rows += measure(bench, given, stream)
    print(f"\nload average at the end: {' '.join(f'{x:.1f}' for x in os.getloadavg())}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
