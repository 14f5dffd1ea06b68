"""Measurements: load against an OpenAI endpoint, and Decant beside its peers in one run.

Read in this order: `streams` (closed-loop streaming load and its figures), `processes` (start, pin, await, stop a system),
`peer` (alternating runs of Decant and vLLM's CPU build; `make bench-peer`).
"""
