"""The kernel: `ipykernel` on ipc sockets, without what nobody uses here.

The history database, the debugger (whose import alone costs more than all the rest of a forked kernel), configuration files, command line
and coloured tracebacks are off. The connection's key is handed over in memory; no connection file is read or written inside.

`prepare` is told by a rehearsal which modules a kernel's start imports late: a throw-away fork starts one, runs a cell, and sends the
names back. It also makes the IPython shell, half the work of a start, which every fork then takes over as its own: it has seen no code.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.modules.setdefault("debugpy", None)  # type: ignore[arg-type]

_PORTS = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")


def prepare(preload: list[str]) -> dict[str, str]:
    """Import all that a kernel needs, and `preload`; returns the error of every preload that failed. Leaves no thread behind."""
    importlib.import_module("ipykernel.kernelapp")
    failed = {}
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001
            failed[name] = f"{type(error).__name__}: {error}"
    for name in _rehearse():
        try:
            importlib.import_module(name)
        except ImportError:  # a name that only its importer could find: each kernel imports it by itself
            continue
    _make_shell()
    return failed


def _config() -> Any:
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShellApp.exec_PYTHONSTARTUP = False
    config.Completer.use_jedi = False
    config.IPKernelApp.log_level = 50
    return config


def _make_shell() -> Any:
    """The one shell of this process, or the one that it was forked with."""
    from ipykernel.compiler import XCachingCompiler
    from ipykernel.zmqshell import ZMQInteractiveShell
    from IPython.core.profiledir import ProfileDir

    if not ZMQInteractiveShell.initialized():
        with tempfile.TemporaryDirectory(prefix=".ipython-") as folder:  # every kernel gives it another
            profile = ProfileDir(location=folder)
            ZMQInteractiveShell.instance(config=_config(), profile_dir=profile, user_ns={}, compiler_class=XCachingCompiler)
    return ZMQInteractiveShell.instance()


def _rehearse() -> list[str]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            before = set(sys.modules)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1):
                os.dup2(null, fd)
            folder = tempfile.mkdtemp(prefix="r-")
            connection = {"ip": f"{folder}/k", "scratch": folder, "key": "rehearsal", **{port: i + 1 for i, port in enumerate(_PORTS)}}

            def ready() -> None:
                from IPython.core.getipython import get_ipython

                shell = get_ipython()
                shell.run_cell("import warnings\nsum(range(3))", store_history=True)
                shell.run_cell("1 / 0", store_history=True)
                names = [name for name in set(sys.modules) - before if not name.startswith("__")]
                os.write(write, json.dumps(names).encode())
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(0)

            run(connection, ready)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return sorted(json.loads(said)) if said else []


def run(connection: Mapping[str, Any], ready: Callable[[], None]) -> None:
    """Serve until told to shut down. `connection` holds ip, key and the five ports; `ready()` is called when all sockets are bound."""
    from ipykernel.kernelapp import IPKernelApp
    from IPython.core.profiledir import ProfileDir

    shell = _make_shell()

    class App(IPKernelApp):
        def parse_command_line(self, argv: list[str] | None = None) -> None:
            return

        def load_config_file(self, *_: Any, **__: Any) -> None:
            return

        def init_profile_dir(self) -> None:
            self.profile_dir = ProfileDir(location=tempfile.mkdtemp(prefix=".ipython-", dir=connection.get("scratch")))

        def init_connection_file(self) -> None:
            self.transport, self.ip = "ipc", connection["ip"]
            for port in _PORTS:
                setattr(self, port, connection[port])
            self.session.key = connection["key"].encode()

        def init_kernel(self) -> None:
            shell.profile_dir = self.profile_dir
            self.user_ns = shell.user_ns
            super().init_kernel()  # finds the shell that is there
            shell.parent = shell.kernel = self.kernel
            shell.starting_dir = os.getcwd()
            shell.history_manager.dir_hist[:] = [Path(shell.starting_dir)]

        def write_connection_file(self, **_: Any) -> None:
            return

        def log_connection_info(self) -> None:
            return

    _reseed()
    app = App.instance(config=_config())
    app.initialize([])
    if app.shell is not None:
        app.shell.events.register("post_execute", _drain)
        app.shell.user_ns["exit"] = app.shell.user_ns["quit"] = sys.exit  # ends the cell, as it ends a script, and not the kernel
    sys.path.insert(0, "")  # what the agent wrote can be imported, and can't take the place of what started the kernel
    ready()
    app.start()


def _drain() -> None:
    """Let what child processes and C code wrote to the real file descriptors arrive before the cell counts as done."""
    for stream in (sys.stdout, sys.stderr):
        fd = getattr(stream, "_fid", None)
        if fd is None:
            continue
        for _ in range(100):
            if not select.select([fd], [], [], 0)[0]:
                break
            time.sleep(0.001)  # the watching thread reads it


def _reseed() -> None:
    """A fork inherits the generators' states; two sessions must not draw the same numbers."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()
