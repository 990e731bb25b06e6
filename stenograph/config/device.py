"""What is true of a device, as plain data: probed with torch (the engine), seen without torch (`steno explain`), or
named."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stenograph.config.options import nearest
from stenograph.errors import ConfigError

GIB: Final = 1 << 30
LIBRARIES: Final = ("triton", "flashinfer", "flash_attn_3", "flash_attn_4")
_IMPORT_NAMES: Final = {"flash_attn_3": "flash_attn_interface", "flash_attn_4": "flash_attn/cute"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """
    kind              cuda or cpu
    capability        CUDA compute capability as (major, minor); None on a CPU
    memory_bytes      of one device
    count             devices of this kind that tensor parallelism can use (a CPU: processes, as many as cores)
    libraries         attention libraries that are installed, of `LIBRARIES`
    cpu_count         cores that this process may use
    bfloat16          whether the device has instructions for bfloat16
    """

    name: str
    kind: str
    capability: tuple[int, int] | None = None
    memory_bytes: int
    count: int = 1
    libraries: frozenset[str] = frozenset()
    cpu_count: int = 1
    bfloat16: bool = True

    @classmethod
    def probe(cls, name: str = "auto") -> DeviceFacts:
        """Facts of the device that the engine will run on (auto, cuda or cpu), from torch itself."""
        return probe_device(name)

    @property
    def generation(self) -> int:
        """70 and before, 80 Ampere, 86, 89 Ada, 90 Hopper, 100 data-centre Blackwell, 120 consumer Blackwell; 0 for a
        CPU."""
        if self.capability is None:
            return 0
        major, minor = self.capability
        if major == 8:
            return 89 if minor == 9 else 86 if minor >= 6 else 80
        return {9: 90, 10: 100, 11: 100}.get(major, 120 if major >= 12 else 70)


def _gpu(name: str, capability: tuple[int, int], gib: float, count: int = 8) -> DeviceFacts:
    return DeviceFacts(
        name=name, kind="cuda", capability=capability, memory_bytes=int(gib * GIB), count=count,
        libraries=frozenset(LIBRARIES), cpu_count=16,
    )  # fmt: skip


NAMED: Final = {
    "h200": _gpu("h200", (9, 0), 139.8),
    "h100": _gpu("h100", (9, 0), 79.2),
    "b200": _gpu("b200", (10, 0), 178.3),
    "a100": _gpu("a100", (8, 0), 79.2),
    "l40s": _gpu("l40s", (8, 9), 44.4),
    "rtx4090": _gpu("rtx4090", (8, 9), 23.5, count=1),
}
"""GPUs by name, with the memory that their driver reports and every attention library there: to plan without one."""

DEVICE_NAMES: Final = ("auto", "cuda", "cpu", *NAMED)


def device_facts(name: str = "auto") -> DeviceFacts:
    """Facts for `steno explain --device NAME`: a named GPU, this machine's CPU, or whatever is here. Imports no
    torch."""
    if name in NAMED:
        return NAMED[name]
    if name not in DEVICE_NAMES:
        close = nearest(name, DEVICE_NAMES)
        raise ConfigError(
            f"device is {name!r}; it must be one of {', '.join(DEVICE_NAMES)}.",
            remedy=f"Did you mean {close}?" if close else "",
        )
    gpu = None if name == "cpu" else _see_gpu()
    if gpu is None and name == "cuda":
        raise ConfigError("device is cuda, but no CUDA GPU is to be seen.", remedy="Use --device cpu, or name a GPU.")
    return gpu or cpu_facts()


def probe_device(name: str = "auto") -> DeviceFacts:
    """Facts of the device that the engine will run on (auto, cuda or cpu), from torch itself."""
    if name in NAMED:
        raise ConfigError(f"device is {name!r}, which explain and plan know; an engine runs on auto, cuda or cpu.")
    if name == "cpu":
        return cpu_facts()
    import torch

    if not torch.cuda.is_available():
        if name == "cuda":
            raise ConfigError("device is cuda, but torch finds no CUDA GPU.", remedy="Use --device cpu.")
        return cpu_facts()
    properties = torch.cuda.get_device_properties(0)
    return DeviceFacts(
        name=properties.name, kind="cuda", capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory, count=torch.cuda.device_count(), libraries=installed_libraries(),
        cpu_count=_cpu_count(), bfloat16=properties.major >= 8,
    )  # fmt: skip


def cpu_facts() -> DeviceFacts:
    """This machine's CPU: cores, memory, and whether it multiplies bfloat16 by itself."""
    flags = _cpu_flags()
    return DeviceFacts(
        name="cpu", kind="cpu", memory_bytes=_memory_bytes(), count=max(2, _cpu_count()), cpu_count=_cpu_count(),
        libraries=installed_libraries(), bfloat16=bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}),
    )  # fmt: skip


def installed_libraries(names: Iterable[str] = LIBRARIES) -> frozenset[str]:
    """Which attention libraries are installed. Looks for their folders; imports nothing."""
    import sys

    found = set()
    for name in names:
        target = _IMPORT_NAMES.get(name, name)
        if any((Path(p or ".") / target).exists() or (Path(p or ".") / f"{target}.py").exists() for p in sys.path):
            found.add(name)
    return frozenset(found)


def _cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return set(line.partition(":")[2].split())
    except OSError:
        pass  # no Linux: nothing is known, so float32, which every CPU runs
    return set()


def _memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's limit where that is less."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        total = 8 * GIB
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, from its version file."""
    import sys

    for entry in sys.path:
        version = Path(entry or ".") / "torch" / "version.py"
        if version.exists():
            text = version.read_text(encoding="utf-8", errors="replace")
            return any(line.startswith("cuda") and "None" not in line.partition("=")[2] for line in text.splitlines())
    return False


def _see_gpu() -> DeviceFacts | None:
    """The first visible NVIDIA GPU, asked of the driver's management library; None where there is none to use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or not Path("/dev/nvidiactl").exists():
        return None
    if not _torch_has_cuda():
        return None
    import ctypes

    class Memory(ctypes.Structure):
        _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count, handle = ctypes.c_uint(), ctypes.c_void_p()
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), Memory()
    name = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2():
        return None
    try:
        failed = (
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
            or nvml.nvmlDeviceGetName(handle, name, 96)
            or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
            or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        )
    finally:
        nvml.nvmlShutdown()
    if failed:
        return None
    return DeviceFacts(
        name=name.value.decode(errors="replace"), kind="cuda", capability=(major.value, minor.value),
        memory_bytes=memory.total, count=count.value, libraries=installed_libraries(), cpu_count=_cpu_count(),
        bfloat16=major.value >= 8,
    )  # fmt: skip
