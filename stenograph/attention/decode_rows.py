"""Keys and values of the rows that decode on a CPU, side by side, so that one batched product reads them all.

Gathering them from their pages would move the whole context at every step, though all but one token of each row was
there a step ago. So a copy is kept from step to step, and each step adds its token to the copy and to the pages alike.

Shapes: B decode rows of a step, W places in the copy, C lanes (tokens) that a place holds, M pages of a row, N tokens,
G KV heads, R query heads for each of them, H = G R, D head_dim, X = W G, Z = 2 G (keys and values).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stenograph.attention.base import AttentionSpec, BatchLayout
from stenograph.memory.kv_cache import KVCache

FLOAT32_ROWS, FLOAT32_TOKENS = 4, 4096
"""Up to so many rows, or tokens of all rows, the copy is float32, whose small products torch multiplies faster (16 rows
of 100 tokens, with their softmax: 160 us against 183); beyond, bytes count. Back again at half of that."""

Slot = int


class DecodeRows:
    """Place w holds lanes 0 .. len - 1 of one row, for every layer; lanes after them are finite (zero, or its own).

    A row keeps its place as long as each step adds a token to it. It is known by the slot of the token before: the last
    step wrote that one, and nothing else can have been written to it or to the row's earlier pages since. A row that
    isn't known is copied from its pages.

    Lanes are no more than a few above the longest row: torch multiplies the whole of a copy about twice as fast as the
    used part of a wider one.
    """

    def __init__(self, cache: KVCache, *, most_bytes: int) -> None:
        self.cache = cache
        self.most_bytes = most_bytes
        _, self.groups, self.dim = cache.keys[0].shape
        self.dtype = cache.keys[0].dtype
        self.places = self.lanes = self.count = 0
        self._layers: list[Tensor] = []  # [2, W, G, C, D] each: keys, values
        self._views: list[tuple[Tensor, Tensor, Tensor]] = []
        self._places: list[int] = []  # of the last step's rows, and their lengths
        self._lens: list[int] = []
        self.place_of_row: Tensor | None = None  # None: row and place are the same number
        self.row_of_place: Tensor | None = None
        self._lens_W1 = torch.empty(0, 1, dtype=torch.int64)
        self._where = torch.empty(0, dtype=torch.int64)  # rows of [2 W G C, D] that take the new keys and values
        self._biases: dict[int | None, Tensor] = {}  # by window
        self._place_of: dict[Slot, int] = {}  # slot of each row's last token -> its place
        self._heads_1G = torch.arange(2 * self.groups).unsqueeze(0)

    def prepare(self, layout: BatchLayout) -> bool:
        """Before a step: a place for each of its decode rows, with all of its tokens but the new one.

        False where the copy would take too much memory.
        """
        count, size = layout.num_decode, self.cache.page_size
        known, self._place_of = self._place_of, {}
        if count == 0:
            return True
        lens = layout.kv_lens[:count]
        if not self._make_room(count, max(lens), used=1 + max(known.values(), default=-1)):
            return False
        slots: list[tuple[Slot, Slot]] = []  # of the token before and of the new one
        for table, n in zip(layout.page_tables, lens, strict=False):
            before = table[(n - 2) // size] * size + (n - 2) % size if n > 1 else -1
            slots.append((before, table[(n - 1) // size] * size + (n - 1) % size))
        places = [known.pop(before, -1) for before, _ in slots]
        taken = set(places)
        free = iter([p for p in range(count) if p not in taken])
        for row, place in enumerate(places):
            if place < 0:
                places[row] = next(free)
                self._copy_row(places[row], layout.page_tables[row], lens[row] - 1)
            elif place >= count:  # rows have gone: this one moves up, so that the places in use have no gaps
                places[row] = next(free)
                for layer in self._layers:
                    layer[:, places[row]] = layer[:, place]
        self._place_of = {new: place for place, (_, new) in zip(places, slots, strict=True)}
        self._plan(places, lens)
        return True

    def attend(self, spec: AttentionSpec, q_BHD: Tensor, k_BGD: Tensor, v_BGD: Tensor) -> Tensor:
        """Adds the step's keys and values of one layer, and returns each row's attention, [B, H, D]."""
        rows_ZD, k_XDC, v_XCD = self._views[spec.layer]
        new_BZD = torch.cat([k_BGD, v_BGD], dim=1).to(self.dtype)
        rows_ZD.index_copy_(0, self._where, new_BZD.view(-1, self.dim))
        q_WHD = q_BHD if self.row_of_place is None else q_BHD.index_select(0, self.row_of_place)
        q_XRD = q_WHD.to(self.dtype).reshape(v_XCD.shape[0], -1, self.dim)
        scores_WHC = torch.bmm(q_XRD, k_XDC).view(self.count, -1, self.lanes)
        bias_W1C = self._bias(spec.window)
        if spec.softcap is None:
            scores_WHC = torch.add(bias_W1C, scores_WHC, alpha=spec.scale)
        else:
            scores_WHC = scores_WHC.float().mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap).add_(bias_W1C)
        probs_XRC = scores_WHC.softmax(-1).to(self.dtype).view(v_XCD.shape[0], -1, self.lanes)
        out_WHD = torch.bmm(probs_XRC, v_XCD).view(q_BHD.shape)
        out_BHD = out_WHD if self.place_of_row is None else out_WHD.index_select(0, self.place_of_row)
        return out_BHD.to(q_BHD.dtype)

    # -- inner workings

    def _plan(self, places: list[int], lens: list[int]) -> None:
        """What all layers share, and views of each that last until the places change."""
        if self._views and places == self._places and lens == [n + 1 for n in self._lens]:
            # Each row has a token more, as in nearly every step: the new lane comes into sight.
            self._lens = lens
            self._where += 1
            everything = self._biases.get(None)
            self._biases = {}
            if everything is not None:
                self._biases[None] = everything.scatter_(2, self._lens_W1.unsqueeze(-1), 0.0)
            self._lens_W1 += 1
            return
        self._places, self._lens = places, lens
        if not self._views or len(places) != self.count:
            self.count = len(places)
            self._views = []
            for layer in self._layers:
                keys_XCD, values_XCD = layer.flatten(1, 2)[:, : self.count * self.groups].unbind(0)
                self._views.append((layer.view(-1, self.dim), keys_XCD.transpose(1, 2), values_XCD))
        place_B1, lens_B1 = torch.tensor([places, lens]).unsqueeze(-1)
        self.place_of_row = place_B1.squeeze(1) if places != list(range(self.count)) else None
        self.row_of_place = None if self.place_of_row is None else self.place_of_row.argsort()
        self._lens_W1 = lens_B1 if self.row_of_place is None else lens_B1[self.row_of_place]
        value_1Z, head_1Z = self._heads_1G // self.groups, self._heads_1G % self.groups
        rows_BZ = ((value_1Z * self.places + place_B1) * self.groups + head_1Z) * self.lanes + lens_B1 - 1
        self._where = rows_BZ.flatten()
        self._biases = {}

    def _bias(self, window: int | None) -> Tensor:
        """float32 [W, 1, C]: 0 where a row may look, else -inf."""
        bias_W1C = self._biases.get(window)
        if bias_W1C is None:
            lane_C = torch.arange(self.lanes)
            hidden_WC = lane_C >= self._lens_W1
            if window is not None:
                hidden_WC |= lane_C < self._lens_W1 - window
            bias_W1C = torch.zeros(self.count, 1, self.lanes).masked_fill_(hidden_WC.unsqueeze(1), -torch.inf)
            self._biases[window] = bias_W1C
        return bias_W1C

    def _copy_row(self, place: int, pages: list[int], length: int) -> None:
        size = self.cache.page_size
        pages_M1 = torch.tensor(pages[: -(-length // size)], dtype=torch.int64).unsqueeze(1)
        slots_N = (pages_M1 * size + torch.arange(size)).flatten()[:length]
        for layer, keys, values in zip(self._layers, self.cache.keys, self.cache.values, strict=True):
            layer[:, place, :, length:] = 0  # what another row left may be NaN, and 0 * NaN isn't 0
            layer[0, place, :, :length] = keys.index_select(0, slots_N).transpose(0, 1)
            layer[1, place, :, :length] = values.index_select(0, slots_N).transpose(0, 1)

    def _make_room(self, count: int, longest: int, *, used: int) -> bool:
        """Lays the copy out for so many rows of such a length, keeping what is in use.

        False where it would be too big.
        """
        stored = self.cache.keys[0].dtype
        share = 1 if self.dtype == torch.float32 or not self._layers else 2
        few = count <= FLOAT32_ROWS // share or count * longest <= FLOAT32_TOKENS // share
        number = self.groups * self.dim * count * longest * 2 * len(self.cache.keys)
        dtype = torch.float32 if few and 4 * number <= self.most_bytes else stored
        step = max(32, longest // 128 * 16)
        most_lanes = longest + 2 * step
        if self.places >= count and longest <= self.lanes <= most_lanes and dtype == self.dtype:
            return True
        lanes = self.lanes if longest <= self.lanes <= most_lanes else -(-longest // step) * step
        places = max(used, 1 << (count - 1).bit_length())
        self._views = []
        shape = (2, places, self.groups, lanes, self.dim)
        if len(self.cache.keys) * torch.Size(shape).numel() * dtype.itemsize > self.most_bytes:
            self._layers, self.places, self.lanes = [], 0, 0
            return False
        keep_places, keep_lanes = min(used, places), min(self.lanes, lanes)
        for index in range(len(self.cache.keys)):
            new = torch.zeros(shape, dtype=dtype)
            if index == len(self._layers):
                self._layers.append(new)
                continue
            new[:, :keep_places, :, :keep_lanes] = self._layers[index][:, :keep_places, :, :keep_lanes]
            self._layers[index] = new  # one by one, so that the old copy and the new never stand side by side
        self.places, self.lanes, self.dtype = places, lanes, dtype
        return True
