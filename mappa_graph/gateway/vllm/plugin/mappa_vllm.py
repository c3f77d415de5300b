"""What runs inside the vLLM server: a weight-transfer engine over a shared path, a guard before every endpoint, a repair.

vLLM finds `register` through an entry point in the group `vllm.general_plugins` and calls it in each of its processes; this file is
put on the server's path, and nothing of it runs in ours. The one thing to know: no byte of a version is loaded before all of it was
checked. Its files must have the checksums that the request names, and hold exactly the tensors, with the shapes, of the model that
the server was started with. What fails before that leaves the model as it was, and says so (`refused`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BACKEND = "mappa_shared"
REFUSED = "refused before anything was loaded"
RESUME_AFTER = b"x-mappa-resume-after"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_OPEN = frozenset({"/health", "/ping"})


def register() -> None:
    """Registers the weight-transfer engine, and mends adapters on a CPU; vLLM may call it more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())
    _mend_adapters()


def _mend_adapters() -> None:
    """Adapters on a CPU: each one's rows together in one product, and none for rows without an adapter.

    vLLM's CPU wrapper copies an adapter's weights once for each token (of the head: the whole vocabulary's), which is most of what a step
    costs; it takes index -1, "no adapter", for the table's last one; and where the rows of the head are the tokens of one prompt
    (`prompt_logprobs`), it adds the adapters by the batch's requests, whose number is another, and the engine ends. Heads have no
    adapters here, so that then there is nothing to add.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU  # type: ignore[import-not-found]

    update = PunicaWrapperCPU.update_metadata
    if getattr(update, "mended", False):
        return

    def update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        self.rows_by_adapter, self.heads_by_adapter = by_adapter(self.token_lora_indices), by_adapter(self.sampler_indices)

    def add_lora_linear(
        self: Any, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, output_slices: Any, **kwargs: Any
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        _add_products(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, self.rows_by_adapter)

    def add_lora_logits(self: Any, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, **kwargs: Any) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        if x.shape[0] == self.sampler_indices.shape[0]:
            _add_products(y, x, (lora_a_stacked,), (lora_b_stacked,), scale, (y.shape[-1],), self.heads_by_adapter)

    update_metadata.mended = True  # type: ignore[attr-defined]
    PunicaWrapperCPU.update_metadata = update_metadata
    PunicaWrapperCPU.add_lora_linear = add_lora_linear
    PunicaWrapperCPU.add_lora_logits = add_lora_logits


def by_adapter(indices: Any) -> list[tuple[int, Any]]:
    """(adapter's place in the table, its rows) of each adapter among rows' `indices`, -1 being none; rows None = all there are."""
    found = indices.unique().tolist()
    return [(i, None if len(found) == 1 else (indices == i).nonzero().squeeze(1)) for i in found if i >= 0]


def _add_products(y: Any, x: Any, a_stacked: Any, b_stacked: Any, scale: float, widths: Any, groups: list[tuple[int, Any]]) -> None:
    """`y[rows, slice] += scale * x[rows] @ a[i].T @ b[i].T` for each slice and adapter; y: [rows, columns], a: [adapters, 1, rank, in],
    b: [adapters, 1, width, rank]. The middle is float32, as in vLLM's own kernels."""
    for i, rows in groups:
        part = (x if rows is None else x[rows]).float()
        start = 0
        for a, b, width in zip(a_stacked, b_stacked, widths, strict=True):
            a, b = (w[i].reshape(w.shape[-2:]) for w in (a, b))
            made = ((part @ a.float().T) * scale).to(y.dtype) @ b.to(y.dtype).T
            into = y[:, start : start + made.shape[1]]  # a head may be padded to more columns than its adapter has
            if rows is None:
                into += made[:, : into.shape[1]]
            else:
                into.index_add_(0, rows, made[:, : into.shape[1]])
            start += width


def check_files(folder: Path, files: dict[str, str]) -> None:
    """Raises ValueError unless each named file has the sha256 that it is said to have."""
    if not files:
        raise ValueError(f"no files of {folder} are named")

    def digest(name: str) -> str:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no file name")
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(8, len(files))) as pool:
        for (name, wanted), found in zip(files.items(), pool.map(digest, files), strict=True):
            if found != wanted:
                raise ValueError(f"{name} has checksum {found[:12]}…, {wanted[:12]}… was written: it is half a file, or another")


def shapes_of(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, from the headers of safetensors files alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    return shapes


def check_shapes(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], *, tied: bool) -> None:
    """Raises ValueError unless both hold the same tensors. With tied embeddings, either may leave the head out."""
    if tied:
        found, wanted = ({n: s for n, s in shapes.items() if n != HEAD} for shapes in (found, wanted))
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(f"{len(missing)} tensors are missing {missing[:3]}, {len(unknown)} are not this model's {unknown[:3]}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{name} has shape {list(found[name])}, the model has {list(shape)}")


def _engine_class() -> type:
    """The class is made here, so that this file can be read without vLLM."""
    from dataclasses import dataclass

    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class Init(WeightTransferInitInfo):
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):
        folder: str
        files: dict[str, str]
        """File name -> sha256."""

    class SharedPathEngine(WeightTransferEngine):
        """Reads a version from a folder that both sides see, tensor by tensor."""

        init_info_cls = Init
        update_info_cls = Update
        _shapes: dict[str, tuple[int, ...]] | None = None
        _loading = False

        def init_transfer_engine(self, init_info: Init) -> None:
            """Nothing to arrange: the two sides share a path."""

        def start_weight_update(self) -> None:
            """Nothing yet: the model stays whole until the files are known to be."""

        def receive_weights(self, update_info: Update) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # type: ignore[import-not-found]

            folder = Path(update_info.folder)
            paths = [folder / name for name in sorted(update_info.files)]
            try:
                check_files(folder, update_info.files)
                if self._shapes is None:
                    self._shapes = shapes_of(sorted(Path(self.model_config.model).glob("*.safetensors")))
                tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
                found = shapes_of(paths)
                check_shapes(found, self._shapes, tied=tied)
            except (OSError, ValueError, KeyError, struct.error) as error:
                raise ValueError(f"{REFUSED}: {error}") from error
            initialize_layerwise_reload(self.model)
            self._loading = True
            try:
                for path in paths:
                    with safe_open(path, framework="pt") as tensors:
                        self.model.load_weights(self._streamed(tensors, copy_head=tied and HEAD not in found))
            except BaseException:
                self.finish_weight_update()  # the model has its shape again, and the weights of nothing
                raise

        @staticmethod
        def _streamed(tensors: Any, *, copy_head: bool) -> Iterator[tuple[str, Any]]:
            """A file's tensors, one at a time. A tied head is given its embedding: a CPU keeps the head once more, in a form of its own."""
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                yield name, tensor
                if copy_head and name == EMBEDDING:
                    yield HEAD, tensor

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            if self._loading:
                self._loading = False
                finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Holds nothing."""

    return SharedPathEngine


class Guard:
    """ASGI middleware: asks for the server's key on every path (vLLM itself does under /v1 only), and ends forgotten pauses.

    A `POST /pause` that names seconds in `x-mappa-resume-after` is followed by a resume of the guard's own then, unless one came
    before: a client that dies in between leaves no server paused.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._key = f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode()
        self._pending: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN:
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        if len(self._key) > len(b"Bearer ") and not hmac.compare_digest(headers.get(b"authorization", b""), self._key):
            body = b'{"error": {"message": "the API key is missing or wrong", "type": "authentication_error", "code": 401}}'
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
            return await send({"type": "http.response.body", "body": body})
        if scope["path"] in ("/pause", "/resume") and self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if scope["path"] == "/pause" and (seconds := headers.get(RESUME_AFTER)) is not None:
            self._pending = asyncio.ensure_future(self._resume(scope, float(seconds)))
        return await self.app(scope, receive, send)

    async def _resume(self, scope: Any, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._pending = None

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(_: Any) -> None:
            pass

        own = {"type": "http", "asgi": scope["asgi"], "http_version": "1.1", "method": "POST", "scheme": scope["scheme"]}
        place = {"path": "/resume", "raw_path": b"/resume", "root_path": scope.get("root_path", ""), "query_string": b""}
        await self.app(
            {**own, **place, "headers": [], "client": None, "server": scope.get("server"), "app": scope.get("app")}, receive, send
        )
