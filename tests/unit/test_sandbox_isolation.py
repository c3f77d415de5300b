from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mappa_graph.doctor import examine_sandbox
from mappa_graph.errors import ConfigError, SandboxError
from mappa_graph.report import write_report
from mappa_graph.sandboxes import SandboxPool, describe_isolation, isolation
from mappa_graph.sandboxes.isolation import Isolation, interpreter_binds, outer_command
from mappa_graph.sandboxes.limits import Limits
from tests.fakes.rundir import make_run


def test_without_bubblewrap_the_pool_refuses_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_find", lambda: (None, ""))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap") as caught:
        SandboxPool()
    assert 'isolation="none"' in str(caught.value)
    told = describe_isolation()
    assert told["usable"] is False
    assert "apt-get install bubblewrap" in told["error"]


def test_isolation_none_is_only_had_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_find", lambda: (None, ""))
    assert describe_isolation("none")["wall"] == "none"
    for wrong in ("off", "", "None"):
        with pytest.raises(SandboxError, match="isolation is"):
            SandboxPool(isolation=wrong)


def test_a_pool_that_can_not_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_kernels is 1"):
        SandboxPool(size=2, max_kernels=1, isolation="none")


def test_no_folder_around_the_interpreter_is_bound() -> None:
    prefixes = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.base_prefix).resolve()}
    for bound in interpreter_binds():
        assert bound.parent in prefixes
    assert not any(Path.home().is_relative_to(bound) or Path.cwd().is_relative_to(bound) for bound in interpreter_binds())


@pytest.mark.parametrize("as_root", [True, False])
@pytest.mark.parametrize("wall", ["full", "process"])
def test_the_outer_command_unshares_everything_and_passes_no_variable(monkeypatch: pytest.MonkeyPatch, wall: str, as_root: bool) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    command = outer_command(Isolation(wall, "bwrap", as_root=as_root), Limits(), [])  # type: ignore[arg-type]
    for flag in ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent", "--new-session", "--clearenv", "--remount-ro"):
        assert flag in command
    assert "s3cret" not in " ".join(command)
    assert ("--unshare-user" in command) == (wall == "process" or not as_root)
    assert ("--cap-add" in command) == (wall == "full")


def test_the_report_says_how_each_limit_is_enforced() -> None:
    told = describe_isolation()
    if not told["usable"]:
        pytest.skip(told["error"])
    assert told["wall"] in ("full", "process")
    assert set(told["limits"]) >= {"memory", "processes", "cpu_time", "file_size", "open_files", "workspace", "output"}
    if os.geteuid() == 0 and told["wall"] == "full" and "cgroup" not in told["limits"]["processes"]:
        assert told["own_user_per_session"] == (told["limits"]["processes"] == "RLIMIT_NPROC, enforced")


def test_doctor_says_which_wall_and_what_enforces_each_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    told = describe_isolation()
    if not told["usable"]:
        pytest.skip(told["error"])
    rows = {check.part: check for check in examine_sandbox(describe_isolation())}
    assert told["wall"] in rows["sandbox wall"].detail
    for name, how in told["limits"].items():
        assert rows[f"limit on {name.replace('_', ' ')}"].detail == how
    monkeypatch.setattr(isolation.cgroups, "probe", isolation.cgroups.ControlGroups)
    rows = {check.part: check for check in examine_sandbox(describe_isolation())}
    assert rows["limit on memory"].detail == "RLIMIT_AS per process"
    assert (rows["limit on cpus"].state, rows["limit on cpus"].detail) == ("optional", "not enforced")


def test_doctor_counts_a_machine_without_bubblewrap_as_lacking_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_find", lambda: (None, ""))
    (only,) = examine_sandbox(describe_isolation())
    assert only.state == "missing" and "apt-get install bubblewrap" in only.detail


@pytest.mark.parametrize("wall", ["none", "full"])
def test_a_run_without_isolation_says_so_at_the_head_of_its_report(tmp_path: Path, wall: str) -> None:
    folder = make_run(tmp_path / "run", iterations=1, per_iteration=2, heldout=0)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "isolation": wall}))
    head = write_report(folder).read_text("utf-8").partition('<header class="head">')[2].partition("</header>")[0]
    assert ('<p class="note">Agents' in head and "isolation: none" in head) == (wall == "none")
