"""Failures that end a process before it serves: each carries one message that says what to change.

They are raised only while starting; the command line prints the message and exits with `exit_code`.
Failures of requests and transfers are values elsewhere, never these.
"""

from __future__ import annotations

from typing import ClassVar


class StartError(Exception):
    """Something stands in the way of starting. `str(error)` is the whole message for the operator."""

    exit_code: ClassVar[int] = 1


class ConfigurationError(StartError):
    """A setting is unknown, of the wrong type, out of range, or does not go with another; `setting` is its option name."""

    exit_code: ClassVar[int] = 2

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting = setting
        self.problem = problem


class SetupError(StartError):
    """The machine lacks something: a package, a download, a file that should have been made."""
