"""The hand-off of KV from a prefill node to a decode node: a protocol with owners, credits and proofs, and what carries it out.

Read in this order: `port` (what a node says and hears), `plan` (what travels, cut into parcels), `protocol` (pure state
machines of both sides), `wire` and `ticket` (what comes from outside), `transfer_blocks`, `pool_copy`, `arena`, `staging`,
`digest` (between KV blocks and slots; on a GPU `device_digest`, `device_copy`, `triton_launch`, `device_places`,
`device_launches`, `device_copies`, `device_slots`, `device_staging`), `transport` (between slots of two nodes), and last the
drivers, which run it all on a node's asyncio thread: `driver`, `pump`, `control_stream`, `control_client`, `control_server`,
`data_sessions`, `landings`, `landing_rate`, `decode_driver`, `prefill_driver`. `faults` is for tests.

Must not know: models, engines, routers.
"""
