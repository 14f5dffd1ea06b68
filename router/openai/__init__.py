"""The OpenAI API over HTTP. Read in this order: `bodies` (what clients send), `answers` (what they get), `writing`, `errors`,
`endpoints`, `server`."""
