"""Whole engines over the toy model, whose text is a function of the KV bytes: batches, preemption, and KV carried across."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.build import BuildOptions, EngineParts, build_engine
from engine.loop import Engine
from engine.model.toy import TOY_VOCABULARY_SIZE, write_toy_folder
from engine.model.toy_kv import toy_greedy
from engine.port import (
    EngineEvent,
    KvReserved,
    Mode,
    PrefillReserved,
    ReleaseKv,
    RequestKey,
    ReserveKv,
    SamplingParameters,
    StartFromKv,
    Submit,
    TokenSampled,
)

SAMPLING = SamplingParameters(seed=0, max_tokens=12, temperature=0.0, ignore_eos=True)


class ToyEngine:
    def __init__(self, folder: Path, **changes: object) -> None:
        options = {"model": folder, "num_blocks": 40, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
        self.parts: EngineParts = build_engine(BuildOptions(**(options | changes)))  # type: ignore[arg-type]
        self.engine = Engine(self.parts.config, self.parts.runner, self.parts.storage.owner_words)
        self.tokens: dict[str, list[int]] = {}

    def submit(self, name: str, prompt: tuple[int, ...], mode: Mode = Mode.GENERATE) -> None:
        self.engine.take(Submit(RequestKey(name), prompt, SAMPLING, mode))

    def rest(self) -> list[EngineEvent]:
        events = []
        while True:
            events += self.engine.step()
            self.engine.scheduler.check()
            if not self.engine.status().has_work:
                break
        for event in events:
            if isinstance(event, TokenSampled):
                self.tokens.setdefault(event.key, []).append(event.token_id)
        return events

    def oracle(self, prompt: tuple[int, ...]) -> list[int]:
        return toy_greedy(prompt, SAMPLING.max_tokens, self.parts.layout, TOY_VOCABULARY_SIZE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_toy_folder(tmp_path / "toy")


@pytest.fixture
def prefill(folder: Path) -> Iterator[ToyEngine]:
    made = ToyEngine(folder)
    yield made
    made.engine.close()


def prompt(length: int, salt: int) -> tuple[int, ...]:
    return tuple((salt * 31 + i * i) % 256 for i in range(length))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mixed_batch_on_a_scarce_pool_gives_the_oracles_text(folder: Path, overlap: bool) -> None:
    toy = ToyEngine(folder, overlap=overlap, num_blocks=24)
    try:
        prompts = {f"r{n}": prompt(length, n // 2) for n, length in enumerate((1, 3, 4, 5, 16, 17, 40, 41, 33, 9))}
        for name, ids in prompts.items():
            toy.submit(name, ids)
        toy.rest()
        assert toy.tokens == {name: toy.oracle(ids) for name, ids in prompts.items()}
        status = toy.engine.status()
        assert status.preemptions > 0
        assert status.blocks_in_use == 0
    finally:
        toy.engine.close()


@pytest.mark.parametrize("received", [0, 9, 21])
def test_a_text_goes_on_from_kv_that_another_engine_computed(folder: Path, prefill: ToyEngine, received: int) -> None:
    """Both sides have the first eight positions cached; `received` of the rest arrive, with the first token."""
    decode = ToyEngine(folder)
    try:
        ids = prompt(21, 3)
        for toy in (prefill, decode):
            toy.submit("before", ids[:9])
            toy.rest()
        prefill.submit("p", ids, Mode.PREFILL_ONLY)
        offered = prefill.rest()[0]
        assert isinstance(offered, PrefillReserved)
        assert offered.cached_positions == 8
        decode.submit("d", ids, Mode.AWAIT_KV)
        decode.engine.take(ReserveKv(RequestKey("d"), len(ids)))
        (reserved,) = decode.rest()
        assert isinstance(reserved, KvReserved)
        assert reserved.from_position == 8
        arrived = max(received, reserved.from_position)
        for block in range(2, -(-arrived // 4)):
            source, target = offered.block_ids[block], reserved.block_ids[block]
            for there, here in zip(prefill.parts.storage.pool_views(), decode.parts.storage.pool_views(), strict=True):
                here[:, target] = there[:, source]
        prefill.engine.take(ReleaseKv(RequestKey("p")))
        decode.engine.take(StartFromKv(RequestKey("d"), arrived, prefill.tokens["p"][0]))
        events = decode.rest()
        assert prefill.tokens["p"] + decode.tokens["d"] == decode.oracle(ids)
        assert isinstance(events[0], TokenSampled)
        account = (events[0].prompt_cached, events[0].prompt_transferred, events[0].prompt_computed)
        assert account == (8, arrived - 8, 21 - arrived)
    finally:
        decode.engine.close()
