"""Adapter files: each fault is refused with its reason, and nothing half-written is loadable."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.release import shelf
from flywheel.release.inspection import (
    CONFIG,
    WEIGHTS,
    base_shapes,
    inspect_weights,
    normalised,
    rank_of,
    read_config,
)
from flywheel.release.tensor_file import read_entries
from flywheel.release.testing import lora_config, random_adapter, random_tensors, safetensors
from runtime.errors import AdapterRefused, StoreError

RANK = 4
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of one layer and eight wide: enough of one to judge adapters by."""
    folder = tmp_path_factory.mktemp("base")
    layer = "model.layers.0"
    modules = {f"{layer}.self_attn.{name}_proj": (8, 8) for name in "qkvo"}
    modules |= {f"{layer}.mlp.gate_proj": (16, 8), f"{layer}.mlp.down_proj": (8, 16)}
    tensors = {f"{name}.weight": np.zeros(shape, "<f4") for name, shape in modules.items()}
    tensors["model.norm.weight"] = np.ones(8, "<f4")
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


@pytest.fixture
def trained(tiny_base: Path, tmp_path: Path) -> Path:
    return random_adapter(tmp_path / "trained", tiny_base, rank=RANK, seed=1)


def judged(folder: Path, base: Path, wanted: int | None = None) -> int:
    """What registering does with the files before it believes them; returns the rank."""
    shelf.refuse_pickles(folder)
    rank = rank_of(read_config(shelf.read_small(folder, CONFIG)), wanted)
    shelf.digest_of(folder)
    inspect_weights(folder / WEIGHTS, rank, base_shapes(base))
    return rank


def reason(call: Callable[[], Any]) -> str:
    with pytest.raises(AdapterRefused) as caught:
        call()
    assert len(str(caught.value)) > 20, "a refusal explains itself"
    return caught.value.detail["reason"]


def test_an_honest_adapter_is_taken(trained: Path, tiny_base: Path) -> None:
    assert judged(trained, tiny_base) == RANK
    assert judged(trained, tiny_base, RANK) == RANK


def test_the_base_says_which_modules_there_are(tiny_base: Path) -> None:
    shapes = base_shapes(tiny_base)
    assert shapes["model.layers.0.mlp.gate_proj"] == (16, 8)
    assert "model.norm" not in shapes


# ---------------------------------------------------------------- the configuration


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"peft_type": "IA3"}, "wrong_config"),
        ({"use_dora": True}, "wrong_config"),
        ({"rank_pattern": {"q_proj": 2}}, "wrong_config"),
        ({"modules_to_save": ["lm_head"]}, "wrong_config"),
        ({"auto_mapping": {"parent_library": "os"}}, "wrong_config"),
        ({"bias": "all"}, "wrong_config"),
        ({"lora_alpha": float("nan")}, "wrong_config"),
        ({"lora_alpha": None}, "wrong_config"),
        ({"r": 0}, "wrong_rank"),
        ({"r": 100_000}, "wrong_rank"),
        ({"r": True}, "wrong_rank"),
        ({"r": RANK + 1}, "wrong_rank"),
    ],
)
def test_a_wrong_configuration(
    trained: Path, tiny_base: Path, change: dict[str, Any], why: str
) -> None:
    (trained / CONFIG).write_text(json.dumps({**lora_config(RANK), **change}))
    assert reason(lambda: judged(trained, tiny_base)) == why


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_configuration_that_is_none(trained: Path, tiny_base: Path, content: bytes) -> None:
    (trained / CONFIG).write_bytes(content)
    assert reason(lambda: judged(trained, tiny_base)) == "wrong_config"


def test_a_rank_other_than_the_recipes(trained: Path, tiny_base: Path) -> None:
    assert reason(lambda: judged(trained, tiny_base, RANK * 2)) == "wrong_rank"


def test_no_path_of_the_training_machine_is_kept() -> None:
    config = {**lora_config(RANK), "target_modules": ["v_proj", "q_proj"]}
    kept = json.loads(normalised(config, "the-base"))
    assert kept["base_model_name_or_path"] == "the-base"
    assert kept["target_modules"] == ["q_proj", "v_proj"]
    assert normalised(config, "b") == normalised(dict(reversed(config.items())), "b")


# ---------------------------------------------------------------- the tensors


def _foreign(tensors: Tensors) -> None:
    tensors["base_model.model.lm_head.weight"] = np.zeros((2, 2), "<f4")


def _elsewhere(tensors: Tensors) -> None:
    for half in "AB":
        key = QUERY.format(half)
        tensors[key.replace("layers.0.", "layers.9.")] = tensors.pop(key)


def _narrow(tensors: Tensors) -> None:
    tensors[QUERY.format("A")] = tensors[QUERY.format("A")][:, :-1]


def _thin(tensors: Tensors) -> None:
    tensors[QUERY.format("A")] = tensors[QUERY.format("A")][:-1]


def _poison(value: float) -> Callable[[Tensors], None]:
    def poison(tensors: Tensors) -> None:
        tensors[QUERY.format("B")][3, 1] = value

    return poison


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_foreign, "unknown_tensor"),
        (_elsewhere, "wrong_base"),
        (_narrow, "wrong_base"),
        (_thin, "wrong_rank"),
        (lambda tensors: tensors.pop(QUERY.format("A")), "half_a_pair"),
        (lambda tensors: tensors.clear(), "empty"),
        (_poison(float("nan")), "not_finite"),
        (_poison(float("-inf")), "not_finite"),
    ],
)
def test_wrong_tensors(
    trained: Path, tiny_base: Path, damage: Callable[[Tensors], Any], why: str
) -> None:
    tensors = random_tensors(tiny_base, rank=RANK)
    damage(tensors)
    (trained / WEIGHTS).write_bytes(safetensors(tensors))
    assert reason(lambda: judged(trained, tiny_base)) == why


@pytest.mark.parametrize(
    ("dtype", "nan"), [("BF16", 0x7FC1), ("F16", 0x7E00), ("BF16", 0xFF80), ("F16", 0xFC00)]
)
def test_half_precision_is_looked_through(
    trained: Path, tiny_base: Path, dtype: str, nan: int
) -> None:
    def written(value: int) -> None:
        header: dict[str, Any] = {}
        body = b""
        for name, tensor in random_tensors(tiny_base, rank=RANK).items():
            bits = np.full(tensor.shape, 0x3C00, "<u2")
            bits.flat[-1] = value
            header[name] = {
                "dtype": dtype,
                "shape": list(tensor.shape),
                "data_offsets": [len(body), len(body) + bits.nbytes],
            }
            body += bits.tobytes()
        head = json.dumps(header).encode()
        (trained / WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head + body)

    written(0x3C00)
    assert judged(trained, tiny_base) == RANK
    written(nan)
    assert reason(lambda: judged(trained, tiny_base)) == "not_finite"


# ---------------------------------------------------------------- the file


def _headed(header: Any, body: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body


def _tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "truncated"),
        (b"\x10\x00", "truncated"),
        (b"PK\x03\x04" + b"x" * 64, "pickle"),
        (b"\x80\x04\x95" + b"x" * 64, "pickle"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "huge_header"),
        ((5 << 20).to_bytes(8, "little") + b" " * (5 << 20), "huge_header"),
        ((100).to_bytes(8, "little") + b"{}", "truncated"),
        (_headed(b"[" * 5_000), "invalid_header"),
        (_headed(b"not json"), "invalid_header"),
        (_headed([]), "invalid_header"),
        (_headed(b'{"a": 1, "a": 1}'), "invalid_header"),
        (_headed({"a": _tensor(extra=1)}, bytes(8)), "invalid_header"),
        (_headed({"a": _tensor(shape=[-2])}, bytes(8)), "invalid_header"),
        (_headed({"a": _tensor(shape=[3])}, bytes(8)), "invalid_header"),
        (_headed({"a": _tensor(dtype="Q4")}, bytes(8)), "invalid_header"),
        (_headed({"a": _tensor(data_offsets=[8, 0])}, bytes(8)), "invalid_header"),
        (_headed({"a": _tensor(), "b": _tensor()}, bytes(8)), "invalid_header"),
        (_headed({"a": _tensor(data_offsets=[4, 12])}, bytes(12)), "invalid_header"),
        (_headed({"a": _tensor()}, bytes(7)), "truncated"),
        (_headed({"a": _tensor()}, bytes(9)), "truncated"),
    ],
)
def test_files_that_are_no_safetensors(
    trained: Path, tiny_base: Path, content: bytes, why: str
) -> None:
    (trained / WEIGHTS).write_bytes(content)
    assert reason(lambda: judged(trained, tiny_base)) == why


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=200), framed=st.booleans())
def test_any_bytes_are_refused_or_understood(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, framed: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / WEIGHTS
    path.write_bytes(_headed(content) if framed else content)
    understood: object = None
    try:
        understood = read_entries(path)
    except AdapterRefused as error:
        understood = error.detail["reason"]
    assert understood in ({}, "truncated", "invalid_header", "huge_header", "pickle")


def test_pickled_weights_are_refused_and_not_read(trained: Path, tiny_base: Path) -> None:
    (trained / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    assert reason(lambda: judged(trained, tiny_base)) == "pickle"


def test_links_and_other_things_are_refused(trained: Path, tiny_base: Path, tmp_path: Path) -> None:
    weights = trained / WEIGHTS
    real = weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(real)
    assert reason(lambda: judged(trained, tiny_base)) == "symlink"
    weights.unlink()
    os.mkfifo(weights)
    assert reason(lambda: judged(trained, tiny_base)) == "not_a_file"
    weights.unlink()
    assert reason(lambda: judged(trained, tiny_base)) == "missing"
    linked = tmp_path / "linked"
    linked.symlink_to(trained)
    assert reason(lambda: judged(linked, tiny_base)) == "symlink"


def test_a_huge_file_is_refused_before_it_is_read(trained: Path, tiny_base: Path) -> None:
    with (trained / WEIGHTS).open("r+b") as file:
        file.truncate(shelf.MAX_WEIGHTS_BYTES + 1)
    assert reason(lambda: judged(trained, tiny_base)) == "too_large"


# ---------------------------------------------------------------- the shelf


def _fill(part: Path, trained: Path) -> None:
    shelf.copy(trained, part, WEIGHTS)
    shelf.write(part, CONFIG, (trained / CONFIG).read_bytes())


def test_a_placed_folder_is_whole_and_read_only(trained: Path, tmp_path: Path) -> None:
    with shelf.part(tmp_path / "shelf") as part:
        _fill(part, trained)
        final = shelf.place(part, "name")
    assert shelf.digest_of(final) == shelf.digest_of(trained)
    assert [path.name for path in final.parent.iterdir()] == ["name"]
    assert {path.stat().st_mode & 0o777 for path in final.iterdir()} == {0o444}


def test_one_flipped_byte_changes_the_digest(trained: Path) -> None:
    before = shelf.digest_of(trained)
    content = bytearray((trained / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (trained / WEIGHTS).write_bytes(content)
    assert shelf.digest_of(trained) != before


def test_what_an_unregistered_attempt_left_is_replaced(trained: Path, tmp_path: Path) -> None:
    left = tmp_path / "shelf" / "name"
    left.mkdir(parents=True)
    (left / "half").write_text("written")
    with shelf.part(tmp_path / "shelf") as part:
        _fill(part, trained)
        shelf.place(part, "name")
    assert not (left / "half").exists()
    assert [path.name for path in left.parent.iterdir()] == ["name"]


def test_a_full_disk_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    too_small = (trained / WEIGHTS).stat().st_size // 2

    def saved() -> None:
        with shelf.part(tmp_path / "shelf") as part:
            resource.setrlimit(resource.RLIMIT_FSIZE, (too_small, hard))
            _fill(part, trained)

    try:
        with pytest.raises(StoreError, match="what serves goes on serving"):
            saved()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "shelf").iterdir()) == []


KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from flywheel.release import shelf

def never_synced(descriptor):
    print("saving", flush=True)
    signal.pause()

os.fsync = never_synced
with shelf.part(Path(sys.argv[2])) as part:
    shelf.copy(Path(sys.argv[1]), part, "adapter_model.safetensors")
    shelf.place(part, "name")
"""


def test_kill_9_during_a_save_leaves_only_what_is_swept(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shelf"
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(trained), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGKILL)
    (left,) = folder.iterdir()
    assert left.name.startswith(".part-")
    assert shelf.sweep(folder) == [], "it may belong to a live process"
    assert shelf.sweep(folder, older_than=0) == [left.name]
    assert list(folder.iterdir()) == []
