"""TensorBoard event files with scalars, written directly.

    file   = records;  record = length u64 | masked CRC-32C of length u32 | event | masked CRC-32C of event u32
    event  = protobuf: wall_time (1, double), step (2, varint), file_version (3), summary (5)

The packages that write these files (tensorboardX, torch.utils.tensorboard) import torch when it is installed, which costs the
driver over a second and hundreds of megabytes for four fields of one message. Left out: everything but scalars.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
_FRAME_BYTES, _STEP_AT = 16, 10
"""Bytes of a record beside its event; where an event's step begins: behind tag and double of its time, and a tag."""
_VERSION = b"brain.Event:2"


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC_TABLE = _crc_table()


def masked_crc32c(payload: bytes) -> int:
    """CRC-32C of `payload`, rotated and offset as TFRecord files store it."""
    crc = 0xFFFFFFFF
    for byte in payload:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _message(number: int, payload: bytes) -> bytes:
    return _tag(number, _BYTES) + _varint(len(payload)) + payload


def _head(wall_time: float, step: int) -> bytes:
    return _tag(1, _DOUBLE) + struct.pack("<d", wall_time) + _tag(2, _VARINT) + _varint(step)


def cut_events(folder: Path, step: int) -> None:
    """Cut the event files of a folder back to what they say of the steps before this one, and to their last whole record."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        with path.open("r+b") as file:
            content, end = file.read(), 0
            while end + _FRAME_BYTES <= len(content):
                length = int.from_bytes(content[end : end + 8], "little")
                event = content[end + 12 : end + 12 + length]
                if len(event) < length or end + _FRAME_BYTES + length > len(content) or _step_of(event) >= step:
                    break
                end += _FRAME_BYTES + length
            file.truncate(end)


def _step_of(event: bytes) -> int:
    """Step of an event that this file has written: a time, then a step. The head of a file is of step -1."""
    shift = step = 0
    for byte in event[_STEP_AT:]:
        step |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return -1 if event.endswith(_VERSION) else step


class TensorBoardTracker:
    """Tracker that writes an event per step in a new file under `folder`, which is made if missing. `clock`: seconds since the
    epoch, shown as TensorBoard's wall time. The files of a resumed run have been cut back to the steps before its checkpoint
    (`run/state/resume.py`)."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock, began = clock, clock()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{int(began)}.{os.getpid()}").open("ab")
        self._write(_head(began, 0) + _message(3, _VERSION))

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """See `Tracker.log`. Values are float32."""
        values = (_message(1, name.encode()) + _tag(2, _FLOAT) + struct.pack("<f", number) for name, number in row.items())
        summary = b"".join(_message(1, value) for value in values)
        self._write(_head(self._clock(), step) + _message(5, summary))

    def close(self) -> None:
        """See `Tracker.close`."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event)))
        self._file.flush()
