"""What every process needs of a network: gRPC dialled and served, in the clear or under TLS (`grpc_plane`) and ended
(`grpc_calls`), and HTTP connections that are bounded (`http_site`).

Must not know: what is said over them.
"""
