"""Whether a server can do what is asked of it, found out when it starts rather than in the middle of a run."""

from __future__ import annotations

from ...errors import EngineError
from .supervisor import Server


async def check(server: Server, mode: str, transfer: str) -> None:
    """Raises `EngineError`, with the flag to add, where a server can't do what the mode needs; ends a pause that it was left in."""
    can, url = server.capabilities, server.control.url
    wants = f"{url} (vLLM {can.version})"
    if not can.token_ids:
        raise EngineError(f"{wants} returns no token ids, so that nothing of it can be trained on", hint="use vLLM 0.10.2 or newer")
    if not can.processed_logprobs:
        raise EngineError(
            f"{wants} reports log-probs that are not those it samples by", hint="start it with --logprobs-mode processed_logprobs"
        )
    if mode == "lora" and not can.lora:
        raise EngineError(
            f"{wants} can't load adapters while it runs", hint="start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        )
    if mode == "full":
        if not can.weights:
            raise EngineError(
                f"{wants} can't swap weights",
                hint="start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{\"backend\": …}'",
            )
        if (await server.control.get("/is_paused"))["is_paused"]:
            await server.control.resume()
        if transfer == "shared":
            try:
                await server.control.post("/init_weight_transfer_engine", {"init_info": {}})
            except EngineError as error:
                raise EngineError(
                    f"{wants} does not take weights from a shared folder: {error}",
                    hint='start it with our plug-in and --weight-transfer-config \'{"backend": "mappa_shared"}\'; see docs/serving.md',
                ) from error
