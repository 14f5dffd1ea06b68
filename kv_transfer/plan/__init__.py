"""Copy plans between unlike nodes: pure arithmetic over two KV layouts, computed alike on both sides.

Read in this order: `parcels` (how a transfer is cut into what travels, and whether verified parcels make it whole), `regions`
(where a parcel's bytes lie in the shards of one node; `foundation.kv_shards` says which those are).

Must not know: arrays, sockets, clocks, the protocol's states.
"""
