"""The chat model behind an LLM coach: made from a name, told apart from others, and asked with or without structured output."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel
from pydantic import SecretStr

from ..client import detached
from ..errors import ConfigError


def make_model(model: BaseChatModel | str, timeout_s: float, settings: Mapping[str, Any] | None = None) -> BaseChatModel:
    """A chat model, or the one that "provider:model" names, made with `settings` and without retries of its own.

    It shares no HTTP client with the app's models: a coach lives on an event loop of its own.

    Raises `ConfigError` if the name has no provider, or the provider's package or key is missing.
    """
    if isinstance(model, BaseChatModel):
        if settings:
            raise ConfigError("model_kwargs can't take effect on a model that is made already", hint="set them where you make the model")
        return detached(model)
    if not isinstance(model, str):
        raise ConfigError(f"the coach's model is a {type(model).__name__}", hint='give a LangChain chat model, or "provider:model"')
    provider, _, name = model.partition(":")
    if not name:
        raise ConfigError(f"the coach's model {model!r} names no provider", hint='write "provider:model", such as "openai:gpt-5-mini"')
    settings = {"timeout": timeout_s, "max_retries": 0, **(settings or {})}
    if provider == "openai":
        settings.setdefault("include_response_headers", True)
    try:
        if importlib.util.find_spec("langchain") is not None:
            from langchain.chat_models import init_chat_model

            return detached(init_chat_model(model, **settings))
        if provider == "openai":
            from langchain_openai import ChatOpenAI

            return detached(ChatOpenAI(model=name, **settings))
    except Exception as error:
        raise ConfigError(
            f"can't make the coach's model {model!r}: {error}",
            hint=f"install the provider's package (pip install langchain-{provider.replace('_', '-')}) and set its API key",
        ) from error
    raise ConfigError(f"provider {provider!r} needs LangChain", hint=f"pip install langchain langchain-{provider.replace('_', '-')}")


def identity(model: BaseChatModel) -> tuple[str, str]:
    """`("provider:model", settings)`: what a coach is called, and what else tells its answers apart (for the cache's key)."""
    params = model._get_ls_params()
    provider = str(params.get("ls_provider") or model._llm_type)
    name = params.get("ls_model_name") or getattr(model, "model_name", None) or getattr(model, "model", None) or type(model).__name__
    address = getattr(model, "openai_api_base", None) or getattr(model, "base_url", None) or ""
    return f"{provider}:{name}", f"{address}|{params.get('ls_temperature')}|{params.get('ls_max_tokens')}"


def structured(model: BaseChatModel, schema: Mapping[str, Any]) -> Any | None:
    """The model bound to a schema, so that it answers `{"raw": message, …}`; None where it has no structured output."""
    extra: dict[str, Any] = {}
    if any(base.__module__.startswith("langchain_openai") for base in type(model).__mro__):
        extra = {"method": "json_schema", "strict": True}
    try:
        return model.with_structured_output(dict(schema), include_raw=True, **extra)
    except (NotImplementedError, ValueError, TypeError):
        return None


def without_secrets(text: str, model: BaseChatModel) -> str:
    """A text (an error of the provider, say, that quotes the request) with the model's keys taken out."""
    for name in type(model).model_fields:
        value = getattr(model, name, None)
        secret = value.get_secret_value() if isinstance(value, SecretStr) else ""
        if secret:
            text = text.replace(secret, "***")
    return text


def tokens_used(message: Any) -> tuple[int, int] | None:
    """Prompt and completion tokens of a reply, where the provider said."""
    usage = getattr(message, "usage_metadata", None)
    if not usage:
        return None
    return max(0, int(usage.get("input_tokens") or 0)), max(0, int(usage.get("output_tokens") or 0))


def estimate(text: str) -> int:
    """About how many tokens a text has; errs on the high side for English."""
    return len(text) // 3 + 16
