"""One process a tensor-parallel rank: rank 0 runs in the engine's process and tells the others what to execute.

Every rank is sent the same step and samples from the same gathered logits with the same seeds, so the tokens agree
without another round trip. Steps travel over gloo on the CPU; the model's own sums go through NCCL on GPUs.
"""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stenograph.config.resolve import Resolved
from stenograph.distributed.tensor_parallel import TensorParallel
from stenograph.errors import EngineDeadError, StenographError
from stenograph.executor.executor import Executor
from stenograph.executor.step import Step, StepResult
from stenograph.loading.source import ModelSource, open_model

log = logging.getLogger(__name__)
IDLE = timedelta(days=365)
"""How long a rank waits for a step: an engine without requests waits long, and gloo gives up after half an hour."""


def make_executor(resolved: Resolved, source: ModelSource, *, progress: bool = True) -> Executor | ParallelExecutor:
    """The executor of the whole model, with the processes of the other ranks where tp_size asks for them."""
    if resolved.tp_size == 1:
        return Executor(resolved, source, TensorParallel(), progress=progress)
    return ParallelExecutor(resolved, source, progress=progress)


class ParallelExecutor:
    """Rank 0 here, ranks 1 .. tp_size - 1 in processes of their own; the same interface as `Executor`."""

    def __init__(self, resolved: Resolved, source: ModelSource, *, progress: bool = True) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn")
        self._workers = [
            context.Process(
                target=_worker, args=(rank, resolved, store.port), daemon=True, name=f"stenograph-rank-{rank}"
            )
            for rank in range(1, resolved.tp_size)
        ]
        atexit.register(self._stop_workers)  # before multiprocessing's own, whose SIGTERM they ignore
        for worker in self._workers:
            worker.start()
        try:
            self._await_workers(store)
            tp, self._control = _join(0, resolved, store)
            self._rank0 = Executor(resolved, source, tp, progress=progress)
        except Exception:
            self._stop_workers()
            raise
        self.cache, self.model, self.facts = self._rank0.cache, self._rank0.model, self._rank0.facts

    def _await_workers(self, store: TCPStore) -> None:
        """Until every rank is up: a rank that dies before it joins would leave the others waiting for it."""
        while not store.check([_up(rank) for rank in range(1, len(self._workers) + 1)]):
            self._check_workers()
            time.sleep(0.02)

    def _check_workers(self) -> None:
        dead = [w.name for w in self._workers if not w.is_alive()]
        if dead:
            raise EngineDeadError(
                f"{', '.join(dead)} died.", remedy="Its last words are on the log; restart the engine."
            )

    def execute(self, step: Step) -> StepResult:
        self._check_workers()
        try:
            _broadcast(step, self._control)
            return self._rank0.execute(step)
        except Exception as error:  # the other ranks may be anywhere in the step: nothing brings them together again
            log.debug("A step failed", exc_info=True)
            time.sleep(0.1)  # a rank that was lost is known to be a moment later
            lost = [f"{w.name} (exit code {w.exitcode})" for w in self._workers if not w.is_alive()]
            self._stop_workers()
            if lost:
                raise EngineDeadError(f"{', '.join(lost)} died in a step.", remedy="Restart the engine.") from error
            log.exception("A step failed")
            raise EngineDeadError(
                f"A step of {len(self._workers) + 1} ranks failed: {type(error).__name__}."
            ) from error

    def shutdown(self) -> None:
        if all(w.is_alive() for w in self._workers):
            _broadcast(None, self._control)
            for worker in self._workers:
                worker.join(timeout=5)
        self._stop_workers()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _stop_workers(self) -> None:
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
                worker.join(timeout=5)


def _worker(rank: int, resolved: Resolved, port: int) -> None:
    # A signal to the whole group must not end ranks while rank 0 still drains; it stops them when it is done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set(_up(rank), "1")
        tp, control = _join(rank, resolved, store)
        source = open_model(
            resolved.model, load_format=resolved.load_format, trust_remote_code=resolved.trust_remote_code
        )
        executor = Executor(resolved, source, tp, progress=False)
        while (step := _broadcast(None, control)) is not None:
            executor.execute(step)
        dist.destroy_process_group()
    except StenographError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:  # a lost peer, most often: rank 0 notices that this process is gone
        log.debug("rank %d failed", rank, exc_info=True)
        print(f"rank {rank}: stopped by {type(error).__name__} (--log-level debug shows where)", file=sys.stderr)
        sys.exit(1)


def _up(rank: int) -> str:
    return f"rank-{rank}-is-up"


def _join(rank: int, resolved: Resolved, store: TCPStore) -> tuple[TensorParallel, dist.ProcessGroup]:
    if resolved.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if resolved.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=resolved.tp_size,
    )
    model_group = dist.group.WORLD
    control = dist.new_group(backend="gloo", timeout=IDLE)
    assert model_group is not None and isinstance(control, dist.ProcessGroup)
    return TensorParallel(rank=rank, size=resolved.tp_size, group=model_group), control


def _broadcast(message: Any, group: dist.ProcessGroup) -> Any:
    """Rank 0's message, on every rank. Between the engine's own processes only."""
    box = [message]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]

