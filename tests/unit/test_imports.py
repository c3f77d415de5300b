"""Who may import whom, and what an app must not be made to load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("graphs", "trainers", "sandboxes")


def imported(path: Path, package: str) -> set[str]:
    """Absolute names of all modules that a file imports, at any depth."""
    found: set[str] = set()
    parts = package.split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module or "") if p)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def files(room: str) -> list[tuple[Path, str]]:
    top = ROOT / room
    return [
        (p, "mappa_graph." * (room != "mappa_graph") + ".".join((room, *p.relative_to(top).parts[:-1])))
        for p in sorted(top.rglob("*.py"))
        if not any(parent.is_symlink() for parent in p.parents)
    ]


def rooms_of(names: set[str]) -> set[str]:
    """Which of the four rooms a set of imported names reaches into."""
    reached = set()
    for name in names:
        parts = name.split(".")
        if parts[0] in ROOMS:
            reached.add(parts[0])
        elif parts[0] == "mappa_graph":
            reached.add(parts[1] if len(parts) > 1 and parts[1] in ROOMS else "mappa_graph")
    return reached


def test_the_library_imports_no_room_but_in_the_command_line():
    for path, package in files("mappa_graph"):
        if path.parent.name != "commands":
            assert rooms_of(imported(path, package)) <= {"mappa_graph"}, path


def test_commands_import_rooms_inside_their_functions_only():
    for path in (ROOT / "mappa_graph" / "commands").glob("*.py"):
        top = {n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.Import | ast.ImportFrom)}
        names = {f"{n.module}" for n in top if isinstance(n, ast.ImportFrom)}
        assert not {n for n in names if n.split(".")[0] in ROOMS}, path


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("graphs", {"mappa_graph", "sandboxes", "graphs"}),
        ("trainers", {"mappa_graph", "trainers"}),
        ("sandboxes", {"mappa_graph", "sandboxes"}),
    ],
)
def test_each_room_imports_what_it_may(room, allowed):
    for path, package in files(room):
        assert rooms_of(imported(path, package)) <= allowed, path


def test_sandboxes_know_of_the_library_only_records_and_errors():
    for path, package in files("sandboxes"):
        for name in imported(path, package):
            if name.startswith("mappa_graph.") and not name.startswith("mappa_graph.sandboxes"):
                assert name.startswith(("mappa_graph.record", "mappa_graph.errors")), (path, name)


def test_rooms_are_imported_under_the_package_only():
    for room in (*ROOMS, "mappa_graph"):
        for path, package in files(room):
            assert not {n for n in imported(path, package) if n.split(".")[0] in ROOMS}, path


def test_an_app_loads_neither_torch_nor_vllm():
    modules = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p, _ in files("mappa_graph")
        if not p.is_relative_to(ROOT / "mappa_graph/gateway/local")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n    importlib.import_module(name)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'trl'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_modules_stay_small_enough_to_read():
    for room in (*ROOMS, "mappa_graph"):
        for path, _ in files(room):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 460, path
