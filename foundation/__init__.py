"""The floor of the house: what at least two rooms need, and nothing that needs a network or a tensor library.

Read in this order: `ids` (what things are called), `kv_layout` (how KV bytes lie in a pool and on the wire), `kv_shards`,
`fingerprint` (what two nodes must agree on), `config` and `option_sources`, `errors`, `background`, `log`,
`metrics`; then what nodes and routers share: `keys`, `ticket`, `registry_entry`, `registry_redis`, `model_folder`, `ports`.
"""
