"""From logits to tokens: `noise` (what a draw depends on), `sampler` (batched, with `adjust` and `mask` for what a request bars
or prefers), `device_sampler` (the same on a GPU), `reference` (slow, readable, float64); `prompt_scores` (tokens that are given).
"""
