"""The README's tree is the tree: one line per file, in the words of the file's own first sentence.

`python -m tests.unit.test_readme` writes the tree anew into README.md.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("runtime", "flywheel", "connectors", "ui", "deploy", "tests")
SUFFIXES = {".py", ".sql", ".yaml"}
BLOCK = re.compile(r"(?<=<!-- tree -->\n)```\n.*?```\n(?=<!-- end of tree -->)", re.DOTALL)
WIDTH = 36


def tree() -> str:
    return "".join(f"{line}\n" for folder in FOLDERS for line in _lines(ROOT / folder, 0))


def _lines(folder: Path, depth: int) -> Iterator[str]:
    about = _first_sentence(folder / "__init__.py")
    yield _line(f"{folder.name}/", about, depth)
    entries = sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name))
    for path in entries:
        if path.is_dir() and any(path.rglob("*.*")) and path.name != "__pycache__":
            yield from _lines(path, depth + 1)
        elif path.suffix in SUFFIXES and path.name != "__init__.py":
            yield _line(path.name, _first_sentence(path), depth + 1)


def _line(name: str, about: str, depth: int) -> str:
    return f"{'  ' * depth}{name}".ljust(WIDTH) + f"  {about}".rstrip()


def _first_sentence(path: Path) -> str:
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
    else:
        comment = re.match(r"(?:#|--) (?!name:)(.*)", text)
        text = comment.group(1) if comment else ""
    return re.split(r"(?<=[.])\s", text)[0].rstrip(".")


def test_the_readme_shows_the_tree_as_it_is() -> None:
    shown = BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown is not None, "README.md has no tree"
    assert shown.group() == f"```\n{tree()}```\n", (
        "run: python -m tests.unit.test_readme, and commit README.md"
    )


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py" and not _first_sentence(path)
    ]
    assert silent == []


if __name__ == "__main__":
    readme = ROOT / "README.md"
    current = readme.read_text(encoding="utf-8")
    readme.write_text(BLOCK.sub(lambda _: f"```\n{tree()}```\n", current), encoding="utf-8")
