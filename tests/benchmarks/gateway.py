"""What the gateway adds to a call, beside calling the same upstream directly and through a bare reverse proxy of the same libraries.

    python tests/benchmarks/gateway.py [--seconds 4] [--clients 1 16 64] [--stream | --whole] [--json FILE]

Upstream, proxies and gateway are processes of their own. The upstream answers at once, in vLLM's shape, with 512 prompt ids, 64 output
ids and their log-probs; the clients are bare sockets, so that they are not what is measured. They ask in a closed loop, and then at
half of the rate that the gateway can do at most. Rounds alternate between the targets, and each figure is the median of its rounds. On
a busy machine, trust the processor time per call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROMPT, COMPLETION, ROUNDS = 512, 64, 3


def serve_gateway(port: int, upstream: str, folder: str) -> None:
    from mappa_graph.gateway import Gateway
    from mappa_graph.gateway.upstream import UpstreamEngine
    from mappa_graph.store import TraceStore

    with TraceStore(Path(folder) / "trace.db") as store, Gateway(UpstreamEngine(upstream, {"served": "served"}), store, port=port):
        sys.stdin.read()


def serve_proxy(port: int, upstream: str) -> None:
    """Passes bytes on and records nothing, with the gateway's own libraries."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    from mappa_graph.gateway.http import HttpClient

    headers = {"content-type": "application/json"}
    client = HttpClient(upstream, headers, timeout_s=60, connect_timeout_s=10, max_connections=1024)

    async def forward(request: Request) -> Response:
        body = await request.body()
        if b'"stream": true' not in body:
            answer = await client.request("POST", "/chat/completions", body)
            return Response(answer.body, answer.status, media_type="application/json")

        async def pieces() -> Any:
            async with client.stream("POST", "/chat/completions", body) as answer:
                async for piece in answer.pieces():
                    yield piece

        return StreamingResponse(pieces(), media_type="text/event-stream")

    _serve(Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])]), port)


def serve_httpx_proxy(port: int, upstream: str) -> None:
    """The same with httpx, the client that most Python proxies use."""
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    headers = {"content-type": "application/json"}
    limits = httpx.Limits(max_connections=1024, max_keepalive_connections=1024)
    client = httpx.AsyncClient(limits=limits, trust_env=False, timeout=60, headers=headers)

    async def forward(request: Request) -> Response:
        body = await request.body()
        if b'"stream": true' not in body:
            answer = await client.post(f"{upstream}/chat/completions", content=body)
            return Response(answer.content, answer.status_code, media_type="application/json")

        async def pieces() -> Any:
            async with client.stream("POST", f"{upstream}/chat/completions", content=body) as answer:
                async for piece in answer.aiter_raw():
                    yield piece

        return StreamingResponse(pieces(), media_type="text/event-stream")

    _serve(Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])]), port)


def _serve(app: Any, port: int) -> None:
    import uvicorn

    uvicorn.run(app, port=port, log_level="warning", access_log=False, lifespan="off", backlog=2048)


@dataclass
class Seen:
    """One round: calls a second, and per call the time to the first byte of the body and to its end, in ms."""

    rate: float
    first: list[float]
    whole: list[float]
    cpu: float
    """Processor time of the server's process per call, in ms: what a busy machine does not change."""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def request_bytes(stream: bool) -> bytes:
    # The gateway asks for ids and log-probs on every call; so do the others here, for equal work upstream.
    ask = {
        "model": "served", "messages": [{"role": "user", "content": "w " * 400}], "stream": stream,
        "return_token_ids": True, "logprobs": True, "temperature": 1.0, "max_tokens": COMPLETION,
    }  # fmt: skip
    body = json.dumps(ask).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[float, float]:
    """One call; when the first byte of its body was there, and its end."""
    writer.write(request)
    headers = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in headers[:20], headers
    lower = headers.lower()
    if b"content-length: " in lower:
        await reader.readexactly(int(lower.split(b"content-length: ")[1].split(b"\r\n")[0]))
        return time.perf_counter(), time.perf_counter()
    got = 0.0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await reader.readexactly(size + 2)
        got = got or time.perf_counter()
    await reader.readexactly(2)
    return got, time.perf_counter()


async def load(port: int, pid: int, clients: int, seconds: float, stream: bool) -> Seen:
    """Closed loop: each client asks again once it was answered."""
    request = request_bytes(stream)
    first: list[float] = []
    whole: list[float] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        begun = 0.0
        while begun < end:
            begun = time.perf_counter()
            got, ended = await ask(reader, writer, request)
            first.append((got - begun) * 1e3)
            whole.append((ended - begun) * 1e3)
        writer.close()

    cpu = cpu_seconds(pid)
    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Seen(len(whole) / (time.perf_counter() - begun), first, whole, (cpu_seconds(pid) - cpu) * 1e3 / len(whole))


async def paced(port: int, pid: int, rate: float, seconds: float, stream: bool) -> Seen:
    """Open loop: `rate` calls a second, whatever the answers; the time of each counts from when it was due."""
    request = request_bytes(stream)
    free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    first: list[float] = []
    whole: list[float] = []

    async def one(due: float) -> None:
        connection = free.pop() if free else await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        got, ended = await ask(*connection, request)
        free.append(connection)
        first.append((got - due) * 1e3)
        whole.append((ended - due) * 1e3)

    cpu = cpu_seconds(pid)
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for i in range(max(1, int(rate * seconds))):
            due = begun + i / rate
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(due))
    taken = time.perf_counter() - begun
    for _, writer in free:
        writer.close()
    return Seen(len(whole) / taken, first, whole, (cpu_seconds(pid) - cpu) * 1e3 / len(whole))


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(port: int) -> None:
    import socket

    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def row(target: str, rounds: list[Seen], stream: bool, **load: float) -> dict[str, Any]:
    """The medians of a target's rounds."""
    return {
        "target": target,
        **load,
        "stream": stream,
        "calls_per_s": round(statistics.median(r.rate for r in rounds), 1),
        "first_ms_p50": round(statistics.median(statistics.median(r.first) for r in rounds), 2),
        "ms_p50": round(statistics.median(statistics.median(r.whole) for r in rounds), 2),
        "ms_p99": round(statistics.median(sorted(r.whole)[int(len(r.whole) * 0.99)] for r in rounds), 2),
        "cpu_ms": round(statistics.median(r.cpu for r in rounds), 3),
    }


def report(rows: list[dict[str, Any]]) -> None:
    for one in rows:
        print("  ".join(f"{key} {value}" for key, value in one.items()))
    by = {(one["target"], one["clients"]): one for one in rows if "clients" in one}
    kind = "streamed" if rows[0]["stream"] else "whole"
    for n in sorted({n for _, n in by}):
        direct, httpx, proxy, gateway = (by[name, n] for name in ("direct", "httpx-proxy", "proxy", "gateway"))
        print(
            f"{kind}, {n} clients: gateway adds {gateway['ms_p50'] - direct['ms_p50']:.2f} ms p50 "
            f"(proxy {proxy['ms_p50'] - direct['ms_p50']:.2f}), first byte +{gateway['first_ms_p50'] - direct['first_ms_p50']:.2f} ms "
            f"(proxy {proxy['first_ms_p50'] - direct['first_ms_p50']:.2f}); throughput {gateway['calls_per_s'] / proxy['calls_per_s']:.2f} "
            f"of the proxy's, {gateway['calls_per_s'] / httpx['calls_per_s']:.2f} of the httpx proxy's; "
            f"processor time {gateway['cpu_ms']:.2f} ms a call (proxy {proxy['cpu_ms']:.2f}, httpx proxy {httpx['cpu_ms']:.2f})"
        )
    direct, proxy, gateway = (next(r for r in rows if r["target"] == t and "offered" in r) for t in ("direct", "proxy", "gateway"))
    print(
        f"{kind}, {gateway['offered']} calls/s offered (half of the gateway's most): "
        f"gateway adds {gateway['ms_p99'] - direct['ms_p99']:.2f} ms p99 "
        f"(proxy {proxy['ms_p99'] - direct['ms_p99']:.2f}), {gateway['ms_p50'] - direct['ms_p50']:.2f} ms p50"
    )


def measure(seconds: float, clients: list[int], stream: bool) -> list[dict[str, Any]]:
    ports = {name: free_port() for name in ("direct", "httpx-proxy", "proxy", "gateway")}
    upstream = f"http://127.0.0.1:{ports['direct']}/v1"
    here = str(Path(__file__))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "direct": [sys.executable, str(ROOT / "tests/fakes/upstream.py"), str(ports["direct"]), str(PROMPT), str(COMPLETION)],
            "httpx-proxy": [sys.executable, here, "--serve-httpx-proxy", str(ports["httpx-proxy"]), upstream],
            "proxy": [sys.executable, here, "--serve-proxy", str(ports["proxy"]), upstream],
            "gateway": [sys.executable, here, "--serve-gateway", str(ports["gateway"]), upstream, folder],
        }
        processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, command in commands.items():
                processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
                wait_for(ports[name])
            for n in clients:
                for name, port in ports.items():
                    asyncio.run(load(port, processes[name].pid, n, 0.5, stream))
                seen: dict[str, list[Seen]] = {name: [] for name in ports}
                for _ in range(ROUNDS):
                    for name, port in ports.items():
                        seen[name].append(asyncio.run(load(port, processes[name].pid, n, seconds / ROUNDS, stream)))
                rows += [row(name, rounds, stream, clients=n) for name, rounds in seen.items()]
            # Half of what the gateway can do at most.
            rate = max(r["calls_per_s"] for r in rows if r["target"] == "gateway") / 2
            seen = {name: [] for name in ports if name != "httpx-proxy"}
            for _ in range(ROUNDS):
                for name in seen:
                    seen[name].append(asyncio.run(paced(ports[name], processes[name].pid, rate, seconds / ROUNDS, stream)))
            rows += [row(name, rounds, stream, offered=round(rate, 1)) for name, rounds in seen.items()]
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait()
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--serve-gateway"]:
        serve_gateway(int(sys.argv[2]), sys.argv[3], sys.argv[4])
        return
    if sys.argv[1:2] in (["--serve-proxy"], ["--serve-httpx-proxy"]):
        (serve_proxy if sys.argv[1] == "--serve-proxy" else serve_httpx_proxy)(int(sys.argv[2]), sys.argv[3])
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    which = options.add_mutually_exclusive_group()
    which.add_argument("--stream", action="store_true", help="streamed replies only")
    which.add_argument("--whole", action="store_true", help="whole replies only")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    kinds = [True] if given.stream else [False] if given.whole else [False, True]
    rows: list[dict[str, Any]] = []
    for stream in kinds:
        made = measure(given.seconds, given.clients, stream)
        report(made)
        rows += made
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
