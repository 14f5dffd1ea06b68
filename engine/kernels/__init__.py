"""Triton kernels of the CUDA path: whatever a decoder layer does between its matrix products, and what feeds and ends a step.

`layer` (norm + residual, rotation + KV append, gate), `unpack` (a step's numbers from one staged copy), `product` (one row
times a weight), `draw` (tokens from logits); `invariant_product`, `invariant_attention` and `log_softmax`, whose rows
have the same bits in every step; `overlap` says how kernels follow each other. Each kernel stands behind one
function that checks nothing but shapes and launches it on the current stream; none waits for the device. References in
float64 are in the tests.
"""
