"""Figures of the engine on one GPU, each beside the ceilings of the same run (`make bench-gpu`).

`measure` (clocks and ceilings), `parts` (products and attention alone, by layout), `steps` (the real loop: decode and
prefill), `__main__` (runs them one by one, so that a failure costs one figure, and writes the table and its JSON).
"""
