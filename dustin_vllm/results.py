# SPDX-License-Identifier: Apache-2.0
"""JSON files of measurements: written whole or not at all, read only up to a size."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20


class ResultsError(RuntimeError):
    """A file of results cannot be written or read; the message names the file."""


def write_json(path: Path, data: Any) -> None:
    """Write JSON, complete or not at all: an older file stays until the new one is whole.

    Raises:
        ResultsError: the disk is full, the folder is missing, and so on.
    """
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    part = ""
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())  # a full disk may show only now
        # mkstemp makes files for their owner alone; results are made like other files.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(part, 0o666 & ~mask)
        os.replace(part, path)
    except OSError as error:
        if part:
            with contextlib.suppress(OSError):
                os.unlink(part)
        raise ResultsError(
            f"cannot write {path}: {error.strerror or error} ({len(text)} characters)"
        ) from error


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read a JSON file that this package wrote.

    Raises:
        ResultsError: missing, larger than ``max_bytes``, or not JSON.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(max_bytes + 1)
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) > max_bytes:
        raise ResultsError(f"{path}: larger than {max_bytes} bytes; not a file of results")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from error
