"""Limits of messages between processes: sizes, seconds and numbers. Pure, as frames.py is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """Limits of what a connection may cost. A message above them is refused where it is sent; a sender that sends it all the same
    loses the connection."""

    header_bytes: int = 64 << 20
    body_bytes: int = 4 << 30
    buffers: int = 4096
    assembly_bytes: int = 8 << 30
    """Bytes of frames that are arriving, over all connections of a server. What does not fit waits."""
    unsent_bytes: int = 64 << 20
    """Above it, a connection's requests are not read, and a caller waits, until half of it has gone."""
    hello_seconds: float = 20.0
    """Seconds from accepting a connection to its hello."""
    frame_seconds: float = 60.0
    """Seconds from a frame's first byte to its last, and one second more for every `frame_bytes_per_second` of it."""
    frame_bytes_per_second: float = 1e7
    requests: int = 16384
    """Open requests of one connection, parked ones included; one more costs its sender the connection."""
    hold_seconds: float = 60.0
    """Seconds for which an answer handed over by reference is kept for a client that does not say that it has copied it."""

    def __post_init__(self) -> None:
        if not 0 <= self.header_bytes < 1 << 32 or not 0 <= self.buffers <= 1 << 20 or not 0 <= self.body_bytes < 1 << 62:
            raise ValueError(f"limits that no frame's prefix can hold: {self}")
        if self.assembly_bytes < self.header_bytes + self.body_bytes:
            raise ValueError(f"a message of the largest size would wait for ever: {self}")

    def excess(self, header_bytes: int, num_buffers: int, body_bytes: int) -> str:
        """Reason why a frame of these sizes is refused; empty if it is not."""
        if header_bytes <= self.header_bytes and num_buffers <= self.buffers and body_bytes <= self.body_bytes:
            return ""
        return f"a message of {header_bytes} header bytes and {num_buffers} arrays of {body_bytes} bytes is above the limits"
