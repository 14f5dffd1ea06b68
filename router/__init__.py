"""The front door: OpenAI API over HTTP and decant.v1.Inference over gRPC, in front of a changing set of nodes.

Read in this order. Pure parts: `journey` (one request's life, the token log), `placement` and `cost` (where it is computed),
`admission`, `health`, `text`, `generation` (what may be asked for). The rim: `registry` (who exists), `clients` (one stream to
each node), `fleet` (all of them, tickets), `ongoing` (one request in flight), `timers` (its own), `dispatch` (all requests),
`answer` (one answer on its way to its client). Front ends: `tokenizer`, `intake` (from what a client wrote to a checked
request), `openai/`; over gRPC `grpc_front`, `grpc_errors` (the root of every method), `inference_service`, `admin_service`.
`main` puts it together, and ends the process where a background task has failed.

Must not know: engines, transfers, torch.
"""
