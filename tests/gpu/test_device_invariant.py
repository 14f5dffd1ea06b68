"""--batch-invariant: kernels against float64, with NaN where nobody may read, and every token's bits in steps of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_model import BLOCK_SIZE, DEVICE, VOCABULARY, build

from engine.attention.flashinfer import PLAN_BYTES, Pages
from engine.attention.invariant import InvariantAttention
from engine.attention.invariant_items import SPLIT
from engine.build_device import DeviceEngineParts
from engine.graphs.select import Costs, GraphSelector, Mode
from engine.kernels.invariant_product import TILINGS, Tiling, agreeing_tilings, invariant_product, tiling_for
from engine.kernels.log_softmax import log_softmax_rows
from engine.kv_cache.device_storage import DeviceKvStorage
from engine.loop import Engine
from engine.port import EngineEvent, RequestKey, SamplingParameters, Submit, TokenLogprob, TokenSampled
from foundation.kv_layout import HeadOrder, KvLayout

pytestmark = pytest.mark.gpu
DTYPE = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 2, 128, 4


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Relative error in the 2-norm; bfloat16 results land near 2e-3."""
    assert got.isfinite().all()
    error = float((got.double() - want).norm() / want.norm())
    assert error < 1e-2, error


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=DEVICE, dtype=DTYPE)


def amid_nan(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, between others that are not to be read."""
    around = nan(len(rows) + 300, *rows.shape[1:])
    around[150 : 150 + len(rows)] = rows
    return around[150 : 150 + len(rows)]


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (512, 14_336), (130, 1000)])
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("rows", [1, 77, 300])
def test_a_product_equals_its_definition_and_touches_nothing_around(
    outputs: int, inputs: int, tiling: Tiling, rows: int
) -> None:
    x, weight, bias = amid_nan(random(rows, inputs)), amid_nan(random(outputs, inputs) / inputs**0.5), random(outputs)
    around = nan(rows + 300, outputs)
    invariant_product(x, weight, bias, tiling, around[150 : 150 + rows])
    near(around[150 : 150 + rows], x.double() @ weight.double().t() + bias.double())
    assert around[:150].isnan().all()
    assert around[150 + rows :].isnan().all()
    near(invariant_product(x, weight, None, tiling), x.double() @ weight.double().t())


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (28_672, 4096), (512, 14_336), (130, 1000)])
def test_a_row_of_a_product_has_the_same_bits_among_1_2_3_64_200_and_2000_rows(outputs: int, inputs: int) -> None:
    tilings = agreeing_tilings(DTYPE, DEVICE)
    x, weight = random(2000, inputs), random(outputs, inputs) / inputs**0.5
    whole = invariant_product(x, weight, None, tiling_for(tilings, 2000, outputs))
    for rows in (1, 2, 3, 64, 200):
        for first in (0, 1000 - rows, 2000 - rows):
            part = x[first : first + rows].clone()
            got = invariant_product(part, weight, None, tiling_for(tilings, rows, outputs))
            assert torch.equal(got, whole[first : first + rows]), f"{rows} rows from {first}"


def test_all_tilings_sum_alike_on_this_gpu() -> None:
    assert agreeing_tilings(DTYPE, DEVICE) == TILINGS


class OneSequence:
    """A pool of NaNs in which one sequence of random keys and values of layer 2 lies in scattered blocks."""

    def __init__(self, head_order: HeadOrder, layer_group: int, context: int, heads: int = HEADS) -> None:
        layout = KvLayout(LAYERS, KV_HEADS, HEAD_DIM, str(DTYPE).split(".")[1], BLOCK_SIZE, head_order, layer_group)  # type: ignore[arg-type]
        count = -(-context // BLOCK_SIZE)
        self.storage = DeviceKvStorage(layout, count + 3, DEVICE)
        self.storage.memory.fill_(float("nan"))
        self.attention = InvariantAttention(self.storage, heads, 300, context, context)
        self.blocks = np.random.default_rng(1).permutation(count + 3)[:count].astype(np.int32)
        self.cells = random(context, 2, KV_HEADS, HEAD_DIM)
        self.heads = random(context, heads + 2 * KV_HEADS, HEAD_DIM)
        self.queries = self.heads[:, :heads]
        self.pinned = torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
        where = np.arange(context)
        block, offset = (
            torch.from_numpy(a).long().to(DEVICE) for a in (self.blocks[where // BLOCK_SIZE], where % BLOCK_SIZE)
        )
        view = self.storage.layer(2)
        if head_order == "HND":
            view[block, :, :, offset] = self.cells
        else:
            view[block, :, offset] = self.cells

    def pages(self, ends: Sequence[int]) -> tuple[np.ndarray, Pages]:
        counts = [-(-end // BLOCK_SIZE) for end in ends]
        page_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        last = np.array([(end - 1) % BLOCK_SIZE + 1 for end in ends], np.int32)
        blocks = np.concatenate([self.blocks[:count] for count in counts])
        return page_start, Pages(*(torch.from_numpy(a).to(DEVICE) for a in (page_start, last, blocks)))

    def chunks(self, pieces: Sequence[tuple[int, int]]) -> torch.Tensor:
        """One step of chunks [first, end), all of this sequence."""
        query_start = np.concatenate(([0], np.cumsum([end - first for first, end in pieces]))).astype(np.int32)
        page_start, pages = self.pages([end for _, end in pieces])
        contexts = np.array([end for _, end in pieces], np.int32)
        queries = torch.cat([self.heads[first:end] for first, end in pieces])[:, : self.queries.shape[1]]
        out = nan(len(queries), self.queries.shape[1], HEAD_DIM)
        plan = self.attention.plan_prefill(self.pinned, query_start, page_start, contexts)
        self.attention.prefill(2, plan, queries, pages, out)
        self._wait()
        return out

    def decodes(self, positions: Sequence[int]) -> torch.Tensor:
        """One step of single queries at these positions."""
        page_start, pages = self.pages([position + 1 for position in positions])
        queries = self.heads[list(positions)][:, : self.queries.shape[1]]
        out = nan(len(queries), self.queries.shape[1], HEAD_DIM)
        plan = self.attention.plan_decode(self.pinned, page_start)
        self.attention.decode(2, plan, queries, pages, out)
        self._wait()
        return out

    def _wait(self) -> None:
        """Pinned memory is used again for the next plan."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    def expected(self, positions: Sequence[int]) -> torch.Tensor:
        group = self.queries.shape[1] // KV_HEADS
        keys, values = (side.double().repeat_interleave(group, 1) for side in self.cells.unbind(1))
        at = torch.tensor(positions, device=DEVICE)
        scores = torch.einsum("qhd,khd->hqk", self.queries[at].double(), keys) / HEAD_DIM**0.5
        later = torch.arange(len(keys), device=DEVICE) > at[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)


LAYOUTS: list[tuple[HeadOrder, int]] = [("HND", 4), ("NHD", 2)]
PLACES = [0, 1, 15, 16, 63, 64, 100, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 70]


@pytest.mark.parametrize(("head_order", "layer_group"), LAYOUTS)
@pytest.mark.parametrize("heads", [KV_HEADS, 3 * KV_HEADS, HEADS])
def test_attention_equals_its_definition_and_reads_nothing_behind_a_context(
    head_order: HeadOrder, layer_group: int, heads: int
) -> None:
    world = OneSequence(head_order, layer_group, 2 * SPLIT + 71, heads)
    want = world.expected(PLACES)
    for place, got, wanted in zip(PLACES, world.decodes(PLACES), want, strict=True):
        near(got, wanted)
        near(world.chunks([(max(0, place - 9), place + 1)])[-1], wanted)


@pytest.mark.parametrize(("head_order", "layer_group"), LAYOUTS)
def test_attention_of_a_token_has_the_same_bits_decoded_and_in_chunks_of_every_size(
    head_order: HeadOrder, layer_group: int
) -> None:
    context = 2 * SPLIT + 71
    world = OneSequence(head_order, layer_group, context)
    whole = world.chunks([(0, context)])
    assert whole.isfinite().all()
    for size in (7, 128, 1000):
        pieces = [(first, min(first + size, context)) for first in range(0, context, size)]
        one_by_one = torch.cat([world.chunks([piece]) for piece in pieces[-3:]])
        assert torch.equal(one_by_one, whole[pieces[-3][0] :]), f"chunks of {size} alone"
        assert torch.equal(world.chunks(pieces[:300]), whole[: pieces[:300][-1][1]]), f"chunks of {size} in one step"
    positions = sorted({*PLACES, *np.random.default_rng(3).integers(0, context, 250).tolist()})
    assert torch.equal(world.decodes(positions), whole[positions])
    for place in PLACES:
        assert torch.equal(world.decodes([place])[0], whole[place]), f"position {place} alone"
        assert torch.equal(world.chunks([(place, place + 1)])[0], whole[place]), f"position {place} as a chunk"


@pytest.mark.parametrize("vocabulary", [1003, 32_000])
def test_log_probabilities_do_not_depend_on_a_rows_place(vocabulary: int) -> None:
    logits = 5 * random(9, vocabulary)
    places = torch.tensor([8, 1, 3], dtype=torch.int32, device=DEVICE)
    got = log_softmax_rows(logits, places)
    torch.testing.assert_close(got.double(), logits[places.long()].double().log_softmax(-1), atol=1e-5, rtol=1e-5)
    for row, place in enumerate(places.tolist()):
        alone = log_softmax_rows(logits[place : place + 1].clone(), torch.zeros(1, dtype=torch.int32, device=DEVICE))
        assert torch.equal(alone[0], got[row])


BLOCKS, ROWS = 900, 24
Answer = list[tuple[int, int, float | None, tuple[TokenLogprob, ...]]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceEngineParts]:
    folder = tmp_path_factory.mktemp("model")
    built = build(folder, 4096, num_blocks=BLOCKS, max_num_seqs=ROWS, max_num_batched_tokens=2048, batch_invariant=True)
    yield built
    built.runner.close()


def requests(count: int) -> list[Submit]:
    """Greedy and drawn ones, filtered and not, of lengths up to two splits."""
    rng = np.random.default_rng(7)
    lengths = [1, 40, SPLIT + 300, *rng.integers(2, 400, count).tolist()][:count]
    return [
        Submit(
            RequestKey(f"r{index}"),
            tuple(rng.integers(0, VOCABULARY - 1, length).tolist()),
            SamplingParameters(
                seed=index,
                max_tokens=40,
                temperature=float(index % 3) / 2,
                top_p=0.9 if index % 4 == 1 else 1.0,
                top_k=30 if index % 5 == 2 else 0,
                ignore_eos=True,
                logprobs=5,
            ),
        )
        for index, length in enumerate(lengths)
    ]


def steps(engine: Engine) -> Iterator[list[EngineEvent]]:
    """What happens, step by step, until nothing more does."""
    for _ in range(5000):
        yield engine.step()
        if not engine.status().has_work:
            return
    raise AssertionError("the engine does not come to rest")


def answers(parts: DeviceEngineParts, asked: Sequence[Submit], **changes: int | bool) -> dict[str, Answer]:
    """All in one engine, whose settings are changed so; nothing is cached from others."""
    engine = Engine(replace(parts.config, **changes), parts.runner, np.zeros(BLOCKS, np.uint64))  # type: ignore[arg-type]
    for submit in asked:
        engine.take(submit)
    said: dict[str, Answer] = {str(submit.key): [] for submit in asked}
    for events in steps(engine):
        for event in events:
            if isinstance(event, TokenSampled):
                told = (event.position, event.token_id, event.logprob, event.top_logprobs)
                said[str(event.key)].append(told)
    for submit in asked:
        assert len(said[str(submit.key)]) == submit.sampling.max_tokens - len(submit.settled)
    return said


def in_mode(parts: DeviceEngineParts, mode: Mode) -> GraphSelector:
    """A selector that takes this mode wherever it is correct."""
    costs = parts.runner.selector.costs
    dear = {1: 1.0}
    match mode:
        case Mode.EAGER:
            return GraphSelector(Costs())
        case Mode.FULL:
            return GraphSelector(Costs(full=dict.fromkeys(costs.full, 0.0), eager=dear, eager_decode=dear))
        case Mode.PIECEWISE:
            return GraphSelector(Costs(piecewise=dict.fromkeys(costs.piecewise, 0.0), eager=dear, eager_decode=dear))


def test_answers_have_the_same_bits_alone_and_together_whole_and_in_chunks(parts: DeviceEngineParts) -> None:
    asked = requests(20)
    together = answers(parts, asked)
    assert len({tuple(token for _, token, _, _ in answer) for answer in together.values()}) > len(asked) // 2
    for submit in asked[:8]:
        assert answers(parts, [submit])[str(submit.key)] == together[str(submit.key)], submit.key
    assert answers(parts, asked[::-1]) == together
    for tokens in (ROWS, 37, 300):
        assert answers(parts, asked, max_num_batched_tokens=tokens) == together, f"steps of {tokens} tokens"
    assert answers(parts, asked, max_num_seqs=3) == together
    assert answers(parts, asked, overlap=False) == together


def test_an_answer_that_is_resumed_from_its_history_goes_on_with_the_same_bits(parts: DeviceEngineParts) -> None:
    asked = requests(12)
    unharmed = answers(parts, asked)
    for lost in (1, 2, 17, 39):
        resumed = [
            replace(submit, settled=tuple(token for _, token, _, _ in unharmed[str(submit.key)][:lost]))
            for submit in asked
        ]
        rest = {key: answer[lost:] for key, answer in unharmed.items()}
        assert answers(parts, resumed) == rest, f"resumed after {lost} tokens"
        assert answers(parts, resumed, max_num_batched_tokens=50) == rest, f"resumed after {lost} tokens, in chunks"


@pytest.mark.parametrize("mode", list(Mode))
def test_graphs_and_eager_steps_give_the_same_bits(parts: DeviceEngineParts, mode: Mode) -> None:
    asked, chosen = requests(20), parts.runner.selector
    expected = answers(parts, asked, max_num_batched_tokens=200)
    forced = parts.runner.selector = in_mode(parts, mode)
    try:
        got = answers(parts, asked, max_num_batched_tokens=200)
    finally:
        parts.runner.selector = chosen
    assert mode in {used for used, _ in forced.statistics.steps}
    assert got == expected


def test_a_prefix_that_was_cached_gives_the_same_bits_as_one_that_is_computed(parts: DeviceEngineParts) -> None:
    [first] = requests(3)[2:]
    again = replace(first, key=RequestKey("again"))
    [expected] = answers(parts, [first]).values()
    engine = Engine(replace(parts.config, enable_prefix_caching=True), parts.runner, np.zeros(BLOCKS, np.uint64))
    said: dict[str, Answer] = {}
    for submit in (first, again):
        engine.take(submit)
        for events in steps(engine):
            for event in events:
                if isinstance(event, TokenSampled):
                    told = (event.position, event.token_id, event.logprob, event.top_logprobs)
                    said.setdefault(str(event.key), []).append(told)
                    if event.prompt_cached is not None and event.key == again.key:
                        assert event.prompt_cached >= SPLIT
    assert said == {str(first.key): expected, str(again.key): expected}


def test_nodes_of_unlike_arithmetic_do_not_pair(parts: DeviceEngineParts) -> None:
    other = replace(parts.fingerprint, kv_dtype="bfloat16")
    difference = parts.fingerprint.first_difference(other)
    assert difference is not None
    assert "batch-invariant on sm_" in difference
