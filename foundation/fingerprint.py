"""What a prefill node and a decode node must agree on, field by field, before KV may pass between them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`weights` is the xxh3 of all tensor bytes (for random weights: of config and seed). `kv_dtype` also names the arithmetic
    where that promises equal bits (`--batch-invariant`). All fields compare by equality."""

    weights: str
    architecture: str
    tokenizer: str
    vocabulary_size: int
    kv_dtype: str
    quantization: str
    rope: str
    protocol_major: int

    def first_difference(self, other: Fingerprint) -> str | None:
        """Name of the first field that differs, with both values; None when they agree."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return f"{field.name}: {ours!r} here, {theirs!r} there"
        return None
