"""How a step runs on a GPU: `select` (which way, from plain numbers), `buffers` (memory at fixed addresses, and how a plan gets
there), `capture` (the graphs), `explain` (what they gave over a load, in words)."""
