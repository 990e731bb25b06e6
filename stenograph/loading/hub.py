"""Checkpoints from the Hugging Face hub, through huggingface_hub and its cache."""

from __future__ import annotations

from pathlib import Path

from stenograph.errors import ModelLoadError

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken"]
UNUSED = ["original/*", "consolidated*", "*/*.safetensors"]
"""The same weights in other layouts, for which no bytes are spent."""
CONNECT_SECONDS = 5
ELSEWHERE = "Connect to the internet, or name a local directory, a .gguf file or smollm2-135m."


def fetch(repo_id: str, *, weights: bool = True) -> Path:
    """The local directory of a repository, with or without its weights.

    Raises `ModelLoadError` where it is neither cached nor to be had.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"The model {repo_id!r} is no local directory, and huggingface_hub is not installed.",
            remedy="Install it: pip install huggingface_hub",
        ) from error

    def get(*, offline: bool) -> Path:
        wanted = PATTERNS if weights else ["*.json"]
        found = snapshot_download(repo_id, allow_patterns=wanted, ignore_patterns=UNUSED, local_files_only=offline)
        return Path(found)

    try:
        return get(offline=not _hub_answers())
    except GatedRepoError as error:
        raise ModelLoadError(
            f"The repository {repo_id} needs a licence to be accepted.",
            remedy="Accept it on its page and set HF_TOKEN.",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"There is no repository {repo_id} on the hub.", remedy="Check the spelling.") from error
    except HFValidationError as error:
        raise ModelLoadError(f"{repo_id!r} is neither a path that exists nor a valid repository id.") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"The model {repo_id} is not in the local cache, and the Hugging Face hub cannot be reached.",
            remedy=ELSEWHERE,
        ) from error
    except Exception as error:  # whatever the connection, the hub or the disk may do
        try:
            return get(offline=True)
        except LocalEntryNotFoundError:
            raise ModelLoadError(
                f"The model {repo_id} is not in the local cache, and fetching it failed: {_first_line(error)}.",
                remedy=ELSEWHERE,
            ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + text[0].rstrip('.') if text else ''}"


def _hub_answers() -> bool:
    """One quick connection, so that a machine without internet isn't kept waiting by retries."""
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(name in _proxies() for name in ("https", "http", "all")):
        return True  # the proxy decides
    address = urlsplit(constants.ENDPOINT)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname or "", port), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _proxies() -> dict[str, str]:
    from urllib.request import getproxies

    return getproxies()
