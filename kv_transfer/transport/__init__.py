"""The data plane: messages into slots that the receiver has posted, and the proof that nothing can write them any more.

Read in this order: `base` (the interface and its words), `lanes` (what each lane has been shown to guarantee), `memory` and
`memory_network` (a model with scripted faults, for tests), `ucx` (the real one), which stands on `rendezvous` and `contact`
(how nodes find each other), `ucx_worker` (UCX's thread), `ucx_environment` (its settings), `cuda_memory` (slots on a GPU) and
`peer_mappings` (a peer's, kept mapped); `self_test` (what a pair measures before it is used).
"""
