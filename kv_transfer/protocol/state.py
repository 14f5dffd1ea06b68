"""`State`: what the protocol's machines are in, and the steps that they take.

A table of transitions is looked up several times for each parcel. `Enum` hashes a value by its name, in Python; each value
exists once, so that its identity will do, and is hashed ten times as fast.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    __hash__ = object.__hash__
