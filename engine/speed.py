"""How fast this engine computes prompts, from its own steps.

A step's time is counted from its launch, or from the end of the step before it where that was later, so that overlap counts no
time twice. Steps of a few tokens say what a decode costs, not what a prompt costs, and are left out.

Must not know: clocks, requests.
"""

from __future__ import annotations

LEAST_TOKENS = 32
WEIGHT = 0.2
"""Of the newest step in the moving average."""


class PromptSpeed:
    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        """0 until a step has been counted."""
        self._settled_s = 0.0

    def settled(self, tokens: int, launched_s: float, now_s: float) -> None:
        """A step of so many tokens, launched then, has settled now."""
        seconds = now_s - max(launched_s, self._settled_s)
        self._settled_s = now_s
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        newest = tokens / seconds
        before = self.tokens_per_second or newest
        self.tokens_per_second = before + WEIGHT * (newest - before)
