"""Answers that follow a grammar: masks in overlapped batches, the end, and a state that is rebuilt from the history."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.build import BuildOptions, build_engine
from engine.grammar import Grammars
from engine.loop import Engine
from engine.model.toy import TOY_VOCABULARY_SIZE, write_toy_folder
from engine.port import (
    FinishReason,
    Mode,
    RequestFailed,
    RequestKey,
    SamplingParameters,
    StartFromKv,
    Submit,
    TokenSampled,
)
from engine.sampling.mask import apply_masks
from engine.step import TokenMasks

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog", "bird"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
OBJECT = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA | COMPACT))
WORDS = LLMatcher.grammar_from_regex("[a-f]{3,5}( [a-f]{3,5}){2}")
PROMPT = tuple(range(40, 61))


def sampling(grammar: str, seed: int = 3, max_tokens: int = 60) -> SamplingParameters:
    return SamplingParameters(seed=seed, max_tokens=max_tokens, temperature=1.0, grammar=grammar)


class Toy:
    def __init__(self, folder: Path, *, overlap: bool = True, num_blocks: int = 200) -> None:
        model = write_toy_folder(folder / "toy")
        parts = build_engine(
            BuildOptions(
                model=model,
                num_blocks=num_blocks,
                block_size=4,
                max_num_seqs=8,
                max_num_batched_tokens=32,
                overlap=overlap,
            )
        )
        self.eos = parts.config.eos_token_ids
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        grammars = Grammars(model / "tokenizer.json", TOY_VOCABULARY_SIZE, self.eos)
        self.engine = Engine(parts.config, parts.runner, parts.storage.owner_words, grammars)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason | str | None] = {}

    def submit(
        self, name: str, asked: SamplingParameters, settled: tuple[int, ...] = (), mode: Mode = Mode.GENERATE
    ) -> None:
        self.engine.take(Submit(RequestKey(name), PROMPT, asked, mode, settled))

    def rest(self) -> None:
        while True:
            for event in self.engine.step():
                if isinstance(event, TokenSampled):
                    self.tokens.setdefault(event.key, []).append(event.token_id)
                    self.ends[event.key] = event.finish_reason
                elif isinstance(event, RequestFailed):
                    self.ends[event.key] = event.reason
            self.engine.scheduler.check()
            if not self.engine.status().has_work:
                return

    def text(self, name: str) -> str:
        """Of an answer that the model ended."""
        tokens = self.tokens[name]
        assert tokens[-1] in self.eos
        text: str = self.tokenizer.decode(tokens)
        return text


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_follow_their_grammars_beside_free_ones(tmp_path: Path, overlap: bool) -> None:
    toy = Toy(tmp_path, overlap=overlap)
    for seed in range(3):
        toy.submit(f"object {seed}", sampling(OBJECT, seed))
        toy.submit(f"words {seed}", sampling(WORDS, seed))
    toy.submit("free", SamplingParameters(seed=9, max_tokens=30, ignore_eos=True))
    toy.rest()
    for seed in range(3):
        found = json.loads(toy.text(f"object {seed}"))
        assert found["kind"] in ("cat", "dog", "bird")
        assert 0 <= found["legs"] <= 99
        assert re.fullmatch("[a-f]{3,5}( [a-f]{3,5}){2}", toy.text(f"words {seed}"))
        assert toy.ends[f"words {seed}"] is FinishReason.STOP
    assert len({toy.text(f"words {seed}") for seed in range(3)}) > 1
    alone = Toy(tmp_path / "alone", overlap=overlap)
    alone.submit("free", SamplingParameters(seed=9, max_tokens=30, ignore_eos=True))
    alone.submit("object 1", sampling(OBJECT, 1))
    alone.rest()
    assert alone.tokens["free"] == toy.tokens["free"]
    assert alone.tokens["object 1"] == toy.tokens["object 1"]


def test_an_object_that_goes_on_elsewhere_in_its_middle_becomes_whole(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.submit("whole", sampling(OBJECT))
    toy.rest()
    whole = toy.tokens["whole"]
    for settled in range(1, len(whole)):
        toy.submit(f"after {settled}", sampling(OBJECT), settled=tuple(whole[:settled]))
    toy.rest()
    for settled in range(1, len(whole)):
        assert toy.tokens[f"after {settled}"] == whole[settled:], settled


def test_preemption_loses_nothing_of_a_grammars_state(tmp_path: Path) -> None:
    roomy, tight = Toy(tmp_path / "roomy"), Toy(tmp_path / "tight", num_blocks=30)
    for toy in (roomy, tight):
        for seed in range(5):
            toy.submit(f"{seed}", sampling(WORDS, seed))
        toy.rest()
    assert tight.engine.status().preemptions > 0
    assert tight.tokens == roomy.tokens


def test_a_first_token_that_a_prefill_node_declined_is_drawn_under_the_grammar(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.submit("alone", sampling(OBJECT))
    toy.submit("d", sampling(OBJECT), mode=Mode.AWAIT_KV)
    toy.engine.take(StartFromKv(RequestKey("d"), 0))
    toy.rest()
    assert toy.tokens["d"] == toy.tokens["alone"]


def test_what_is_no_grammar_ends_its_own_request_alone(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.submit("bad", sampling("garbage((("))
    toy.submit("good", sampling(OBJECT))
    toy.rest()
    assert toy.ends["bad"] == "invalid_grammar"
    assert json.loads(toy.text("good"))


def test_masks_forbid_what_they_do_not_name() -> None:
    words = np.zeros((2, 2), np.int32)
    words[0, 0], words[1, 1] = 0b101, 1 << 3
    logits = torch.zeros(3, 40)
    apply_masks(logits, TokenMasks(np.array([0, 2], np.int64), words))
    allowed = [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits]
    assert allowed == [{0, 2}, set(range(40)), {35}]


def test_a_grammar_that_was_read_on_another_thread_is_opened_as_any(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    reader = threading.Thread(target=toy.engine.read_grammar, args=(WORDS,))
    reader.start()
    reader.join()
    for name in ("read", "not read"):
        toy.submit(name, sampling(WORDS))
    toy.rest()
    assert toy.tokens["read"] == toy.tokens["not read"]
    assert toy.ends["read"] is FinishReason.STOP


def test_an_answer_whose_grammar_becomes_too_much_fails_and_does_not_end_as_if_it_were_whole(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.submit("growing", sampling(LLMatcher.grammar_from_lark('start: "a" start')))
    toy.submit("beside", sampling(WORDS))
    toy.rest()
    assert toy.ends["growing"] == "invalid_grammar"
    assert toy.ends["beside"] is FinishReason.STOP
