"""What a model is: its configuration, its weights, and one decoder definition for all families.

Read in this order: `config` (a folder's config.json, checked), `rope` (rotary tables), `decoder` (the forward pass),
`layers` (linears that choose their form), `device_decoder` (the same pass on fused GPU kernels), `loader` (weights into the
decoder, and the fingerprint), `toy_kv` and `toy` (the test model).
"""
