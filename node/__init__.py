"""What every node does whatever its role; prefill and decode nodes stand on it and do not know each other.

Read in this order: `wire` (protobuf to plain data and back), `router_stream` (one stream for each router, with its lease),
`health` (what is wrong, since when), `grpc_endpoint` and `http_endpoint` (what listens), `announcer` (telling the registry),
`engine_link` (the engine thread and this thread), `host` (one node's life from start to drain).
"""
