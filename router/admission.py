"""How much may wait: a bound on requests without a first token, and on the tokens of their prompts. Pure.

Both bounds are checked before anything is spent on a request, so overload is answered at once and the queue stays short enough
to be worked off.

Must not know: nodes, clocks, front ends.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Admission:
    """`waiting` counts requests whose first token has not come, `waiting_tokens` the tokens of their prompts."""

    most_waiting: int
    most_waiting_tokens: int
    waiting: int = 0
    waiting_tokens: int = 0

    def refusal(self, prompt_tokens: int) -> str | None:
        """Why one more request is not taken, as a sentence. A prompt beyond the bound is taken while no other waits."""
        if self.waiting >= self.most_waiting:
            return f"{self.waiting} requests are waiting already"
        if self.waiting and self.waiting_tokens + prompt_tokens > self.most_waiting_tokens:
            return f"prompts of {self.waiting_tokens} tokens are waiting already"
        return None

    def enter(self, prompt_tokens: int) -> None:
        self.waiting += 1
        self.waiting_tokens += prompt_tokens

    def leave(self, prompt_tokens: int) -> None:
        """Its first token is there, or it has ended without one."""
        self.waiting -= 1
        self.waiting_tokens -= prompt_tokens
        assert self.waiting >= 0
        assert self.waiting_tokens >= 0
