"""What each attention backend can do, declared: rules, checks and graph coverage read it without importing the
backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stenograph.config.options import PAGE_SIZES

FLOATS: Final = frozenset({"float32", "bfloat16", "float16"})
HALVES: Final = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """One attention backend in one form (multi-head, or MLA).

    generations        GPU generations by sm number (80 is Ampere, 89 Ada, 90 Hopper, 100 Blackwell); cpu is 0
    page_sizes         tokens a page
    tree_page_sizes    those that work with a draft tree of top-k > 1; empty: no tree masks
    max_head_dim       elements; None: any
    kv_dtypes, dtypes  of the cache, and of queries
    prefill_graphs, decode_graphs   recording backends that can hold it
    log_sum_exp        returns the log-sum-exp, which cascades and context parallelism merge by
    library            the package that brings its kernels; None: part of torch or of Stenograph
    """

    name: str
    mla: bool
    generations: frozenset[int]
    page_sizes: tuple[int, ...]
    tree_page_sizes: tuple[int, ...]
    kv_dtypes: frozenset[str]
    dtypes: frozenset[str]
    prefill_graphs: frozenset[str]
    decode_graphs: frozenset[str]
    max_head_dim: int | None = None
    log_sum_exp: bool = False
    library: str | None = None

    @property
    def tree_masks(self) -> bool:
        return bool(self.tree_page_sizes)

    @property
    def label(self) -> str:
        return f"{self.name} (MLA form)" if self.mla else self.name

    def pages(self, topk: int | None) -> tuple[int, ...]:
        """The page sizes that work at this top-k (None or 0: no speculation)."""
        return self.tree_page_sizes if (topk or 0) > 1 else self.page_sizes


_EVERYWHERE: Final = frozenset({0, 70, 80, 86, 89, 90, 100, 120})
_GPUS: Final = _EVERYWHERE - {0, 70}
_ALL_GRAPHS: Final = frozenset({"full", "piecewise", "trace"})
_CUT: Final = frozenset({"piecewise", "trace"})  # a prefill graph that leaves attention out

_MHA: Final = (
    Capabilities(
        name="torch_native", mla=False, generations=_EVERYWHERE, page_sizes=PAGE_SIZES, tree_page_sizes=PAGE_SIZES,
        kv_dtypes=FLOATS, dtypes=FLOATS, prefill_graphs=_CUT, decode_graphs=_CUT,
    ),
    Capabilities(
        name="triton", mla=False, generations=_GPUS, page_sizes=PAGE_SIZES, tree_page_sizes=PAGE_SIZES,
        kv_dtypes=FLOATS | {"fp8_e4m3", "fp8_e5m2"}, dtypes=FLOATS, prefill_graphs=_ALL_GRAPHS,
        decode_graphs=_ALL_GRAPHS, log_sum_exp=True, library="triton",
    ),
    Capabilities(
        name="flashinfer", mla=False, generations=_GPUS, page_sizes=(1, 16, 32, 64, 128), tree_page_sizes=(1,),
        kv_dtypes=HALVES | {"fp8_e4m3", "fp8_e5m2"}, dtypes=HALVES, prefill_graphs=_CUT, decode_graphs=_ALL_GRAPHS,
        max_head_dim=256, log_sum_exp=True, library="flashinfer",
    ),
    Capabilities(
        name="fa3", mla=False, generations=frozenset({90}), page_sizes=PAGE_SIZES, tree_page_sizes=PAGE_SIZES,
        kv_dtypes=HALVES | {"fp8_e4m3"}, dtypes=HALVES, prefill_graphs=_ALL_GRAPHS, decode_graphs=_ALL_GRAPHS,
        max_head_dim=256, log_sum_exp=True, library="flash_attn_3",
    ),
    Capabilities(
        name="fa4", mla=False, generations=frozenset({90, 100}), page_sizes=PAGE_SIZES, tree_page_sizes=(1,),
        kv_dtypes=HALVES, dtypes=HALVES, prefill_graphs=_ALL_GRAPHS, decode_graphs=_ALL_GRAPHS,
        max_head_dim=128, log_sum_exp=True, library="flash_attn_4",
    ),
)  # fmt: skip

_MLA: Final = (
    Capabilities(
        name="torch_native", mla=True, generations=_EVERYWHERE, page_sizes=PAGE_SIZES, tree_page_sizes=PAGE_SIZES,
        kv_dtypes=FLOATS, dtypes=FLOATS, prefill_graphs=_CUT, decode_graphs=_CUT,
    ),
    Capabilities(
        name="triton", mla=True, generations=_GPUS, page_sizes=PAGE_SIZES, tree_page_sizes=PAGE_SIZES,
        kv_dtypes=FLOATS | {"fp8_e4m3", "fp8_e5m2"}, dtypes=FLOATS, prefill_graphs=_CUT, decode_graphs=_ALL_GRAPHS,
        log_sum_exp=True, library="triton",
    ),
    Capabilities(
        name="flashinfer", mla=True, generations=frozenset({80, 90, 100}), page_sizes=(1, 32, 64), tree_page_sizes=(),
        kv_dtypes=HALVES, dtypes=HALVES, prefill_graphs=_CUT, decode_graphs=_ALL_GRAPHS, log_sum_exp=True,
        library="flashinfer",
    ),
    Capabilities(
        name="fa3", mla=True, generations=frozenset({90}), page_sizes=PAGE_SIZES, tree_page_sizes=(1,),
        kv_dtypes=HALVES, dtypes=HALVES, prefill_graphs=_CUT, decode_graphs=_ALL_GRAPHS, log_sum_exp=True,
        library="flash_attn_3",
    ),
    Capabilities(
        name="fa4", mla=True, generations=frozenset({100}), page_sizes=(1, 64, 128), tree_page_sizes=(1,),
        kv_dtypes=HALVES, dtypes=HALVES, prefill_graphs=_CUT, decode_graphs=_ALL_GRAPHS, log_sum_exp=True,
        library="flash_attn_4",
    ),
)  # fmt: skip

_BY_NAME: Final = {(c.name, c.mla): c for c in (*_MHA, *_MLA)}


def capabilities(backend: str, *, mla: bool = False) -> Capabilities:
    return _BY_NAME[backend, mla]


def all_capabilities() -> tuple[Capabilities, ...]:
    return (*_MHA, *_MLA)
