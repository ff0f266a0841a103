"""Writes a recording of everything that decisions are made from, and of the decisions (DESIGN §5: replay).

The event loop only puts frozen data into a queue; a thread encodes and writes. All or nothing: a recording
that lacks a fold replays to something else, so whatever cannot be kept ends the recording, and the conductor
goes on without. Knows the form from `cluster.recording` and nothing of what is recorded.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster.errors import ConfigError, ProtocolError
from cluster.folds import Fold
from cluster.logs import Logger
from cluster.recording import VERSION, Begun, Ended, Line, encode_line
from conductor.metrics import ConductorMetrics
from kvindex.core import InstanceId

PENDING_LINES_MAX = 65_536
"""Folds that wait to be written: seconds of the busiest conductor. More end the recording."""
BATCH_LINES_MAX = 1024
"""Written at once."""
END_BYTES = 256
"""Kept free for the last line."""
CLOSE_S_MAX = 5.0

_STOP = None


class FileRecorder:
    """`record` is for the event loop's thread; `close` waits for what was recorded, at most CLOSE_S_MAX."""

    def __init__(
        self,
        folder: Path,
        instance: InstanceId,
        incarnation: int,
        clock: Callable[[], float],
        metrics: ConductorMetrics,
        log: Logger,
        *,
        booking_ttl_s: float,
        bytes_max: int,
    ) -> None:
        """ConfigError where nothing can be written there."""
        self.path = folder / f"{instance}-{incarnation}.jsonl"
        self._metrics = metrics
        self._log = log
        self._bytes_left = bytes_max - END_BYTES
        self._pending: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._over = False
        """Nothing further is taken."""
        self._behind = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb", buffering=0)
        except OSError as error:
            raise ConfigError(f"record_folder: {self.path} cannot be written: {error.strerror}") from error
        self._pending.put(Line(clock(), Begun(VERSION, instance, incarnation, booking_ttl_s, time.time())))
        metrics.recording.set(1)
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def record(self, fold: Fold, now_s: float) -> None:
        """Returns at once. Times must not fall from one to the next."""
        if self._over:
            return
        if self._pending.qsize() >= PENDING_LINES_MAX:
            self._over = self._behind = True
            self._pending.put(_STOP)
            return
        self._pending.put(Line(now_s, fold))

    def close(self) -> None:
        if not self._over:
            self._over = True
            self._pending.put(_STOP)
        self._thread.join(CLOSE_S_MAX)

    def _write_all(self) -> None:
        """The thread, until the recording ends."""
        last_s = 0.0
        try:
            reason = None
            while reason is None:
                lines, stopped = self._batch()
                data, full = self._encoded(lines)
                self._write(data)
                last_s = lines[-1].at_s if lines else last_s
                reason = self._reason(stopped, full)
            self._write(encode_line(Line(last_s, Ended(reason))))
            self._log.info("recording ended", path=str(self.path), reason=reason)
        except (OSError, ProtocolError) as error:
            self._log.warning("recording failed", path=str(self.path), error=error)
        finally:
            self._over = True
            self._metrics.recording.set(0)
            self._file.close()
            self._forget_pending()

    def _forget_pending(self) -> None:
        """Nothing of it is written any more: what waits would be kept as long as the conductor runs."""
        with suppress(queue.Empty):
            while True:
                self._pending.get_nowait()

    def _reason(self, stopped: bool, full: bool) -> str | None:
        """Why it ends now, if it does."""
        if full:
            return "record_bytes_max is reached"
        if stopped:
            return f"{PENDING_LINES_MAX} lines wait to be written" if self._behind else "closed"
        return None

    def _batch(self) -> tuple[list[Line], bool]:
        """What waits, at least one line unless it was stopped, and whether it was."""
        lines: list[Line] = []
        while len(lines) < BATCH_LINES_MAX:
            if lines and self._pending.empty():
                break
            line = self._pending.get()
            if line is _STOP:
                return lines, True
            lines.append(line)
        return lines, False

    def _encoded(self, lines: list[Line]) -> tuple[bytes, bool]:
        """As many of the lines as the file may still take, and whether those were not all."""
        encoded = bytearray()
        for line in lines:
            data = encode_line(line)
            if len(encoded) + len(data) > self._bytes_left:
                return bytes(encoded), True
            encoded += data
        self._bytes_left -= len(encoded)
        return bytes(encoded), False

    def _write(self, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += os.write(self._file.fileno(), data[written:])
        self._metrics.recorded_bytes.inc(len(data))
