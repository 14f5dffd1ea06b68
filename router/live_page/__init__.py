"""The live page at /ui: what this router and its nodes do now, for people, in a browser.

Read in this order: `curves` (latencies and rates of the last minutes), `board` (one snapshot of everything), `endpoints` (the
page, its files, and the stream of snapshots), `static/` (plain HTML, CSS and JavaScript; nothing from elsewhere).

Nothing here is on the way of a request: snapshots are built twice a second while somebody looks, and only then are nodes asked
for details. It shows request ids, never prompts or answers.
"""
