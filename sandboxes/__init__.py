"""Jupyter kernels for agents' code: walled off, warm, one per episode.

    async with SandboxPool(size=2) as pool:
        async with pool.session() as box:
            execution = await box.run("print(6 * 7)")

See docs/sandbox.md for the threat model. The room imports nothing of the package but its records and errors.
"""

from __future__ import annotations

from .isolation import describe_isolation
from .ledger import Blame, Ledger
from .limits import Deadlines, Limits
from .pool import SandboxPool
from .preview import Preview
from .remote import RemotePool
from .session import Box
from .tool import as_text, code_blocks, python_tool, run_code_blocks

__all__ = [
    "Blame",
    "Box",
    "Deadlines",
    "Ledger",
    "Limits",
    "Preview",
    "RemotePool",
    "SandboxPool",
    "as_text",
    "code_blocks",
    "describe_isolation",
    "python_tool",
    "run_code_blocks",
]
