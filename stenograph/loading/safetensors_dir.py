"""Safetensors files in a directory: one, or shards named by an index. Pickles are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stenograph.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(directory: Path) -> dict[Path, list[str] | None]:
    """Files to read -> the names to take from each (None: all). The index decides; strays beside it are ignored."""
    if (directory / INDEX).is_file():
        from stenograph.loading.source import read_json

        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{INDEX} has no weight_map.", remedy="Fetch the file again.")
        files: dict[Path, list[str] | None] = {}
        for name, file in sorted(weight_map.items()):
            path = directory / str(file)
            if path.parent != directory:
                raise ModelLoadError(f"{INDEX} names {file!r}, which lies outside the directory.")
            names = files.setdefault(path, [])
            assert names is not None
            names.append(name)
        missing = sorted(path.name for path in files if not path.is_file())
        if missing:
            raise ModelLoadError(f"{INDEX} names {', '.join(missing)}, not there.", remedy="Fetch the missing shards.")
        return files
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise ModelLoadError(
            f"{len(found)} safetensors files, but no {INDEX} that says what is in them.", remedy="Fetch the index."
        )
    pickles = sorted(p.name for pattern in PICKLES for p in directory.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"The weights are pickles ({pickles[0]}), which can run code when loaded and are refused.",
            remedy="Take a checkpoint in safetensors format, or convert this one.",
        )
    raise ModelLoadError(
        "The directory holds no safetensors files.",
        remedy="Fetch the weights, or use --load-format dummy for random ones.",
    )


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{path.name} is damaged or truncated ({error}).", remedy="Fetch the file again."
        ) from error


def count_weights(directory: Path) -> int:
    total = 0
    for path, names in weight_files(directory).items():
        if names is None:
            with _open(path) as file:
                total += len(file.keys())
        else:
            total += len(names)
    return total


def iterate_weights(directory: Path) -> Iterator[tuple[str, Any]]:
    """Each weight of each file, over the file's memory."""
    for path, names in weight_files(directory).items():
        with _open(path) as file:
            present = set(file.keys())
            for name in sorted(present) if names is None else names:
                if name not in present:
                    raise ModelLoadError(f"{path.name} lacks {name}, which {INDEX} says it holds.")
                yield name, file.get_tensor(name)
