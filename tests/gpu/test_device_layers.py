"""KV that leaves by layer group: what the event behind each group promises, with the device held back right behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from device_model import BLOCK_SIZE, DEVICE, LAYERS, VOCABULARY, build, decodes
from step_plans import batch_plan
from test_device_loop import HELD_BACK_CYCLES, ended, engine_over

from engine.build_device import DeviceEngineParts
from engine.executor.device_runner import DeviceRunner, LaunchedOnDevice
from engine.graphs.select import Choice, Mode, Reason
from engine.port import (
    EngineEvent,
    KvComputed,
    KvLayersComputed,
    PrefillReserved,
    RequestKey,
    SamplingParameters,
    Submit,
    TokenSampled,
)
from engine.port import Mode as RequestMode
from engine.step import StepPlan
from kv_transfer.device_copy import DeviceCopier, DevicePool
from kv_transfer.plan.parcels import ParcelName

pytestmark = pytest.mark.gpu
PROMPT = [7 * token % VOCABULARY for token in range(60)]
BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)
REFERENCE, HELD = range(10, 10 + BLOCKS), range(20, 20 + BLOCKS)
CHOICES = (Choice(Mode.EAGER, len(PROMPT), Reason.NONE), Choice(Mode.PIECEWISE, 64, Reason.NONE))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceEngineParts]:
    """Each layer is a group of its own."""
    built = build(tmp_path_factory.mktemp("model"), kv_layer_group=1)
    yield built
    built.runner.close()


class Gatherer:
    """Gathers single layers of the prompt as a transfer does, on a stream of its own; its memory is there beforehand."""

    def __init__(self, parts: DeviceEngineParts) -> None:
        storage = parts.storage
        pool = DevicePool(storage.layout, storage.memory, storage.device_owner_words)
        self._copier = DeviceCopier(pool)
        self._copier.compile(storage.layout.kv_heads)
        self._memory = storage.memory
        self._parcels = [
            ParcelName(0, len(PROMPT), layer, layer + 1, 0, storage.layout.kv_heads) for layer in range(LAYERS)
        ]
        payload_bytes = self._parcels[0].wire_bytes(storage.layout)
        self._messages = torch.zeros(2, LAYERS, payload_bytes + 16, dtype=torch.uint8, device=DEVICE)
        self._blocks = [torch.tensor(list(blocks), dtype=torch.int32, device=DEVICE) for blocks in (REFERENCE, HELD)]
        self._owners = torch.zeros(BLOCKS, dtype=torch.int64, device=DEVICE)
        self._seed = torch.tensor([99], device=DEVICE)
        self._stream = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        self.same_layers(LAYERS)
        self.is_untouched(0)

    def same_layers(self, end_layer: int) -> bool:
        """Whether layers [0, end_layer) of both copies of the prompt are the same bytes, under the same digest."""
        with torch.cuda.stream(self._stream):
            for copy, blocks in enumerate(self._blocks):
                for parcel, message in zip(self._parcels[:end_layer], self._messages[copy], strict=False):
                    self._copier.gather(parcel, blocks, self._owners, self._seed, message)
            return torch.equal(self._messages[0, :end_layer], self._messages[1, :end_layer])

    def is_untouched(self, first_layer: int) -> bool:
        """Whether the held copy's layers from `first_layer` on are the zeros that stood there."""
        with torch.cuda.stream(self._stream):
            return not bool(self._memory[first_layer:, HELD.start : HELD.stop].any())


def hold_back_behind(layer: int, runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device rests before the attention of `layer`, and so behind the write of its KV."""
    attend = runner._attend

    def held(at: int, *rest: object) -> None:
        if at == layer:
            torch.cuda._sleep(HELD_BACK_CYCLES)  # type: ignore[no-untyped-call]
        attend(at, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "_attend", held)


def leaving(number: int, blocks: range) -> StepPlan:
    return replace(batch_plan(number, [(PROMPT, 0, blocks)], BLOCK_SIZE), kv_leaves=True)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.mode.value)
@pytest.mark.parametrize("layer", range(LAYERS - 1))
def test_kv_of_a_group_is_whole_behind_its_event_while_later_layers_have_not_run(
    parts: DeviceEngineParts, choice: Choice, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = parts.runner
    unheld = runner.launch_as(leaving(0, REFERENCE), choice).result().token_ids.tolist()
    parts.storage.memory[:, HELD.start : HELD.stop].zero_()
    torch.cuda.synchronize()
    gatherer = Gatherer(parts)
    hold_back_behind(layer, runner, monkeypatch)
    launched = runner.launch_as(leaving(1, HELD), choice)
    written = iter(launched.layers_written())
    assert [next(written) for _ in range(layer + 1)] == list(range(1, layer + 2))
    assert gatherer.same_layers(layer + 1)
    assert gatherer.is_untouched(layer + 1)
    assert not ended(launched)
    assert list(written) == list(range(layer + 2, LAYERS))
    assert launched.result().token_ids.tolist() == unheld
    assert gatherer.same_layers(LAYERS)


def test_a_step_whose_kv_stays_and_a_whole_graph_tell_of_no_layer(parts: DeviceEngineParts) -> None:
    runner = parts.runner
    stays = runner.launch_as(replace(leaving(0, HELD), kv_leaves=False), CHOICES[0])
    graph = runner.launch_as(replace(decodes(1, 0, 20, fed=False), kv_leaves=True), Choice(Mode.FULL, 24, Reason.NONE))
    for launched in (stays, graph):
        assert list(launched.layers_written()) == []
        launched.result()


def test_the_loop_tells_of_early_layers_before_their_step_has_ended(
    parts: DeviceEngineParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = engine_over(parts), parts.runner
    hold_back_behind(0, runner, monkeypatch)
    key = RequestKey("leaves")
    sampling = SamplingParameters(seed=1, max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.take(Submit(key, tuple(PROMPT), sampling, RequestMode.PREFILL_ONLY))
    launched: list[LaunchedOnDevice] = []
    launch_as = runner.launch_as

    def noted(plan: StepPlan, choice: Choice) -> LaunchedOnDevice:
        launched.append(launch_as(plan, choice))
        return launched[-1]

    monkeypatch.setattr(runner, "launch_as", noted)
    told: list[tuple[EngineEvent, bool]] = []

    def answered(events: list[EngineEvent]) -> None:
        told.extend((event, ended(launched[0])) for event in events)

    events = engine.step(answered)
    while engine.status().has_work:
        events += engine.step(answered)
    layers = [event for event, _ in told if isinstance(event, KvLayersComputed)]
    assert layers == [KvLayersComputed(key, len(PROMPT), end_layer) for end_layer in range(1, LAYERS)]
    assert not next(finished for event, finished in told if isinstance(event, KvLayersComputed))
    others = [type(event) for event in [*events, *(event for event, _ in told)] if event not in layers]
    assert sorted(map(str, others)) == sorted(map(str, (PrefillReserved, KvComputed, TokenSampled)))
    engine.fail_all("done")
