"""What a router counts is what its clients read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from router_fake_node import FakeNode
from router_model_folder import write_model_folder
from router_under_test import router_with

pytestmark = pytest.mark.sockets


@pytest.mark.parametrize("as_stream", [False, True])
async def test_f20_a_stop_string_complete_with_the_last_token_is_counted_as_stop(
    tmp_path: Path, as_stream: bool
) -> None:
    """The node, which knows no strings, says `length` in the same message."""
    folder = write_model_folder(tmp_path / "tiny-model")
    async with router_with(folder, FakeNode("d0", script=list(b"ab!"))) as router:
        completions = router.openai().completions
        asked: dict[str, Any] = {"model": router.model, "prompt": "x", "max_tokens": 3, "stop": "!"}
        if as_stream:
            chunks = [chunk async for chunk in await completions.create(**asked, stream=True)]
            reason = chunks[-1].choices[0].finish_reason
        else:
            reason = (await completions.create(**asked)).choices[0].finish_reason
        assert reason == "stop"
        assert await router.metric('decant_request_success_total{reason="stop"}') == 1
        assert await router.metric('decant_request_success_total{reason="length"}') == 0
