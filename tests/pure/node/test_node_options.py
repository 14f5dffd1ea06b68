from __future__ import annotations

import dataclasses

import pytest

from foundation.errors import ConfigurationError
from kv_transfer.wire.reading import LONGEST_STEP_MS
from node.engine_setup import STEPS_A_SILENCE
from node.options import GIB, KIB, MIB, SENDING_SLOTS_AT_MOST, DecodeOptions, NodeOptions, PrefillOptions, Staging


def prefill_staging(staging_bytes: int | None = None, slot_bytes: int | None = None) -> Staging:
    options = PrefillOptions(model="m", key_file="k", device="cpu", staging_bytes=staging_bytes, slot_bytes=slot_bytes)
    return options.staging_on("cpu")


def test_a_prefill_node_is_given_no_more_sending_slots_than_there_may_be() -> None:
    most_bytes = SENDING_SLOTS_AT_MOST * MIB
    assert prefill_staging(staging_bytes=most_bytes, slot_bytes=MIB) == (most_bytes, MIB)
    for sizes in ({"staging_bytes": most_bytes + 1, "slot_bytes": MIB}, {"staging_bytes": 16 * GIB}):
        with pytest.raises(ConfigurationError, match="--staging-bytes: must hold at most 1024 slots of --slot-bytes"):
            prefill_staging(**sizes)


def test_by_itself_staging_memory_holds_no_more_small_slots_than_a_prefill_node_sends_from() -> None:
    assert prefill_staging(slot_bytes=16 * KIB) == (SENDING_SLOTS_AT_MOST * 16 * KIB, 16 * KIB)
    assert prefill_staging() == (256 * MIB, 4 * MIB)
    assert DecodeOptions(model="m", slot_bytes=16 * KIB).staging_on("cpu") == (512 * MIB, 16 * KIB)


def test_peers_take_every_step_limit_that_a_node_may_name() -> None:
    [silence] = [field for field in dataclasses.fields(NodeOptions) if field.name == "silence_limit_s"]
    assert silence.metadata["option"].maximum / STEPS_A_SILENCE * 1000 == LONGEST_STEP_MS
