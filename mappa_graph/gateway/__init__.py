"""The OpenAI-compatible server in front of the engines: capture, version aliases, hot swap.

Importing this loads neither torch nor an engine; take an engine by its module's name (`mappa_graph.gateway.local`).
"""

from .engine import Canary, Chunk, Completion, Engine, Request, RequestRefused
from .server import Gateway

__all__ = ["Canary", "Chunk", "Completion", "Engine", "Gateway", "Request", "RequestRefused"]
