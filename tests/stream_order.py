"""What a GPU is told, stream by stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    stream: int
    event: int


@dataclass(frozen=True)
class Wait:
    stream: int
    event: int


@dataclass(frozen=True)
class HostWait:
    event: int


Entry = Record | Wait | HostWait
