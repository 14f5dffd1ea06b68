"""A prefill node: computes prompts for decode nodes, which drive; it owns blocks and nothing else.

Read in this order: `service` (what a transfer asks for becomes work of the engine), `main` (the process).
"""
