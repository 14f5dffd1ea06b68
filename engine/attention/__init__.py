"""Attention over the paged KV pool: `base` is the interface, `reference` the plain oracle.

On CPUs: `paged`, by `pool_index` (where positions lie) and `native` (compiled code for rows with few queries). On a GPU:
`flashinfer`, with `decode_plan` (which thread block attends to what), or
`invariant`, with `invariant_items`, whose results do not depend on the step.
"""
