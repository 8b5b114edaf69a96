"""Snapshots: names that depend on content alone, files that are whole or absent."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InputError, SandboxError
from runtime.run import SnapshotId
from runtime.sandbox.snapshots import (
    SnapshotEntry,
    SnapshotRefused,
    SnapshotStore,
    digest_of_files,
    entries_of_files,
    place_of,
)

NAMES = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=8)
PATHS = st.lists(NAMES.filter(lambda n: n not in (".", "..")), min_size=1, max_size=3)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(PATHS.map("/".join), st.binary(max_size=20), max_size=6))
def test_files_come_back_and_their_id_is_known_beforehand(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    store = SnapshotStore(tmp_path_factory.getbasetemp() / "property")
    try:
        snapshot = store.put_files(files)
    except InputError:
        return
    assert snapshot == digest_of_files(files)
    assert store.files(snapshot) == files


def test_the_id_depends_on_content_alone(store: SnapshotStore) -> None:
    one = digest_of_files({"a": b"1", "b/c": b"2"})
    assert one == digest_of_files({"b/c": b"2", "./a": b"1"})
    others = [
        {"a": b"1", "b/c": b"3"},
        {"a": b"1", "b/d": b"2"},
        {"a": b"1"},
        {"a1": b"", "b/c": b"2"},
    ]
    assert len({one, *map(digest_of_files, others)}) == 5


def test_kind_and_mode_count(store: SnapshotStore) -> None:
    plain = store.put([SnapshotEntry("a", "file", 0o644, b"x")])
    assert store.put([SnapshotEntry("a", "file", 0o755, b"x")]) != plain
    assert store.put([SnapshotEntry("a", "link", 0o644, b"x")]) != plain


def test_entries_come_back_as_they_went_in(store: SnapshotStore) -> None:
    entries = [
        SnapshotEntry("a", "directory", 0o500),
        SnapshotEntry("a.txt", "file", 0o600, b"\0\xff"),
        SnapshotEntry("a/link", "link", 0o777, b"/etc/passwd"),
        SnapshotEntry(os.fsdecode(b"\xff\n"), "file", 0o644, b""),
    ]
    snapshot = store.put(entries)
    assert list(store.get(snapshot)) == entries
    assert set(store.files(snapshot)) == {"a.txt", os.fsdecode(b"\xff\n")}


def test_the_same_tree_is_stored_once(store: SnapshotStore, tmp_path: Path) -> None:
    assert store.put_files({"a": b"x"}) == store.put_files({"a": b"x"})
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"../a": b""},
        {"a/../b": b""},
        {"/a": b""},
        {"": b""},
        {".": b""},
        {"a\0": b""},
        {"a": b"", "a/b": b""},
        {"a": b"", "./a": b""},
        {"n" * 256: b""},
        {"a/" * 200 + "b": b""},
        {"\ud800": b""},
    ],
    ids=lambda files: repr(list(files))[:20],
)
def test_unusable_names_are_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(InputError):
        digest_of_files(files)


def test_a_name_outside_is_never_stored(store: SnapshotStore, tmp_path: Path) -> None:
    for path in ("../x", "/x", "a/../../x"):
        with pytest.raises(SnapshotRefused):
            store.put([SnapshotEntry(path, "file", 0o644, b"")])
    assert list(tmp_path.iterdir()) == []


def test_disorder_and_excess_are_refused(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, max_bytes=10, max_entries=2)
    b, a, c = (SnapshotEntry(name, "file", 0o644, b"1234") for name in "bac")
    for entries in ([b, a], [a, a], [a, b, c], [SnapshotEntry("a", "file", 0o644, b"x" * 11)]):
        with pytest.raises(SnapshotRefused):
            store.put(entries)


def test_a_failed_write_leaves_nothing(store: SnapshotStore, tmp_path: Path) -> None:
    def breaks() -> Iterator[SnapshotEntry]:
        yield from entries_of_files({"a": b"1"})
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.put(breaks())
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writers_file_is_swept_when_it_is_old(tmp_path: Path) -> None:
    old, young = tmp_path / ".incoming-old", tmp_path / ".incoming-young"
    old.write_bytes(b"")
    young.write_bytes(b"")
    os.utime(old, (0, 0))
    SnapshotStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [young.name]


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty"])
def test_damage_is_noticed(store: SnapshotStore, tmp_path: Path, damage: str) -> None:
    snapshot = store.put_files({"a": b"content", "b": b"more"})
    place = place_of(tmp_path, snapshot)
    raw = bytearray(place.read_bytes())
    if damage == "flip":
        raw[-1] ^= 1
    damaged = {"cut": raw[:-2], "grow": raw + b"x", "empty": b""}.get(damage, raw)
    place.write_bytes(damaged)
    with pytest.raises(SandboxError, match="damaged"):
        store.files(snapshot)


@pytest.mark.parametrize(
    "name", ["", "sha256:", "sha256:" + "A" * 64, "../../etc/passwd", "sha256:" + "/" * 64]
)
def test_a_bad_id_is_no_path(store: SnapshotStore, name: str) -> None:
    with pytest.raises(SandboxError, match="not a snapshot id"):
        store.files(SnapshotId(name))
