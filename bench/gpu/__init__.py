"""Figures of the engine on one GPU, each beside the ceilings of the same run (`make bench-gpu`).

`measure` (clocks and ceilings), `shape` (the model that is measured), `parts` (products and attention alone, by layout), `steps`
(the real loop: decode and prefill), `replay` (whether a step's mode is chosen well), `hand_over` and `landing` (gathers and
scatters alone, and what they cost beside steps), `landing_causes` (whether it is the GPU or the host that pays), `timeline` (one
step as a picture), `__main__` (runs them one by one, so that a failure costs one figure, and writes table and JSON).
"""
