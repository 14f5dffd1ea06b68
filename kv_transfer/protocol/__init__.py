"""The KV transfer protocol: pure, immutable state machines. `handle(state, event) -> (state, effects)`.

Read in this order: `messages` (what the two sides say), `events` and `effects` (what goes in, what comes out), `local` (what a
side knows of its own node), `credit` (D's slots and credits), `sending` (P's slots), `peer` (one pair's stream and session),
`decode_transfer` and `prefill_transfer` (one transfer on either side, with its transition table), `decode_turn`/`decode_pair`/
`decode_side` and `prefill_turn`/`prefill_pair`/`prefill_side` (all of a node's transfers together), `deadlines` (what is waited
for). States are made of `table`s, `digests` and `record`s; `state` says what a machine is in.

What the network says may be late, doubled or stale: then it is counted and changes nothing. What the own rim says must fit
the state: if it does not, that is a bug and an assertion.

Must not know: sockets, clocks, randomness, tensors.
"""
