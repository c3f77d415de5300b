from __future__ import annotations

import os
from pathlib import Path

import pytest

from mappa_graph.errors import SandboxError
from mappa_graph.sandboxes.root import Root, sweep
from mappa_graph.sandboxes.workspace import DEPTH, Workspace, remove_tree


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "w", limit_entries=100)
    made.create()
    return made


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b", "/".join(["d"] * (DEPTH + 1))])
def test_a_name_outside_the_workspace_is_refused(workspace: Workspace, name: str) -> None:
    with pytest.raises(SandboxError, match="not inside the workspace"):
        workspace.put(name, b"x")
    with pytest.raises(SandboxError, match="not inside the workspace"):
        workspace.get(name)


def test_put_and_get_round_trip_bytes_text_and_paths(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"\x00\xff")
    workspace.put("a/b/c.bin", tmp_path / "source")
    workspace.put("t.txt", "ä")
    assert workspace.get("a/b/c.bin") == b"\x00\xff"
    assert workspace.get("t.txt") == "ä".encode()
    assert not (tmp_path / "w" / "a" / "b" / "c.bin").is_symlink()
    with pytest.raises(SandboxError, match="more than 1"):
        workspace.get("t.txt", limit=1)


def test_links_left_by_an_agent_are_not_followed(workspace: Workspace, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    os.symlink(secret, workspace.path / "link")
    os.symlink(tmp_path, workspace.path / "folder")
    for name in ("link", "folder/secret"):
        with pytest.raises(SandboxError):
            workspace.get(name)
    with pytest.raises(SandboxError):
        workspace.put("folder/new", b"x")
    workspace.put("link", b"mine")
    assert secret.read_text() == "s3cret"
    assert workspace.get("link") == b"mine"
    assert not (tmp_path / "new").exists()
    assert "folder/secret" not in workspace.snapshot().files


def test_a_pipe_does_not_block_the_host(workspace: Workspace) -> None:
    os.mkfifo(workspace.path / "pipe")
    with pytest.raises(SandboxError, match="not a regular file"):
        workspace.get("pipe")
    assert workspace.digest("pipe") == ""
    assert workspace.snapshot().files == {}


def test_changes_name_what_happened_to_each_file(workspace: Workspace) -> None:
    for name in ("same", "changed", "gone"):
        workspace.put(name, "1")
    before = workspace.snapshot()
    (workspace.path / "changed").write_text("2")
    os.utime(workspace.path / "changed", ns=(0, before.files["changed"].mtime_ns))
    (workspace.path / "gone").unlink()
    workspace.put("new", b"abc")
    changes = workspace.changes(before.files, workspace.snapshot().files)
    assert [(c.path, c.change, c.size) for c in changes] == [("changed", "changed", 1), ("gone", "deleted", 0), ("new", "created", 3)]
    assert changes[2].sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_listing_is_bounded_in_number_and_depth(workspace: Workspace) -> None:
    for i in range(300):
        (workspace.path / f"f{i}").touch()
    found = workspace.snapshot()
    assert found.cut
    assert len(found.files) <= 201


def test_a_tree_too_deep_for_recursion_is_listed_in_part_and_removed_whole(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "w", limit_entries=10_000)
    workspace.create()
    here = os.open(workspace.path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    assert workspace.snapshot().cut
    workspace.remove()
    assert not workspace.path.exists()


def test_removal_does_not_follow_links_and_removes_locked_folders(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    tree = tmp_path / "tree"
    (tree / "locked").mkdir(parents=True)
    (tree / "locked" / "x").touch()
    os.symlink(tmp_path / "kept", tree / "link")
    os.chmod(tree / "locked", 0)
    remove_tree(tree)
    assert not tree.exists()
    assert (tmp_path / "kept" / "file").exists()


def test_a_root_in_use_is_not_swept_and_an_abandoned_one_is(tmp_path: Path) -> None:
    root = Root(tmp_path)
    assert sweep(tmp_path) == []
    assert root.sessions.is_dir()
    while root._locks:
        os.close(root._locks.pop())  # what the kernel does when the owner is killed
    assert sweep(tmp_path) == [root.sessions.parent]
    assert not root.sessions.exists()


def test_a_long_root_keeps_socket_paths_short(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    root = Root(long)
    try:
        assert root.sessions.is_relative_to(long)
        assert len(str(root.connections)) < 70
    finally:
        root.remove()
    assert not root.connections.exists()
    assert not root.sessions.exists()


def test_the_short_folder_of_a_killed_owner_with_a_long_root_goes_with_the_next(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    killed = Root(long)
    while killed._locks:
        os.close(killed._locks.pop())
    root = Root(long)
    root.remove()
    assert not killed.connections.exists() and not killed.sessions.exists()
