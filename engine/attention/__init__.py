"""Attention over the paged KV pool: `base` is the interface, `reference` the plain oracle, `paged` the CPU path."""
