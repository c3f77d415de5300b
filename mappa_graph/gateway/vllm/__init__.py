"""vLLM behind the gateway, in an environment and processes of its own. Nothing here imports vLLM."""

from .engine import VllmEngine
from .manifest import write_manifest

__all__ = ["VllmEngine", "write_manifest"]
