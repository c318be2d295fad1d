# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, its exit codes, and that it starts without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from dustin_vllm import config
from dustin_vllm.cli import app

runner = CliRunner()


def test_help_imports_neither_torch_nor_vllm():
    script = (
        "import sys\n"
        "from dustin_vllm.cli import app\n"
        "for command in ([], ['demo'], ['config'], ['doctor']):\n"
        "    app([*command, '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for word in ("demo", "config", "doctor", "--budget"):
        assert word in result.stdout


class TestConfig:
    @pytest.fixture
    def described(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def describe(model: str, draft: str | None, additional_config: dict) -> dict:
            print("a log line")
            calls.append((model, draft, additional_config))
            return {"active": True, "settings": {"budget": 512}}

        monkeypatch.setattr(config, "describe", describe)
        return calls

    def test_prints_json_only(self, described):
        result = runner.invoke(app, ["config", "target", "--draft", "draft"])
        assert result.exit_code == 0
        assert json.loads(result.stdout) == {"active": True, "settings": {"budget": 512}}
        assert described == [("target", "draft", {})]

    def test_set_adds_to_additional_config(self, described):
        arguments = ["--additional-config", '{"other": 1, "dustin": {"budget": 8, "sinks": 2}}']
        arguments += ["--set", "budget=512", "--set", "merge=weighted", "--set", "profile=null"]
        assert runner.invoke(app, ["config", "target", *arguments]).exit_code == 0
        dustin = {"budget": 512, "sinks": 2, "merge": "weighted", "profile": None}
        assert described == [("target", None, {"other": 1, "dustin": dustin})]

    @pytest.mark.parametrize("error", [config.ConfigError, OSError])
    def test_refusal_goes_to_stderr_with_code_2(self, monkeypatch, error):
        def describe(*_: Any) -> dict:
            raise error("budget = -1: must be positive")

        monkeypatch.setattr(config, "describe", describe)
        result = runner.invoke(app, ["config", "target"])
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr == "budget = -1: must be positive\n"

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--set", "budget"],
            ["--set", "=1"],
            ["--additional-config", "{"],
            ["--additional-config", "[]"],
            ["--additional-config", '{"dustin": 1}', "--set", "budget=1"],
        ],
    )
    def test_malformed_settings(self, described, arguments):
        result = runner.invoke(app, ["config", "target", *arguments])
        assert result.exit_code == 2
        assert arguments[0] in result.stderr
        assert described == []

    @pytest.mark.parametrize("missing", ["vllm", "torch"])
    def test_without_vllm_it_names_the_extras(self, monkeypatch, missing):
        def describe(*_: Any) -> dict:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

        monkeypatch.setattr(config, "describe", describe)
        result = runner.invoke(app, ["config", "target"])
        assert result.exit_code == 2
        assert "dustin-vllm[cpu]" in result.stderr
