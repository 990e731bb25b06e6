"""Rows that decode side by side for many steps, coming and going, against a float64 reference at every step."""

from __future__ import annotations

import random

import pytest
import torch

from stenograph.attention import decode_rows
from stenograph.attention.base import AttentionSpec, BatchLayout
from stenograph.attention.decode_rows import DecodeRows
from stenograph.attention.torch_native import TorchNativeBackend
from stenograph.memory.kv_cache import KVCache
from tests.attention.test_torch_native import reference

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16


class Row:
    """One sequence: the keys and values that it should have, layer by layer, and its pages."""

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages
        self.keys: list[torch.Tensor] = [torch.empty(0, KV_HEADS, DIM)] * LAYERS
        self.values = list(self.keys)
        self.length = 0


class Engine:
    """Steps a set of rows through the backend and checks every output."""

    def __init__(self, *, page_size: int, dtype: torch.dtype, window: int | None = None, softcap: float | None = None):
        self.page_size, self.num_pages = page_size, 40 * (64 // page_size)
        self.cache = KVCache(
            num_layers=LAYERS,
            num_pages=self.num_pages,
            page_size=page_size,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor[page_size:] = torch.nan
        self.backend = TorchNativeBackend(self.cache)
        self.free = list(range(1, self.num_pages))
        self.dtype, self.window, self.softcap = dtype, window, softcap
        self.tolerance = 2e-5 if dtype == torch.float32 else 4e-2

    def leave(self, row: Row, rng: random.Random) -> None:
        self.free += row.pages
        rng.shuffle(self.free)

    def step(self, decode: list[Row], prefill: list[tuple[Row, int]] = ()) -> None:  # type: ignore[assignment]
        work = [(row, 1) for row in decode] + list(prefill)
        slots: list[int] = []
        for row, count in work:
            row.length += count
            while len(row.pages) * self.page_size < row.length:
                row.pages.append(self.free.pop())
            at = range(row.length - count, row.length)
            slots += [row.pages[p // self.page_size] * self.page_size + p % self.page_size for p in at]
        plan = self.backend.plan(
            BatchLayout(
                num_decode=len(decode),
                query_lens=[count for _, count in work],
                kv_lens=[row.length for row, _ in work],
                page_tables=[list(row.pages) for row, _ in work],
                token_slots_T=torch.tensor(slots),
            )
        )
        for layer in range(LAYERS):
            spec = AttentionSpec(
                layer=layer,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=DIM,
                scale=0.3,
                window=self.window if layer else None,
                softcap=self.softcap,
            )
            q, k, v = (torch.randn(len(slots), n, DIM).to(self.dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
            out, start = plan.attend(spec, q, k, v).double(), 0
            for row, count in work:
                part = slice(start, start := start + count)
                row.keys[layer] = torch.cat([row.keys[layer], k[part]])
                row.values[layer] = torch.cat([row.values[layer], v[part]])
                want = reference(q[part].double(), row.keys[layer].double(), row.values[layer].double(), spec)
                torch.testing.assert_close(out[part], want, atol=self.tolerance, rtol=0)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window,softcap", [(None, None), (8, None), (None, 5.0)])
def test_rows_come_and_go(
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_rows, "FLOAT32_TOKENS", 100)  # so that copies in bfloat16 change to float32 and back
    torch.manual_seed(0)
    rng = random.Random(1)
    engine = Engine(page_size=page_size, dtype=dtype, window=window, softcap=softcap)
    rows: list[Row] = []
    for _ in range(60):
        for row in [r for r in rows if rng.random() < 0.08]:
            rows.remove(row)
            engine.leave(row, rng)
        if rng.random() < 0.2:
            rng.shuffle(rows)  # the order of a batch means nothing
        # Some rows wait a step while others go on, as preempted or chunked ones do.
        decode = [r for r in rows if rng.random() < 0.97]
        prefill = [(Row([]), rng.choice([1, 2, 15, 40])) for _ in range(2) if len(rows) < 9 and rng.random() < 0.3]
        singles = [row for row, count in prefill if count == 1]
        rows += [row for row, _ in prefill]
        if decode or prefill:
            engine.step(decode + singles, [p for p in prefill if p[1] > 1])


def test_only_new_tokens_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    original = DecodeRows._copy_row
    monkeypatch.setattr(DecodeRows, "_copy_row", lambda self, *a: (copied.append(a[0]), original(self, *a)))
    engine = Engine(page_size=16, dtype=torch.float32)
    rows = [Row([]) for _ in range(3)]
    engine.step([], [(row, 5) for row in rows])
    for _ in range(40):  # past the first lanes
        engine.step(rows)
    assert sorted(copied) == [0, 1, 2]
    engine.step(rows[1:])  # the last one moves up
    engine.step(rows[1:])
    assert len(copied) == 3


def test_pages_of_another_row_are_not_taken_for_the_same_row() -> None:
    """A row ends; another with the same pages and one token more decodes two steps later."""
    engine = Engine(page_size=16, dtype=torch.float32)
    first, second = Row([]), Row([])
    engine.step([], [(first, 5)])
    engine.step([first])
    second.pages = list(first.pages)
    engine.step([], [(second, 6)])
    engine.step([second])


def test_too_long_for_a_copy() -> None:
    """Beyond its share of memory the rows are read from their pages, and go on in the copy when they fit again."""
    engine = Engine(page_size=16, dtype=torch.float32)
    assert engine.backend.rows is not None
    engine.backend.rows.most_bytes = 2 * 2 * KV_HEADS * 4 * 64 * DIM * 4
    rows = [Row([]) for _ in range(5)]
    engine.step([], [(row, 30) for row in rows])
    for count in (3, 5, 4, 2, 5, 1):
        engine.step(rows[:count])
    engine.step([], [(rows[0], 200)])
    for _ in range(3):
        engine.step(rows[:3])
        engine.step(rows[1:3])
