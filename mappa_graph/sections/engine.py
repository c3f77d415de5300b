"""Settings of what generates tokens, and of the server in front of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Section


class EngineConfig(Section):
    """What generates tokens. `local` runs the models in this process and needs no server."""

    kind: Literal["local"] = "local"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    threads: int | None = Field(default=None, ge=1)
    max_batch_tokens: int = Field(default=65_536, ge=64)
    """Most tokens (prompts and room for completions) decoded at once."""


class GatewayConfig(Section):
    """Where the OpenAI-compatible server listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65_535)
