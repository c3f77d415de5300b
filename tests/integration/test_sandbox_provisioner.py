"""The provisioner under jupyter_client's own kernel manager, as any other Jupyter tool would use it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.provisioning import KernelProvisionerFactory

from mappa_graph.sandboxes import describe_isolation
from mappa_graph.sandboxes.provisioner import BubblewrapProvisioner

if not describe_isolation()["usable"]:
    pytest.skip("no bubblewrap here", allow_module_level=True)


class Entry:
    name, value = "mappa-bubblewrap", "mappa_graph.sandboxes.provisioner:BubblewrapProvisioner"

    def load(self) -> type:
        return BubblewrapProvisioner


@pytest.fixture
async def manager(tmp_path: Path) -> Any:
    KernelProvisionerFactory.instance().provisioners["mappa-bubblewrap"] = Entry()  # what the installed entry point does
    made = AsyncKernelManager(connection_file=str(tmp_path / "connection.json"))
    stanza = {"provisioner_name": "mappa-bubblewrap", "config": {"limits": {"memory_mb": 512}, "preload": ["numpy"]}}
    made._kernel_spec = KernelSpec(argv=["python"], display_name="walled", language="python", metadata={"kernel_provisioner": stanza})
    await made.start_kernel()
    yield made
    await made.shutdown_kernel(now=True)


async def ask(client: Any, code: str) -> str:
    said: list[str] = []
    await client.execute_interactive(code, timeout=20, output_hook=lambda m: said.append(m["content"].get("text", "")))
    return "".join(said)


async def test_a_kernel_manager_gets_a_walled_kernel_that_restarts_and_ends(manager: Any) -> None:
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=30)
    said = await ask(
        client, "import os, sys; print(os.getcwd(), 'numpy' in sys.modules, os.path.exists('/etc/passwd'), 'HOME' in os.environ)"
    )
    assert said == "/sandbox/work True False True\n"
    await ask(client, "x = 1; open('kept', 'w').write('1')")
    workspace = manager.provisioner.workspace
    assert os.listdir(workspace) == ["kept"]
    assert await manager.is_alive()
    client.stop_channels()

    await manager.restart_kernel(now=True)
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=30)
    assert await ask(client, "print('x' in globals(), os.listdir('.') if 'os' in globals() else open('kept').read())") == "False 1\n"
    await ask(client, "import os; os.environ['y'] = '1'")

    await manager.interrupt_kernel()
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    assert not await manager.is_alive()
    assert not (await asyncio.to_thread(Path(workspace).exists))
