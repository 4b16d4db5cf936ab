"""What a stage says about itself while it runs: `.plumbline/status/STAGE.json`, replaced atomically.

The flow, `plumbline status` and a person with `cat` read the same file. It also carries the kind of a
failure, which `dvc repro` can not (it returns 255 for all). Nothing written here may show a credential.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from tasks.places import Json, home, read_json, write_json

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_KNOWN_TOKENS = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,})")


def masked(text: str) -> str:
    """The text with credentials replaced: values of secret environment variables, logins in URLs, known
    token forms.
    """
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    return _KNOWN_TOKENS.sub("***", _URL_LOGIN.sub("***", text))


class Status:
    """The status file of one running stage."""

    def __init__(self, project: Path, stage: str) -> None:
        self.path = status_file(project, stage)
        now = time.time()
        self.value: Json = {
            "stage": stage,
            "state": "running",
            "kind": None,
            "message": "",
            "progress": {"step": 0, "total": 0, "unit": "step"},
            "metrics": {},
            "pid": os.getpid(),
            "started": now,
            "updated": now,
            "fingerprint": None,
            "run_id": None,
        }
        self.update()

    def update(self, **fields: object) -> None:
        """Change some fields and replace the file."""
        self.value.update(fields)
        self.value["updated"] = time.time()
        self.value["message"] = masked(str(self.value["message"]))
        write_json(self.path, self.value)

    def metrics(self, values: Mapping[str, float]) -> None:
        """Keep the newest value of each metric; written with the next update."""
        known = self.value["metrics"]
        assert isinstance(known, dict)
        known.update(values)


def status_file(project: Path, stage: str) -> Path:
    """Where a stage's status is."""
    return home(project) / "status" / f"{stage}.json"


def read_status(project: Path, stage: str) -> Json | None:
    """The newest status of a stage, None when it never ran here."""
    path = status_file(project, stage)
    return read_json(path) if path.is_file() else None
