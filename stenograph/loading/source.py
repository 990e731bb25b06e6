"""Where a model comes from: a directory in the Hugging Face layout, a GGUF file, the demo model, or a hub id.

Opening reads configuration alone; weights are read when the model asks for them. No torch is imported before that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stenograph.config.facts import ModelFacts, token_ids
from stenograph.errors import ModelLoadError

DEMO_MODEL = "smollm2-135m"
KNOWN_NAMES = f"Name a directory, a .gguf file, a Hugging Face id such as Qwen/Qwen3-0.6B, or {DEMO_MODEL}."
FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """An opened checkpoint.

    name               as it was asked for
    path               the directory, or the .gguf file
    format             "safetensors", "gguf" or "dummy"
    config             config.json, or what a GGUF file says in that layout
    generation_config  generation_config.json, or {}
    eos_token_ids      the union of what configuration, generation configuration and tokenizer call an end
    metadata           a GGUF file's key-values, or {}
    """

    name: str
    path: Path
    format: str
    config: dict[str, Any]
    facts: ModelFacts
    generation_config: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict, repr=False)
    gguf: Any = field(default=None, repr=False)  # GGUFFile

    def weights(self) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, tensor or `QuantizedTensor`) of every weight in the files."""
        if self.gguf is not None:
            return self.gguf.weights()
        from stenograph.loading.safetensors_dir import iterate_weights

        return iterate_weights(self.path)

    def num_weights(self) -> int:
        if self.gguf is not None:
            return len(self.gguf.tensors)
        from stenograph.loading.safetensors_dir import count_weights

        return count_weights(self.path)

    def check_files(self) -> None:
        """Raises `ModelLoadError` where weight files are missing or only pickles are there."""
        if self.format == "safetensors":
            from stenograph.loading.safetensors_dir import weight_files

            weight_files(self.path)


def open_model(
    name_or_path: str, *, load_format: str = "auto", trust_remote_code: bool = False, weights: bool = True
) -> ModelSource:
    """Raises `ModelLoadError` with a remedy for whatever can't be opened. Without `weights`, none need be there.

    `trust_remote_code` is accepted for tokenizers that bring code; models are ours, so no model code is ever run.
    """
    if load_format not in FORMATS:
        raise ModelLoadError(f"load_format is {load_format!r}.", remedy=f"Choose one of {', '.join(FORMATS)}.")
    source = _open_preset(name_or_path) if load_format == "dummy" else None
    if source is None:
        source = _open(name_or_path, find_path(name_or_path, weights=weights), load_format)
    if load_format in ("gguf", "safetensors") and source.format != load_format:
        raise ModelLoadError(
            f"--load-format is {load_format}, but {name_or_path} is {source.format}.",
            remedy="Leave --load-format at auto.",
        )
    if weights:
        source.check_files()
    return source


def _open_preset(name: str) -> ModelSource | None:
    """The published shape of that name, for dummy weights; None where the name is none of theirs, or a path."""
    from stenograph.config.presets import presets

    entry = presets().get(name)
    if entry is None or Path(name).exists():
        return None
    return _from_config(name, Path(name), dict(entry["config"]), "dummy")


def find_path(name: str, *, weights: bool = True) -> Path:
    """The directory or file that a name stands for, fetched if need be (from the hub with or without its weights)."""
    if name == DEMO_MODEL:
        from stenograph.loading.demo import demo_model_path

        return demo_model_path()
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, not permitted, nobody's home, a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ModelLoadError(f"The model {name[:80]!r} cannot be opened: {reason}.", remedy=KNOWN_NAMES) from None
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name.count("/") != 1 or name.endswith(".gguf")
    if looks_like_path:
        close = get_close_matches(name.lower(), [DEMO_MODEL], cutoff=0.8)
        meant = f"Did you mean {close[0]}? " if close else ""
        raise ModelLoadError(f"The model {name!r} does not exist.", remedy=meant + KNOWN_NAMES)
    from stenograph.loading.hub import fetch

    return fetch(name, weights=weights)


def _open(name: str, path: Path, load_format: str) -> ModelSource:
    if path.is_file():
        if path.suffix == ".json" and load_format == "dummy":
            return _from_config(name, path.parent, read_json(path), load_format)
        if path.suffix != ".gguf":
            raise ModelLoadError(
                f"{path.name} is a file, but no .gguf file.", remedy="Name the directory that holds config.json."
            )
        return _open_gguf(name, path, load_format)
    if (path / "config.json").is_file():
        return _from_config(name, path, read_json(path / "config.json"), load_format)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _open_gguf(name, files[0], load_format)
    if files:
        raise ModelLoadError(f"The directory {name} holds {len(files)} GGUF files.", remedy="Name one of them.")
    raise ModelLoadError(
        f"The directory {name} has no config.json.", remedy="Name a directory in the Hugging Face layout."
    )


def _from_config(name: str, path: Path, config: dict[str, Any], load_format: str) -> ModelSource:
    facts = ModelFacts.from_config(config)
    if facts.quantization and load_format != "dummy":
        raise ModelLoadError(
            f"The checkpoint is quantised with {facts.quantization!r}, which is not supported.",
            remedy="Take a bfloat16 checkpoint or a GGUF file.",
        )
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    generated = token_ids(generation.get("eos_token_id"), "generation_config.json: eos_token_id")
    eos = {i for i in (*facts.eos_token_ids, *generated, *_tokenizer_eos(path)) if 0 <= i < facts.vocab_size}
    return ModelSource(
        name=name,
        path=path,
        format="dummy" if load_format == "dummy" else "safetensors",
        config=config,
        facts=replace(facts, eos_token_ids=tuple(sorted(eos))),
        generation_config=generation,
        eos_token_ids=tuple(sorted(eos)),
    )


def _open_gguf(name: str, path: Path, load_format: str) -> ModelSource:
    try:
        from stenograph.loading.gguf_file import GGUFFile

        file = GGUFFile(path)
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            "Reading GGUF files takes the gguf package.", remedy="Install it: pip install gguf"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be opened: {error.strerror or error}.") from error
    config = file.config()
    facts = ModelFacts.from_config(config)
    return ModelSource(
        name=name,
        path=path,
        format="dummy" if load_format == "dummy" else "gguf",
        config=config,
        facts=replace(facts, quantization="gguf"),
        eos_token_ids=facts.eos_token_ids,
        metadata=file.metadata,
        gguf=file,
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{path.name} cannot be read: {type(error).__name__}.", remedy="Fetch the file again."
        ) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} holds no JSON object.")
    return value


def _tokenizer_eos(path: Path) -> list[int]:
    """The end token that the tokenizer's files name, if they do."""
    try:
        return _named_end(path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            "tokenizer_config.json or tokenizer.json holds no list of tokens where one belongs.",
            remedy="Fetch the files again.",
        ) from error


def _named_end(path: Path) -> list[int]:
    if not (path / "tokenizer_config.json").is_file():
        return []
    settings = read_json(path / "tokenizer_config.json")
    token = settings.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return []
    for key, entry in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and entry.get("content") == token:
            return [int(key)]
    if (path / "tokenizer.json").is_file():
        tokenizer = read_json(path / "tokenizer.json")
        for entry in tokenizer.get("added_tokens") or []:
            if entry.get("content") == token:
                return [int(entry["id"])]
        found = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(found, dict) and token in found:
            return [int(found[token])]
    return []
