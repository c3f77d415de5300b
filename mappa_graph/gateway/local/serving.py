"""The engine: folders to modules, requests to rows, rows to completions."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers

from ...codec import encode
from ...errors import ConfigError, EngineError
from ..engine import Chunk, Completion, Request, RequestRefused
from ..text import TOOL_CALL, TextStream, plain_messages, split_tool_calls
from .decode import Decoder, Row
from .weights import load_version

# Parts of a request body that change nothing here whatever they say, and parts that have one value that can be had.
_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "reasoning_effort", "verbosity"}
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "functions": ([],),
}
_RENDERED = 512
_SMALL = 30_000_000


@dataclass(frozen=True)
class _Vocabulary:
    """What is the same for all versions of a policy."""

    folder: Path
    tokenizer: Any
    eos: frozenset[int]
    max_positions: int

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class LocalEngine:
    """Causal language models in process, with continuous batching.

    Args:
        models: first weights (version 0) of each policy: folders as `save_pretrained` writes them, tokenizer and chat template
            included.
        dtype: of the weights, a torch name.
        device: torch device.
        max_batch_tokens: bound on rows times length of what is decoded at once; what does not fit waits.
        threads: torch threads of the decode thread; None = one for small models (more threads cost them more than they bring),
            else torch's own choice.
        max_tokens: completion length where a request names none (never more than what the context leaves).

    Raises `EngineError` from `start` where a folder is missing, is no model, or has no chat template.
    """

    name: ClassVar[str] = "local"

    def __init__(
        self,
        models: Mapping[str, Path | str],
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch_tokens: int = 32768,
        threads: int | None = None,
        max_tokens: int = 1024,
    ) -> None:
        if not models:
            raise ConfigError("the local engine has no models", hint='give at least one: LocalEngine({"solver": folder})')
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(f"dtype {dtype!r} is not a torch dtype", hint="float32, bfloat16 or float16")
        self.folders = {policy: Path(folder) for policy, folder in models.items()}
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.max_batch_tokens = max_batch_tokens
        self.threads = threads
        self.max_tokens = max_tokens
        self._lock = threading.Lock()
        self._versions: dict[str, dict[int, Any]] = {}
        self._vocabularies: dict[str, _Vocabulary] = {}
        self._decoder: Decoder | None = None
        self._rendered: OrderedDict[tuple[str, bytes], tuple[int, ...]] = OrderedDict()

    async def start(self) -> None:
        if self._decoder is None:
            await asyncio.to_thread(self._start)

    def _start(self) -> None:
        modules: dict[Path, Any] = {}
        vocabularies: dict[Path, _Vocabulary] = {}
        for policy, folder in self.folders.items():
            key = folder.resolve()
            if key not in modules:
                modules[key], vocabularies[key] = self._first(folder)
            self._versions[policy] = {0: modules[key]}
            self._vocabularies[policy] = vocabularies[key]
        largest = max(sum(p.numel() for p in module.parameters()) for module in modules.values())
        threads = 1 if self.threads is None and largest < _SMALL else self.threads
        decoder = Decoder(self.device, self.max_batch_tokens, threads)
        for key, module in modules.items():
            decoder.prepare(module, vocabularies[key].max_positions, compare=True)
        self._decoder = decoder

    async def stop(self) -> None:
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            await asyncio.to_thread(decoder.stop)
        self._versions.clear()

    def models(self) -> Mapping[str, Sequence[int]]:
        with self._lock:
            return {policy: sorted(versions) for policy, versions in self._versions.items()}

    async def load(self, policy: str, version: int, weights: Path) -> None:
        """Loads weights from a folder of safetensors: a whole model, or a PEFT LoRA adapter on the policy's first weights."""
        beside = self._module(policy, None)
        with self._lock:
            if version in self._versions[policy]:
                raise EngineError(f"{policy}@v{version} is loaded already", hint="give every publish a number of its own")
        module = await asyncio.to_thread(self._load, policy, beside, weights)
        with self._lock:
            self._versions[policy][version] = module

    def _load(self, policy: str, beside: Any, weights: Path) -> Any:
        module = load_version(beside, self.folders[policy], Path(weights), self.dtype, self.device)
        decoder = self._running()
        # Compared once per model, at the start: other weights don't change which operations are right.
        if decoder.prepared_like(beside):
            decoder.prepare(module, self._vocabularies[policy].max_positions, compare=False)
        return module

    async def unload(self, policy: str, version: int) -> None:
        with self._lock:
            module = self._versions.get(policy, {}).pop(version, None)
            shared = any(module is other for versions in self._versions.values() for other in versions.values())
        if module is not None and not shared and self._decoder is not None:
            self._decoder.forget(module)

    async def complete(self, request: Request) -> Sequence[Completion]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        left = request.n

        def sink(row: Row, _tokens: int, _piece: str) -> None:
            nonlocal left
            left -= 1
            if done.done():
                return
            if row.error is not None:
                done.set_exception(row.error)
            elif not left:
                done.set_result(None)

        rows = self._begin(request, stream=False, sink=sink, loop=loop)
        try:
            await done
        finally:
            for row in rows:
                row.cancelled = True
        return [self._completion(request, i, row) for i, row in enumerate(rows)]

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        events: asyncio.Queue[tuple[Row, int, str]] = asyncio.Queue()
        rows = self._begin(request, stream=True, sink=lambda *event: events.put_nowait(event), loop=asyncio.get_running_loop())
        index = {id(row): i for i, row in enumerate(rows)}
        taken = [0] * len(rows)
        left = len(rows)
        try:
            while left:
                row, tokens, piece = await events.get()
                if row.error is not None:
                    raise row.error
                i = index[id(row)]
                span = slice(taken[i], taken[i] + tokens)
                first = taken[i] == 0
                taken[i] += tokens
                last = row.finish_reason is not None and taken[i] == len(row.ids)
                left -= last
                delta: dict[str, Any] = {}
                reason = row.finish_reason if last else None
                if last and row.text is not None:
                    rest = row.text.finish()
                    text, calls = self._parse(request, row.text.text)
                    piece += rest[: max(0, len(text) - (row.text.given - len(rest)))]
                    if calls:
                        delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
                        reason = "tool_calls"
                if piece:
                    delta["content"] = piece
                yield Chunk(
                    index=i,
                    delta=delta,
                    token_ids=tuple(row.ids[span]),
                    logprobs=tuple(row.logprobs[span]),
                    prompt_ids=row.prompt if first else None,
                    finish_reason=reason,
                    content_logprobs=self._content_logprobs(request, row, span),
                )
        finally:
            for row in rows:
                row.cancelled = True

    async def score(
        self, policy: str, version: int, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        module = self._module(policy, version)
        limit = self._vocabularies[policy].max_positions
        if not prompt_ids or len(prompt_ids) + len(completion_ids) > limit:
            raise EngineError(f"can't score {len(prompt_ids)} + {len(completion_ids)} tokens: a prompt is needed, and {limit} is the limit")

        def work() -> list[float]:
            ids = torch.tensor([[*prompt_ids, *completion_ids]], device=self.device)
            logits = module(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(completion_ids)).logits[0].float()
            logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
            picked: list[float] = logprobs.gather(1, ids[0, len(prompt_ids) :, None])[:, 0].tolist()
            return picked

        return await asyncio.wrap_future(self._running().call(work)) if completion_ids else []

    # -- inside

    def _running(self) -> Decoder:
        if self._decoder is None:
            raise EngineError("the local engine is not running", hint="await engine.start() first")
        return self._decoder

    def _module(self, policy: str, version: int | None) -> Any:
        """A version's module; None = the latest."""
        self._running()
        with self._lock:
            versions = self._versions.get(policy)
            if not versions:
                raise EngineError(f"the local engine has no policy {policy!r}", hint=f"it has: {', '.join(self._versions)}")
            if version is None:
                version = max(versions)
            if version not in versions:
                raise EngineError(f"{policy}@v{version} is not loaded", hint=f"loaded: {sorted(versions)}")
            return versions[version]

    def _first(self, folder: Path) -> tuple[Any, _Vocabulary]:
        if not (folder / "config.json").is_file():
            raise EngineError(f"{folder} is not a model folder: it has no config.json", hint="give a folder that save_pretrained wrote")
        try:
            with quiet():
                module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype, local_files_only=True)
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise EngineError(f"the model in {folder} can't be loaded: {type(error).__name__}: {error}") from error
        module = module.to(self.device).eval().requires_grad_(False)
        if not tokenizer.chat_template:
            raise EngineError(f"the tokenizer in {folder} has no chat template", hint="put a chat_template.jinja into the folder")
        config = module.config.get_text_config()
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            raise EngineError(f"{folder} is a {config.model_type} with windowed or linear attention", hint="serve it with vLLM instead")
        ends = module.generation_config.eos_token_id if module.generation_config is not None else None
        ends = [ends] if isinstance(ends, int) else list(ends or [])
        eos = frozenset(id for id in (*ends, tokenizer.eos_token_id) if id is not None)
        positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
        return module, _Vocabulary(folder, tokenizer, eos, int(min(positions, tokenizer.model_max_length)))

    def _begin(
        self, request: Request, *, stream: bool, sink: Callable[[Row, int, str], None], loop: asyncio.AbstractEventLoop
    ) -> list[Row]:
        module = self._module(request.policy, request.version)
        vocabulary = self._vocabularies[request.policy]
        _check(request)
        prompt = self._render(request, vocabulary)
        room = vocabulary.max_positions - len(prompt)
        if room <= 0:
            raise RequestRefused(
                f"This model's maximum context length is {vocabulary.max_positions} tokens. However, your messages resulted in "
                f"{len(prompt)} tokens. Please reduce the length of the messages.",
                code="context_length_exceeded",
                param="messages",
            )
        marker = TOOL_CALL if request.tools else None
        rows = [
            Row(
                prompt,
                max_new=min(request.max_tokens or self.max_tokens, room),
                eos=vocabulary.eos,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                seed=None if request.seed is None else f"{request.seed}/{i}",
                top_logprobs=request.top_logprobs,
                text=TextStream(vocabulary.decode, request.stop, marker) if stream or request.stop else None,
                stream=stream,
                sink=sink,
                loop=loop,
            )
            for i in range(request.n)
        ]
        self._running().submit(module, rows)
        return rows

    def _render(self, request: Request, vocabulary: _Vocabulary) -> tuple[int, ...]:
        """The prompt's ids. The samples of one task ask for the same prompt again and again, so the latest are kept."""
        key = (request.policy, encode([request.messages, request.tools]))
        ids = self._rendered.get(key)
        if ids is not None:
            with contextlib.suppress(KeyError):
                self._rendered.move_to_end(key)
            return ids
        try:
            text = vocabulary.tokenizer.apply_chat_template(
                plain_messages(request.messages),
                tools=copy.deepcopy(list(request.tools)) or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except RequestRefused:
            raise
        except Exception as error:
            raise RequestRefused(f"the chat template of {request.policy} refused the messages: {error}", param="messages") from error
        ids = tuple(vocabulary.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise RequestRefused(f"the chat template of {request.policy} made an empty prompt of the messages", param="messages")
        self._rendered[key] = ids
        if len(self._rendered) > _RENDERED:
            with contextlib.suppress(KeyError):
                self._rendered.popitem(last=False)
        return ids

    def _parse(self, request: Request, text: str) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        return split_tool_calls(text) if request.tools and request.extra.get("tool_choice") != "none" else (text, ())

    def _completion(self, request: Request, index: int, row: Row) -> Completion:
        if row.text is not None:
            row.text.finish()
            text = row.text.text
        else:
            text = self._vocabularies[request.policy].decode(row.ids)
        text, calls = self._parse(request, text)
        return Completion(
            index=index,
            prompt_ids=row.prompt,
            completion_ids=tuple(row.ids),
            logprobs=tuple(row.logprobs),
            text=text,
            finish_reason="tool_calls" if calls else row.finish_reason or "error",
            tool_calls=calls,
            content_logprobs=self._content_logprobs(request, row, slice(None)),
        )

    def _content_logprobs(self, request: Request, row: Row, span: slice) -> list[dict[str, Any]] | None:
        if request.top_logprobs is None:
            return None
        tokenizer = self._vocabularies[request.policy].tokenizer

        def entry(id: int, logprob: float) -> dict[str, Any]:
            token = tokenizer.decode([id])
            return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

        return [
            {**entry(id, logprob), "top_logprobs": [entry(*pair) for pair in zip(*other, strict=True)]}
            for id, logprob, other in zip(row.ids[span], row.logprobs[span], row.alternatives[span], strict=True)
        ]


def _check(request: Request) -> None:
    """Refuses what this engine can't do, rather than leave it out silently."""
    for name, value in request.extra.items():
        if value is None or name in _HARMLESS:
            continue
        allowed = _ONLY.get(name)
        if allowed is None:
            raise RequestRefused(f"the local engine does not know the parameter {name!r}", param=name, code="unsupported_parameter")
        if value not in allowed:
            choice = " or ".join(map(repr, allowed))
            raise RequestRefused(
                f"the local engine can't do {name} = {value!r}: it serves {choice} only (an engine like vLLM can)",
                param=name,
                code="unsupported_value",
            )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers inside."""
    on = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if on:
            transformers.utils.logging.enable_progress_bar()
