"""From logits to tokens: `noise` (what a draw depends on), `sampler` (batched), `reference` (slow, readable, float64)."""
