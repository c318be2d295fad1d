# SPDX-License-Identifier: Apache-2.0
"""Files of results: whole or not at all, and a full disk is said, not raised through."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from types import SimpleNamespace

import pytest
from rich.console import Console

from dustin_vllm import results
from dustin_vllm.bench import engine
from dustin_vllm.calibrate.quality import Journal
from dustin_vllm.results import ResultsError, read_json, write_json


@pytest.fixture
def full_disk(monkeypatch):
    """No space is left, as an fsync says it: buffered writes succeed until then."""

    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(results.os, "fsync", fsync)


def test_written_and_read_back(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"γ": 4})
    assert read_json(path) == {"γ": 4}
    assert path.read_text(encoding="utf-8").endswith("}\n")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_full_disk_names_the_file_and_spares_the_old_one(tmp_path, full_disk):
    path = tmp_path / "out.json"
    path.write_text('{"old": 1}')
    with pytest.raises(ResultsError, match=r"cannot write .*out\.json: No space left on device"):
        write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]  # nothing half-written is left


def test_a_missing_folder_names_the_file(tmp_path):
    with pytest.raises(ResultsError, match=r"gone/out\.json: No such file"):
        write_json(tmp_path / "gone" / "out.json", {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" + b"0," * 40 + b"0]", "larger than 64 bytes"),
        (b'{"a": ', "is not JSON"),
        (b"\x80\x04N.", "is not JSON"),  # a pickle, which is never loaded
    ],
)
def test_what_is_read_is_small_json(tmp_path, content, message):
    path = tmp_path / "in.json"
    path.write_bytes(content)
    with pytest.raises(ResultsError, match=message):
        read_json(path, max_bytes=64)
    with pytest.raises(ResultsError, match="cannot read"):
        read_json(tmp_path / "missing.json")


def test_the_engine_benchmark_says_that_the_disk_is_full(tmp_path, monkeypatch, full_disk):
    job = SimpleNamespace(mode="plain", dustin={"dense_below": 0})
    monkeypatch.setattr(engine, "make_jobs", lambda *_, **__: [job])
    numbers = dict.fromkeys(("tokens_per_second", "load_seconds", "prefill_seconds"), 1.0)
    numbers |= {"mode": "plain", "batch": 1, "context": 9, "context_at_end": 9, "stats": {}}
    monkeypatch.setattr(engine, "run_worker", lambda *_: ([numbers], None))
    monkeypatch.setattr(engine, "report", lambda *_: {})
    monkeypatch.setattr(engine, "make_table", lambda *_: "the table")
    out, err = (Console(file=io.StringIO(), width=300) for _ in range(2))
    path = tmp_path / "engine.json"
    assert engine.run_engine(engine.EngineOptions(), out, err, path, None) == 1
    assert f"cannot write {path}: No space left on device" in err.file.getvalue()
    assert "the table" in out.file.getvalue()  # what was measured is still shown


def test_a_calibration_says_that_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)

    def open_(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(path), "open", open_)
    with pytest.raises(ResultsError, match=r"journal\.jsonl: No space left on device"):
        journal.put("a", {"kl": [1.0]})
