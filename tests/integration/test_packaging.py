"""What is installed is whole: a wheel, and a wheel made from the sdist, hold all four rooms and their data files."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUST = (
    "mappa_graph/py.typed",
    "mappa_graph/graphs/mathchat/__init__.py",
    "mappa_graph/trainers/loop.py",
    "mappa_graph/sandboxes/__init__.py",
    "mappa_graph/configs/demo.yaml",
    "mappa_graph/graphs/dsbench/__init__.py",
    "mappa_graph/gateway/vllm/plugin/mappa_vllm.py",
)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the files that git tracks or would track, so that no build folder is left in the tree."""
    target = tmp_path_factory.mktemp("source") / "tree"
    names = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in names:
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def build(source: Path, out: Path, kind: str) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), ".", cwd=source)
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def check_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert not [n for n in names if n.startswith(("tests/", "docs/", "graphs/", "trainers/", "sandboxes/"))]
        for name in MUST:
            assert name in names, name
        archive.extractall(tmp_path / "site")
    code = (
        "import mappa_graph, mappa_graph.cli\n"
        "from mappa_graph.graphs import mathchat\n"
        "from mappa_graph.trainers import discounted_returns\n"
        "from mappa_graph.sandboxes import SandboxPool\n"
        "print(mappa_graph.__file__, mathchat.__file__)"
    )
    # -S leaves out site's own work, and with it the editable install; the packages beside it are put back by path
    paths = [str(tmp_path / "site"), sysconfig.get_path("purelib")]
    out = run(sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}", cwd=tmp_path)
    assert out.count(str(tmp_path / "site")) == 2


def test_a_wheel_holds_every_room_and_imports_from_elsewhere(source, tmp_path):
    check_wheel(build(source, tmp_path / "out", "wheel"), tmp_path)


def test_an_sdist_makes_the_same_wheel(source, tmp_path):
    archive = build(source, tmp_path / "out", "sdist")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    tree = next((tmp_path / "unpacked").iterdir())
    check_wheel(build(tree, tmp_path / "wheel", "wheel"), tmp_path)


def test_the_development_install_is_editable():
    import mappa_graph
    from mappa_graph.graphs import mathchat

    assert Path(mappa_graph.__file__).parent == ROOT / "mappa_graph"
    assert Path(mathchat.__file__).resolve() == ROOT / "graphs" / "mathchat" / "__init__.py"
