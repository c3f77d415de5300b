"""`VllmEngine`: policies served by vLLM, and their versions swapped while it serves.

Two ways. `lora`: all policies are adapters on one base and share one server; a new version is loaded beside the old one. `full`: each
policy has a server of its own, whose weights are replaced in place (`swaps_in_place`), in a pause between two steps. The one thing to
know: in place, a call that runs across a swap is answered by two versions, and `serving` says which one answers now.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

from ...errors import ConfigError, EngineError
from ...sections.engine import VllmConfig
from ..engine import Chunk, Completion, Passed, Request, RequestRefused
from ..upstream import UpstreamEngine
from . import folders, manifest
from .checks import check
from .control import REFUSED, ServerDown, Unusable, uncancelled
from .environment import find
from .process import Launch, lora_table
from .replies import asked_of_vllm, in_openais_words, most_likely
from .supervisor import Address, Server
from .transfer import Sender

log = logging.getLogger("mappa_graph.gateway.vllm")
T = TypeVar("T")
PLACE_WAIT_S = 10.0
"""How long a new adapter waits for an old one to go, where the server's table is full."""


class VllmEngine:
    """Serves policies from vLLM.

    Args:
        models: policy -> folder of its first weights, a whole model; with `mode` lora, all of one base: the same folder, or adapters of it.
        options: settings of the server.
        mode: `lora` or `full`.
        folder: for logs, made if need be.
        dtype: of weights and arithmetic.
        threads: CPU threads of each server; None = all cores.
        ranks: of the adapters to come (lora), for the size of the server's table.

    A folder that was loaded must stay as it is while its version serves: a server that restarts reads it again.
    It belongs to the event loop that it was started on (the gateway's).
    """

    name: ClassVar[str] = "vllm"
    serving: Callable[[str], int]
    """Only there in place: policy -> the version whose weights answer now. It changes within `load`, while nothing runs."""
    endpoints: ClassVar[frozenset[str]] = UpstreamEngine.endpoints

    def __init__(
        self,
        models: Mapping[str, Path],
        options: VllmConfig | None = None,
        *,
        mode: Literal["lora", "full"],
        folder: Path,
        dtype: str = "float32",
        threads: int | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        if not models:
            raise ConfigError("the vLLM engine has no models", hint='give at least one: VllmEngine({"solver": folder}, mode="lora", …)')
        self.options = options or VllmConfig()
        self.mode = mode
        self._folder = Path(folder).absolute()
        self._dtype = dtype
        self._threads = threads
        self._first = {policy: Path(path).absolute() for policy, path in models.items()}
        self._swapping: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._adapters: dict[str, dict[int, Path | None]] = {}
        """lora: policy -> version -> its folder, None for the base itself."""
        self._serving: dict[str, tuple[int, Path]] = {}
        """full: policy -> version and folder."""
        self._before: dict[str, tuple[int, Path]] = {}
        self._known: dict[str, set[int]] = {}
        self._senders: dict[str, Sender] = {}
        self._servers: dict[str, Server] = {}
        self._reset()
        if mode == "full":
            self.serving = self._version
        # Adapters of two gateways may share a server that is not ours: names that nobody else gives.
        tag = f".{os.urandom(4).hex()}" if self.options.base_url is not None else ""
        self._alias = {policy: f"{policy}{tag}" for policy in models}
        if mode == "lora":
            self._base = folders.base_of(self._first)
            self._table = lora_table(
                len(models), [*ranks, *folders.ranks(self._first)], adapters=self.options.max_adapters, rank=self.options.max_lora_rank
            )

    def _reset(self) -> None:
        for policy, path in self._first.items():
            self._known[policy] = {0}
            if self.mode == "lora":
                self._adapters[policy] = {0: path if folders.is_adapter(path) else None}
            else:
                self._serving[policy] = (0, path)

    @property
    def swaps_in_place(self) -> bool:
        """Whether a version replaces the one before it, so that only one of a policy is ever there."""
        return self.mode == "full"

    @property
    def health(self) -> str:
        """`ok`, or what the first server that isn't is doing."""
        return next((s.health for s in self._each() if s.health != "ok"), "ok" if self._servers else "stopped")

    @property
    def restarts(self) -> int:
        return sum(server.restarts for server in self._each())

    def server(self, policy: str) -> Server:
        """The server of a policy."""
        if policy not in self._first:
            raise EngineError(f"the vLLM engine has no policy {policy!r}", hint=f"it has: {', '.join(self._first)}")
        if policy not in self._servers:
            raise EngineError("the vLLM engine is not running", hint="await engine.start() first")
        return self._servers[policy]

    def send_from(self, policy: str, make: Callable[[], Sender]) -> None:
        """With transfer `nccl` or `ipc`: makes what sends the trainer's weights when a version is loaded; kept from the first time on."""
        if policy not in self._senders:
            self._senders[policy] = make()

    async def start(self) -> None:
        if self._servers:
            return
        servers = self._make_servers()
        starting = [asyncio.ensure_future(server.start()) for server in set(servers.values())]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(server.stop() for server in set(servers.values())))
            raise
        self._servers = servers

    async def stop(self) -> None:
        servers, self._servers = set(self._servers.values()), {}
        await asyncio.gather(*(server.stop() for server in servers))
        self._reset()

    def models(self) -> Mapping[str, Sequence[int]]:
        if self.mode == "full":
            return {policy: [version] for policy, (version, _) in self._serving.items()}
        return {policy: sorted(versions) for policy, versions in self._adapters.items()}

    # -- calls

    async def complete(self, request: Request) -> Sequence[Completion]:
        async with self._calling(request.policy, request.version) as (server, upstream):
            made = await upstream.complete(self._mapped(request, server))
        return [most_likely(completion, request.top_logprobs) for completion in made]

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        async with self._calling(request.policy, request.version) as (server, upstream):
            chunks = cast("AsyncIterator[Any]", upstream.stream(self._mapped(request, server)))
            async with aclosing(chunks):  # type: ignore[type-var]
                async for chunk in chunks:
                    yield most_likely(chunk, request.top_logprobs)

    @asynccontextmanager
    async def respond(self, policy: str, version: int, body: Mapping[str, Any]) -> AsyncIterator[Passed]:
        """The server's own reply to `POST /responses`. Raises `RequestRefused`."""
        async with self._calling(policy, version) as (_, upstream):
            async with upstream.respond(self._alias[policy], self._there(version), body) as reply:
                yield reply

    async def score(
        self, policy: str, version: int, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Measured on a CPU in float32: within 4e-6 nats of transformers' on small random models."""

        async def score() -> list[float]:
            async with self._calling(policy, version) as (server, _):
                # With adapters a plain CPU server ends when it scores a prompt beside other requests; ours is mended.
                safe = self.mode == "full" or server.capabilities.guarded
                name = self._served(policy, version)
                return await server.control.score(name, prompt_ids, completion_ids, temperature, one_pass=safe)

        return await self._twice(self.server(policy), score)

    # -- versions

    async def load(self, policy: str, version: int, weights: Path) -> None:
        """Loads a version: an adapter beside the others (lora), or whole weights in place of the ones that serve (full).

        Raises `EngineError`; what served before serves on.
        """
        server = self.server(policy)
        put = self._load_adapter if self.mode == "lora" else self._replace
        async with self._swapping[policy]:
            await self._twice(server, lambda: put(server, policy, version, folders.absolute(weights)))

    async def unload(self, policy: str, version: int) -> None:
        """Forgets a version. In place, forgetting the one that serves goes back to the one before it."""
        server = self.server(policy)
        if self.mode == "lora":
            folder = self._adapters[policy].pop(version, None)
            if folder is not None:
                async with server.calling() as upstream:
                    await upstream.unload(self._alias[policy], self._there(version))
            return
        async with self._swapping[policy]:
            if self._version(policy) == version and policy in self._before:
                before = self._before.pop(policy)
                await self._swap(server, policy, before)

    async def _load_adapter(self, server: Server, policy: str, version: int, weights: Path) -> None:
        folders.check_adapter(weights, self._table[2], ours=server.ours)
        await asyncio.to_thread(manifest.verify, weights)
        waited_s, most = 0.0, self._table[1]
        while len(loaded := self._loaded()) >= most:
            if waited_s >= PLACE_WAIT_S:  # calls on old versions had time to end
                told = f"the server's table of adapters is full: {len(loaded)} of {most} hold {', '.join(loaded)}"
                raise EngineError(told, hint="raise engine.vllm.max_adapters, or let calls on old versions end first")
            await asyncio.sleep(0.05)
            waited_s += 0.05
        # It counts from here on, so that two loads at once can't both take the last place, and a restart brings it back.
        self._adapters[policy][version] = weights
        try:
            async with server.calling() as upstream:
                await upstream.load(self._alias[policy], version, weights)
        except BaseException:
            self._adapters[policy].pop(version, None)
            raise
        self._known[policy].add(version)

    async def _replace(self, server: Server, policy: str, version: int, weights: Path) -> None:
        if not (weights / "config.json").is_file():
            told = "an adapter" if folders.is_adapter(weights) else "no model folder: it has no config.json"
            raise EngineError(
                f"{weights} is {told}", hint="whole weights are published as an ordinary Hugging Face folder; adapters need mode lora"
            )
        before, new = self._serving[policy], (version, weights)
        try:
            await uncancelled(self._swap(server, policy, new))
        except asyncio.CancelledError:
            if self._serving[policy] == new:
                await uncancelled(self._swap(server, policy, before))
            raise
        self._before[policy] = before
        self._known[policy].add(version)

    async def _swap(self, server: Server, policy: str, to: tuple[int, Path]) -> None:
        """Has a server hold `to`, and says so from then on; what fails leaves it with what it held."""
        await server.up()
        version, folder = to
        label, back = f"{policy}@v{version}", self._serving[policy]
        files = await asyncio.to_thread(lambda: manifest.read_manifest(folder) or manifest.compute(folder))
        control, process = server.control, server.process

        async def transfer() -> None:
            try:
                if self.options.transfer == "shared":
                    await control.take_folder(folder, files, label)
                else:
                    await self._sender(policy).send(control, label)
                await control.check_version(label)
            except EngineError as error:
                if REFUSED not in str(error):
                    await self._go_back(server, policy, back, error)
                raise

        def committed() -> None:
            self._serving[policy] = to

        try:
            async with server.calling():
                await control.swap(label, transfer, committed)
        except EngineError as error:
            self._serving[policy] = back
            cause = error.__cause__ if isinstance(error, RequestRefused) else error
            if isinstance(cause, Unusable | ServerDown):
                if server.ours and server.process is process:
                    server.broken()
                elif isinstance(cause, Unusable):
                    server.fail(error)
            raise
        server.recovered()

    async def _go_back(self, server: Server, policy: str, back: tuple[int, Path], error: EngineError) -> None:
        """Puts the version before into a server whose update failed. Raises `Unusable` where that fails too."""
        version, folder = back
        label = f"{policy}@v{version}"
        log.warning("%s goes back to %s: %s", server.what, label, error)
        try:
            files = await asyncio.to_thread(lambda: manifest.read_manifest(folder) or manifest.compute(folder))
            await server.control.take_folder(folder, files, label)
            await server.control.check_version(label)
        except EngineError as second:
            raise Unusable(f"{server.what} failed to take new weights ({error}), and then {label} again ({second})") from error

    # -- inside

    async def _twice(self, server: Server, work: Callable[[], Awaitable[T]]) -> T:
        """What a crash cut is done once more by the server that was started again: a publish outlives it."""
        try:
            return await work()
        except RequestRefused as error:
            if error.status != 503 or not server.ours:
                raise
            await asyncio.sleep(0.2)  # until the crash is known
            await server.up()
            return await work()

    def _version(self, policy: str) -> int:
        return self._serving[policy][0]

    def _loaded(self) -> list[str]:
        """The adapters that the server holds."""
        return [f"{p}@v{v}" for p, versions in self._adapters.items() for v, path in versions.items() if path is not None]

    def _each(self) -> list[Server]:
        return list(dict.fromkeys(self._servers.values()))

    def _sender(self, policy: str) -> Sender:
        if policy not in self._senders:
            raise EngineError(
                f"no trainer of this process sends the weights of {policy!r} (engine.vllm.transfer {self.options.transfer!r})",
                hint="publish from the training process, or set engine.vllm.transfer to 'shared'",
            )
        return self._senders[policy]

    def _there(self, version: int) -> int:
        """The number that the server's side knows a version by: in place it has one set of weights, and no numbers."""
        return 0 if self.mode == "full" else version

    def _served(self, policy: str, version: int) -> str:
        if self.mode == "full" or self._adapters[policy].get(version) is None:
            return self.server(policy).name
        return f"{self._alias[policy]}@v{version}"

    @asynccontextmanager
    async def _calling(self, policy: str, version: int) -> AsyncIterator[tuple[Server, UpstreamEngine]]:
        server = self.server(policy)
        if version not in (self._known[policy] if self.mode == "full" else self._adapters[policy]):
            raise EngineError(f"{policy}@v{version} is not loaded in {server.what}")
        try:
            async with server.calling() as upstream:
                yield server, upstream
        except RequestRefused as error:
            raise in_openais_words(error) from error

    def _mapped(self, request: Request, server: Server) -> Request:
        """The request as the server's side knows it; a limit beyond the context is cut to it, which vLLM would refuse."""
        limit = request.max_tokens
        if limit is not None and (most := server.capabilities.max_model_len):
            limit = min(limit, most)
        asked = request.top_logprobs if request.prompt is not None else asked_of_vllm(request.top_logprobs)
        alias, version = self._alias[request.policy], self._there(request.version)
        return replace(request, policy=alias, version=version, max_tokens=limit, top_logprobs=asked)

    def _make_servers(self) -> dict[str, Server]:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.mode == "lora":
            at = self.options.base_url
            if isinstance(at, dict):
                if len(set(at.values())) != 1:
                    raise ConfigError("engine.vllm.base_url names several servers; with adapters all policies share one")
                at = next(iter(at.values()))
            make = self._address(at) if at else partial(self._launch, "lora", self._base)
            server = self._server("the vLLM server", make, tuple(self._first))
            return dict.fromkeys(self._first, server)
        urls = self.options.base_url
        if urls is not None and (not isinstance(urls, dict) or set(urls) != set(self._first)) and len(self._first) > 1:
            raise ConfigError(
                f"engine.vllm.base_url must name a server a policy ({', '.join(self._first)}): with whole weights each has its own",
                hint="give {policy: address, …}, or train adapters",
            )
        servers = {}
        for policy in self._first:
            at = urls[policy] if isinstance(urls, dict) else urls
            make = self._address(at) if at else partial(self._launch_full, policy)
            servers[policy] = self._server(f"the vLLM server of {policy}", make, (policy,))
        return servers

    def _server(self, what: str, where: Any, policies: tuple[str, ...]) -> Server:
        aliases = tuple(self._alias[policy] for policy in policies)
        restore = self._restore_adapters if self.mode == "lora" else partial(self._restore_label, policies[0])
        return Server(
            what, where, aliases, self.options, check=partial(check, mode=self.mode, transfer=self.options.transfer), restore=restore
        )

    def _address(self, url: str) -> Address:
        name = self.options.api_key_env
        key = os.environ.get(name) if name else None
        if name and not key:
            raise ConfigError(f"the environment variable {name} (engine.vllm.api_key_env) is not set", hint=f"export {name}=…")
        return Address(url.rstrip("/").removesuffix("/v1"), key)

    def _launch_full(self, policy: str) -> Launch:
        return self._launch(policy, self._serving[policy][1])

    def _launch(self, label: str, model: Path) -> Launch:
        o = self.options
        return Launch(
            environment=find(o.python),
            model=model,
            log=self._folder / f"vllm-{label}.log",
            dtype=self._dtype,
            threads=self._threads,
            lora=self._table if self.mode == "lora" else None,
            transfer=o.transfer if self.mode == "full" else None,
            tensor_parallel=o.tensor_parallel,
            gpu_memory_utilization=o.gpu_memory_utilization,
            kv_cache_gib=o.kv_cache_gib,
            max_model_len=o.max_model_len,
            max_num_seqs=o.max_num_seqs,
            extra_args=o.extra_args,
            grace_s=o.stop_timeout_s,
        )

    async def _restore_adapters(self, server: Server) -> None:
        for policy, versions in self._adapters.items():
            for version, folder in sorted(versions.items()):
                if folder is not None:
                    await asyncio.to_thread(manifest.verify, folder)
                    await server.upstream.load(self._alias[policy], version, folder)

    async def _restore_label(self, policy: str, server: Server) -> None:
        version, _ = self._serving[policy]
        if server.ours or version == 0:
            await server.control.post("/update_weight_version", {"new_version": f"{policy}@v{version}"})
