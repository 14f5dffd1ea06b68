"""One machine's inference: continuous batching over a paged KV pool, on CPUs or on one GPU.

Read in this order: `port` (what a node asks, and is told), `request` (one request's life), `step` (all that crosses from the
scheduler to a runner), `scheduler` (what each step computes), `kv_cache` (who owns which block, and where its bytes lie),
`loop` (plan, launch, settle, report; the engine thread). Then what runs a step: `executor`, `model`, `attention`, `sampling`,
`grammar` (and `grammar_trial`, which says what it may be given); on a GPU `graphs` and `kernels` as well. `config`, `build` and
`build_device` put it together, with `pool_size` (what a GPU has room for), `trial_steps` (what is run to warm up and to
measure) and `speed` (how fast prompts are computed).

Must not know: networks, transfers, routers, what a client wrote.
"""
