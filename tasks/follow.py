"""Reading a JSON-lines file while another process still writes it.

Only whole lines are taken. A resumed or rolled-back program cuts its metrics file and writes on from there;
the tail notices (the bytes before its place are no longer the ones it read) and starts over, and the reader
gives out again only steps whose line is new or differs.
"""

from __future__ import annotations

import json
from pathlib import Path


class Tail:
    """New complete lines since the last read; starts over when the file was cut or replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.last = b""

    def read(self) -> list[str]:
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            return []
        with stream:
            stream.seek(self.offset - len(self.last))
            if stream.read(len(self.last)) != self.last:
                self.offset, self.last = 0, b""
                stream.seek(0)
            data = stream.read()
        end = data.rfind(b"\n") + 1
        if end:
            self.offset += end
            self.last = data[:end][-256:]
        # Not splitlines(): it also cuts at U+0085 and the like, which JSON strings may hold.
        return data[:end].decode("utf-8").split("\n")[:-1]


class Metrics:
    """Steps of a `metrics.jsonl`, each given out once unless its values changed."""

    def __init__(self, path: Path) -> None:
        self.tail = Tail(path)
        self.seen: dict[int, str] = {}

    def read(self) -> list[tuple[int, dict[str, float]]]:
        found: list[tuple[int, dict[str, float]]] = []
        for line in self.tail.read():
            row = json.loads(line)
            step = int(row["step"])
            if self.seen.get(step) == line:
                continue
            self.seen[step] = line
            values = {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, int | float)}
            found.append((step, values))
        return found
