"""What every node does whatever its role; prefill and decode nodes stand on it and do not know each other.

Read in this order: `options`, `host` (one node's life from start to drain), `router_stream` (one stream for each router,
with its lease), `wire` (protobuf to plain data and back), `health` (what is wrong, since when), `grpc_endpoint` and
`http_endpoint` (what listens), `announcer` (telling the registry), `engine_setup`, `engine_link` and `engine_feed` (a warm
engine, its thread and this thread, its state for others), `grammar_reading` (which is done beside both), `transfer_setup` (what
transfers are built from).
"""
