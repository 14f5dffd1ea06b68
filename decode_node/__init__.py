"""A decode node: owns requests from their arrival to their last token, wherever the KV of their prompts comes from.

Read in this order: `inbound_events` and `inbound` (the life of one attempt, a pure table), `submission` (what may come in),
`service` (router, engine and transfers around the table), `main` (the process).
"""
