"""How a transfer is cut into parcels, and whether the parcels that arrived make it whole.

The cut is a pure function of the wanted positions, both layouts and the slot size, so neither side ever has to send it: the
i-th credit of a transfer carries its i-th parcel. Parcels are in token-major order, so that what early chunks have computed
can leave while later ones are computed. No parcel straddles a shard or a layer group of either side; a replicated head
travels once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from math import lcm
from typing import NamedTuple

from foundation.kv_layout import KvLayout
from foundation.kv_shards import LayoutError, rank_heads, stage_layers

Range = tuple[int, int]

PARCELS_AT_MOST = 1 << 14
"""Of one transfer: 64 GiB of KV in slots of 4 MiB. Each costs both nodes time and memory, and a peer that lies about its slots,
or a lane so slow that slots are made small for it, would have them cut one for each head at each position."""


class TooManyParcels(ValueError):
    """The slots are too small for a transfer of this length."""


class ParcelName(NamedTuple):
    """Positions x layers x heads, each [first, end). On the wire its bytes are [layer, 2 (K, V), position, head, dim]."""

    first_position: int
    end_position: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def positions(self) -> int:
        return self.end_position - self.first_position

    @property
    def volume(self) -> int:
        """Number of (position, layer, head) triples."""
        return self.positions * (self.end_layer - self.first_layer) * (self.end_head - self.first_head)

    def wire_bytes(self, layout: KvLayout) -> int:
        """Payload bytes; the same for both layouts of a pair, which agree on dtype and head_dim."""
        return 2 * self.volume * layout.head_bytes


def cut_parcels(
    from_position: int, end_position: int, source: KvLayout, target: KvLayout, slot_bytes: int
) -> tuple[ParcelName, ...]:
    """Parcels of at most `slot_bytes` that partition [from_position, end_position) x all layers x all heads.

    Raises ValueError, naming the field, when the layouts cannot pair or not even one head of one layer at one position fits;
    TooManyParcels before it makes more than PARCELS_AT_MOST.
    """
    if mismatch := layout_mismatch(source, target):
        raise ValueError(mismatch)
    if not 0 <= from_position <= end_position:
        raise ValueError(f"positions [{from_position}, {end_position}) are no range")
    layer_runs, head_runs, stride, unit = _cell_grid(source, target, slot_bytes)
    most = PARCELS_AT_MOST // (len(layer_runs) * len(head_runs))
    position_ranges = tuple(islice(_position_ranges(from_position, end_position, stride, unit), most + 1))
    if len(position_ranges) > most:
        raise TooManyParcels(
            f"slot_bytes is {slot_bytes}: [{from_position}, {end_position}) would be more than {PARCELS_AT_MOST} parcels"
        )
    return tuple(
        ParcelName(*positions, *layers, *heads)
        for positions in position_ranges
        for layers in layer_runs
        for heads in head_runs
    )


def layout_mismatch(source: KvLayout, target: KvLayout) -> str | None:
    """The first field that must agree for bytes to mean the same on both sides, and does not."""
    for field in ("layers", "kv_heads", "head_dim", "dtype"):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            return f"{field}: {ours!r} here, {theirs!r} there"
    return None


@lru_cache(maxsize=64)
def _cell_grid(
    source: KvLayout, target: KvLayout, slot_bytes: int
) -> tuple[tuple[Range, ...], tuple[Range, ...], int, int]:
    """Layer runs, head runs, positions for each parcel, and the multiple at which position ranges end.

    Whole blocks of both sides come first: layers, then heads are cut finer before a block is.
    """
    layer_runs = tuple(pairwise(sorted(_layer_cuts(source) | _layer_cuts(target))))
    head_runs = tuple(pairwise(sorted(_head_cuts(source) | _head_cuts(target))))
    unit_bytes = 2 * source.head_bytes
    if unit_bytes > slot_bytes:
        raise ValueError(f"slot_bytes is {slot_bytes}; one head's K and V at one position take {unit_bytes}")
    units = sorted(
        {lcm(source.block_size, target.block_size), max(source.block_size, target.block_size), 1}, reverse=True
    )
    triples = slot_bytes // unit_bytes
    unit = next(unit for unit in units if unit <= triples)
    widest_heads = max(end - first for first, end in head_runs)
    layer_limit = triples // (unit * widest_heads)
    if layer_limit == 0:
        layer_limit, head_runs = 1, _finer(head_runs, triples // unit)
        widest_heads = max(end - first for first, end in head_runs)
    layer_runs = _finer(layer_runs, layer_limit)
    widest_layers = max(end - first for first, end in layer_runs)
    stride = triples // (widest_layers * widest_heads) // unit * unit
    return layer_runs, head_runs, stride, unit


def _layer_cuts(layout: KvLayout) -> frozenset[int]:
    """Layers at which a run of layers that lies together in one array begins; the number of layers included.

    A stage's layers are grouped from its first one on; a stage of fewer layers than `layer_group` is one group.
    """
    if layout.layer_group < 1:
        raise LayoutError("layer_group", f"is {layout.layer_group}; it must be at least 1")
    begins = (layer for first, end in stage_layers(layout) for layer in range(first, end, layout.layer_group))
    return frozenset((*begins, layout.layers))


def _head_cuts(layout: KvLayout) -> frozenset[int]:
    """Heads at which some rank's share begins; the number of heads included."""
    return frozenset((*(first for first, _ in rank_heads(layout)), layout.kv_heads))


def _finer(runs: tuple[Range, ...], limit: int) -> tuple[Range, ...]:
    """Each run cut into as few, as equal parts of at most `limit` as possible."""
    return tuple(part for run in runs for part in _equal_parts(run, limit))


def _equal_parts(run: Range, limit: int) -> Iterable[Range]:
    first, end = run
    count = -(-(end - first) // limit)
    return pairwise(first + (end - first) * part // count for part in range(count + 1))


def _position_ranges(from_position: int, end_position: int, stride: int, unit: int) -> Iterable[Range]:
    first = from_position
    while first < end_position:
        end = min((first + stride) // unit * unit, end_position)
        yield first, end
        first = end


def partition_error(parcels: Iterable[ParcelName], wanted: ParcelName) -> str | None:
    """None when the parcels cover `wanted` exactly; else `outside`, `overlap` or `hole`, with the parcel or place."""
    boxes = sorted(parcels)
    for box in boxes:
        if not (
            wanted.first_position <= box.first_position < box.end_position <= wanted.end_position
            and wanted.first_layer <= box.first_layer < box.end_layer <= wanted.end_layer
            and wanted.first_head <= box.first_head < box.end_head <= wanted.end_head
        ):
            return f"outside: {box}"
    return _tiling_error([_sides(box) for box in boxes], _sides(wanted))


def _sides(box: ParcelName) -> tuple[Range, ...]:
    return (box[0:2], box[2:4], box[4:6])


def _tiling_error(boxes: Sequence[tuple[Range, ...]], wanted: tuple[Range, ...]) -> str | None:
    """Between two neighbouring cuts of the first axis, the boxes there must tile the remaining axes; what has just done so need
    not be looked at again."""
    if not wanted:
        return None if len(boxes) == 1 else ("overlap" if boxes else "hole")
    (low, high), *rest = wanted
    cuts = sorted({low, high, *(edge for box in boxes for edge in box[0])})
    active: list[tuple[Range, ...]] = []
    tiled: list[tuple[Range, ...]] | None = None
    pending = sorted(boxes, reverse=True)
    for first, _ in pairwise(cuts):
        active = [box for box in active if box[0][1] > first]
        while pending and pending[-1][0][0] <= first:
            active.append(pending.pop())
        others = [box[1:] for box in active]
        if others != tiled and (error := _tiling_error(others, tuple(rest))):
            return error if ":" in error else f"{error}: at position, layer or head {first}"
        tiled = others
    return None


def verified_prefix(plan: Sequence[ParcelName], verified: Iterable[int], end_position: int) -> int:
    """End of the unbroken run of positions whose every parcel of `plan` (given by index) has been verified."""
    done = frozenset(verified)
    return min((parcel.first_position for index, parcel in enumerate(plan) if index not in done), default=end_position)
