"""What the scheduler must know of its machine: parsed once by a node, checked here across fields, then frozen.

Must not know: where the values came from, torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Raises ValueError naming the field that is wrong and what would be right."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    shared_prompt_tokens: int = 0
    """Prompts of at most so many tokens in all share the steps that they need (scheduler/prefill); 0: each has its turn."""
    enable_prefix_caching: bool = True
    overlap: bool = False
    """Launch step N + 1 before step N's tokens reach the host. Pays where `Runner.launch` returns before the step is done."""
    scores_prompts: bool = True
    """Whether the runner computes log probabilities of prompts."""
    eos_token_ids: tuple[int, ...] = ()
    max_waiting_requests: int = 4096
    """Submits beyond this many waiting requests end at once with `queue_full`."""

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "max_waiting_requests",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can advance in every step"
            )

    @property
    def capacity_positions(self) -> int:
        """Positions whose KV the whole pool can hold."""
        return self.num_blocks * self.block_size

    @property
    def seated_tokens(self) -> int:
        """Prompts take seats while at most so many tokens of those seated are left to schedule."""
        return max(self.max_num_batched_tokens, self.shared_prompt_tokens)

    @property
    def max_sequence_length(self) -> int:
        """Most tokens one sequence may reach; its last token needs no KV."""
        return min(self.max_model_len, self.capacity_positions + 1)

    @property
    def max_blocks_per_sequence(self) -> int:
        return -(-self.max_sequence_length // self.block_size)
