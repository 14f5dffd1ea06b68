"""Whatever a peer says, in whatever order, a driver goes on: well-formed nonsense is counted and ends nothing but itself.

The drivers are real, over the modelled data plane; control messages are handed to them without a stream in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.fingerprint import Fingerprint
from foundation.ids import CreditNumber, Incarnation, NodeId, RequestId, SessionNonce, TransferId
from foundation.keys import MasterKeys
from foundation.kv_layout import KvLayout
from foundation.ticket import Ticket, digest_of_fingerprint, digest_of_tokens, sign_ticket
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.digest import KIND
from kv_transfer.driver import EngineProgress, MeteredTransfers, NodeIdentity, TransferLimits
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.pool_copy import KvPool
from kv_transfer.port import BeginTransfer, PrefillRequest, SettledToken
from kv_transfer.prefill_driver import PrefillDriver
from kv_transfer.protocol import events as on
from kv_transfer.protocol import messages as m
from kv_transfer.transport.memory import FENCED, MemoryNetwork
