"""Measurements, of Decant alone and beside its peers in the same run; each module says how it is called.

- `streams` (closed-loop load against an OpenAI endpoint), `processes` and `ports` (start, pin, await, stop a system)
- `peer`: Decant and vLLM's CPU build in turns; `kill_beside_vllm`: a prefill node killed in mid-transfer on both
- `router` and `router_peers`: what a router costs, before `instant_node` and `instant_http`, which answer at once
- `transfer`, `transfer_parcels`, `transfer_stages`, `transfer_lane`, `transfer_beside_ucx`, `protocol_events`: a hand-over
- `serving`: prefill and decode apart against colocated; `gpu`: the engine's figures on one GPU
"""
