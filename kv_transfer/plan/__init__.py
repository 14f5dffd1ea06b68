"""Copy plans between unlike nodes: pure arithmetic over two KV layouts, computed alike on both sides.

Read in this order: `shards` (which layers and heads each rank of a layout holds), `parcels` (how a transfer is cut into what
travels, and whether verified parcels make it whole), `regions` (where a parcel's bytes lie in the shards of one node).

Must not know: arrays, sockets, clocks, the protocol's states.
"""
