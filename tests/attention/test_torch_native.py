"""The torch backend against a float64 reference: fresh inputs, unused cache rows poisoned with NaN, pages shuffled."""

from __future__ import annotations

import random

import pytest
import torch

from stenograph.attention.base import AttentionSpec, BatchLayout
from stenograph.attention.torch_native import TorchNativeBackend, is_run
from stenograph.memory.kv_cache import KVCache

CASES = {
    "decode": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 63)],
    "prefill": [(5, 5), (16, 16), (17, 17)],
    "prefill on a prefix": [(7, 30), (16, 32), (2, 65)],
    "mixed": [(1, 33), (1, 2), (16, 16), (9, 40)],
}


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """[Q, H, D] float64 over [K, G, D]; query i stands at position K - Q + i."""
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    queries, keys = q.shape[0], k.shape[0]
    at = torch.arange(keys - queries, keys).unsqueeze(1)
    hidden = torch.arange(keys) > at
    if spec.window is not None:
        hidden |= torch.arange(keys) <= at - spec.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("window,softcap", [(None, None), (8, None), (None, 5.0)])
@pytest.mark.parametrize("runs", [True, False])
def test_against_float64(
    case: str, page_size: int, heads: int, kv_heads: int, window: int | None, softcap: float | None, runs: bool
) -> None:
    rows = CASES[case]
    rng = random.Random(repr((case, page_size, heads, window, runs)))
    torch.manual_seed(rng.randrange(2**31))
    dim, pages_of, cursor = 32, [], 1
    for _, keys in rows:
        count = -(-keys // page_size) + rng.choice([0, 0, 2])  # some tables hold pages for tokens yet to come
        pages_of.append(list(range(cursor, cursor + count)))
        cursor += count
    if not runs:
        ids = list(range(1, cursor + 5))
        rng.shuffle(ids)
        pages_of = [[ids.pop() for _ in pages] for pages in pages_of]
    cache = KVCache(
        num_layers=1,
        num_pages=cursor + 5,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for tensor in (cache.keys[0], cache.values[0]):
        tensor[page_size:] = torch.nan  # everything but the padding page
    spec = AttentionSpec(
        layer=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=0.3, window=window, softcap=softcap
    )
    slots, q, k_new, v_new, expected = [], [], [], [], []
    for (queries, keys), pages in zip(rows, pages_of, strict=True):
        where = [pages[p // page_size] * page_size + p % page_size for p in range(keys)]
        k, v = torch.randn(keys, kv_heads, dim), torch.randn(keys, kv_heads, dim)
        cache.keys[0][where[: keys - queries]] = k[: keys - queries]
        cache.values[0][where[: keys - queries]] = v[: keys - queries]
        query = torch.randn(queries, heads, dim)
        slots += where[keys - queries :]
        q.append(query)
        k_new.append(k[keys - queries :])
        v_new.append(v[keys - queries :])
        expected.append(reference(query.double(), k.double(), v.double(), spec))
    plan = TorchNativeBackend(cache).plan(
        BatchLayout(
            num_decode=sum(1 for queries, _ in rows if queries == 1),
            query_lens=[queries for queries, _ in rows],
            kv_lens=[keys for _, keys in rows],
            page_tables=pages_of,
            token_slots_T=torch.tensor(slots),
        )
    )
    out = plan.attend(spec, torch.cat(q), torch.cat(k_new), torch.cat(v_new))
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=2e-5, rtol=0)


@pytest.mark.parametrize("queries,keys", [(1, 1), (2, 300), (128, 128), (129, 129), (300, 300), (200, 431)])
@pytest.mark.parametrize("window,softcap", [(None, None), (8, None), (150, None), (None, 5.0)])
def test_prefill_in_bfloat16(queries: int, keys: int, window: int | None, softcap: float | None) -> None:
    """Block by block, over the edges of blocks and windows."""
    torch.manual_seed(queries + keys)
    cache = KVCache(
        num_layers=1,
        num_pages=40,
        page_size=16,
        num_kv_heads=2,
        head_dim=32,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    spec = AttentionSpec(layer=0, num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2, window=window, softcap=softcap)
    k, v = torch.randn(keys, 2, 32).bfloat16(), torch.randn(keys, 2, 32).bfloat16()
    q = torch.randn(queries, 6, 32).bfloat16()
    cache.keys[0][16 : 16 + keys], cache.values[0][16 : 16 + keys] = k, v
    layout = BatchLayout(
        num_decode=0,
        query_lens=[queries],
        kv_lens=[keys],
        page_tables=[list(range(1, 1 + -(-keys // 16)))],
        token_slots_T=torch.arange(16 + keys - queries, 16 + keys),
    )
    out = TorchNativeBackend(cache).plan(layout).attend(spec, q, k[keys - queries :], v[keys - queries :])
    torch.testing.assert_close(out.double(), reference(q.double(), k.double(), v.double(), spec), atol=3e-2, rtol=0)


def test_runs_of_pages() -> None:
    assert is_run([3]) and is_run([3, 4, 5])
    assert not is_run([3, 5]) and not is_run([5, 4]) and not is_run([1, 3, 2, 4])
