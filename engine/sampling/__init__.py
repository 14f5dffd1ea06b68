"""From logits to tokens: `noise` (what a draw depends on), `sampler` (batched, with `adjust` and `mask` for what a request bars
or prefers, and `host_numbers`, which bring it there), `device_sampler` (the same on a GPU), `reference` (slow, readable,
float64); `prompt_scores` (tokens that are given).
"""
