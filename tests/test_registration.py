# SPDX-License-Identifier: Apache-2.0
"""The name DUSTIN exists in every process, survives spawn, and changes nothing for others."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path

import pytest
from conftest import engine_args, run_python

from dustin_vllm import compat, patches

ROOT = Path(__file__).resolve().parent.parent


def config_of(target, draft, dustin):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_args(target, draft, dustin)).create_engine_config()


def test_name_is_accepted_in_any_case(target, draft):
    from vllm.engine.arg_utils import EngineArgs

    args = engine_args(target, draft, {})
    for name in ("DUSTIN", "dustin"):
        made = EngineArgs(**{**args, "attention_backend": name}).create_engine_config()
        assert made.attention_config.backend.name == "DUSTIN"
        assert made.attention_config.backend.get_class().get_name() == "DUSTIN"


def test_configuration_is_unpickled_before_plugins_are_loaded(target, draft, tmp_path):
    """What a spawned engine core or worker does first."""
    file = tmp_path / "config.pickle"
    file.write_bytes(pickle.dumps(config_of(target, draft, {"budget": 512})))
    out = run_python(
        "import pickle, sys\n"
        f"config = pickle.load(open({str(file)!r}, 'rb'))\n"
        "import vllm.plugins\n"
        "assert not vllm.plugins.plugins_loaded\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as E\n"
        "backend = config.attention_config.backend\n"
        "assert backend is E['DUSTIN'] is copy.deepcopy(backend)\n"
        "print(backend.name, config.speculative_config.attention_backend.name,"
        " config.additional_config)".replace("import pickle, sys", "import copy, pickle, sys")
    )
    assert out.split()[:2] == ["DUSTIN", "DUSTIN"]
    assert "'budget': 512" in out


def test_copies_of_the_member_are_the_member(target, draft):
    backend = config_of(target, draft, {}).attention_config.backend
    assert copy.copy(backend) is backend
    assert copy.deepcopy({"a": backend})["a"] is backend
    assert pickle.loads(pickle.dumps(backend)) is backend


def test_other_backends_are_untouched():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as E

    assert E.CPU_ATTN.value == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert pickle.loads(pickle.dumps(E.CPU_ATTN)) is E.CPU_ATTN
    assert E.CUSTOM.value is None


STOCK = """
import json, os
from vllm.engine.arg_utils import EngineArgs
args = json.loads(os.environ["ARGS"])
config = EngineArgs(**args).create_engine_config()
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm import LLM, SamplingParams
llm = LLM(**args)
runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
out = llm.generate([{"prompt_token_ids": list(range(2, 200))}],
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False), use_tqdm=False)
print("RESULT", json.dumps({
    "hash": config.compute_hash(),
    "config": str(config),
    "ids": list(out[0].outputs[0].token_ids),
    "builder": GPUModelRunner.initialize_metadata_builders.__module__,
    "patched": hasattr(GPUModelRunner.initialize_metadata_builders, "__dustin__"),
    "drafter": type(runner.drafter).__module__,
    "extension": config.parallel_config.worker_extension_cls,
    "attached": hasattr(runner, "dustin"),
}))
"""


@pytest.mark.engine
def test_without_the_flag_vllm_is_as_without_the_plugin(target, draft):
    args = json.dumps(engine_args(target, draft, None))
    results = []
    for plugins in ("dustin", ""):
        out = run_python(STOCK, ARGS=args, VLLM_PLUGINS=plugins)
        line = next(line for line in out.splitlines() if line.startswith("RESULT"))
        results.append(json.loads(line.removeprefix("RESULT ")))
    with_plugin, without = results
    assert with_plugin == without
    assert without["drafter"] == "vllm.v1.spec_decode.draft_model"
    assert not with_plugin["patched"]


def test_every_patch_is_in_the_ledger_and_its_symbol_exists():
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    patches.apply()
    patches.apply_runner_patch()
    platform = type(current_platform)
    owners = {
        "AttentionBackendEnum.DUSTIN": AttentionBackendEnum,
        "CpuPlatform.get_attn_backend_cls": platform,
        "current_platform.check_and_update_config": platform,
        "VllmConfig.__post_init__": VllmConfig,
        "SpeculativeConfig._verify_and_get_draft_tp": SpeculativeConfig,
        "DraftModelProposer._raise_if_draft_tp_mismatch": DraftModelProposer,
        "parallel_state._TP": parallel_state,
        "InputProcessor._validate_params": InputProcessor,
        "SpeculativeConfig.verify_equal_vocab_size_if_draft_model": SpeculativeConfig,
        "GPUModelRunner.initialize_metadata_builders": GPUModelRunner,
    }
    assert {".".join(p.symbol.split(".")[-2:]) for p in patches.LEDGER} == set(owners)
    for symbol, owner in owners.items():
        assert hasattr(owner, symbol.split(".")[1])
    for patch in patches.LEDGER:
        assert all(vars(patch).values())
    # Nothing outside the ledger module assigns into vLLM's classes.
    for file in (ROOT / "dustin_vllm").glob("*.py"):
        if file.name != "patches.py":
            assert "setattr(" not in file.read_text(), file.name


def test_async_scheduling_is_on_unless_the_user_says_no(target, draft, monkeypatch):
    """The wrapper of VllmConfig.__post_init__, which is installed on CUDA only."""
    from vllm.config import VllmConfig

    seen = []
    monkeypatch.setattr(
        VllmConfig,
        "__post_init__",
        patches._schedule_ahead(lambda made: seen.append(made.scheduler_config.async_scheduling)),
    )
    made = config_of(target, draft, {})
    cases = {"DUSTIN": [(None, True), (False, False), (True, True)], "CPU_ATTN": [(None, None)]}
    seen.clear()
    for backend, settings in cases.items():
        for chosen, wanted in settings:
            made.attention_config.backend = type(made.attention_config.backend)[backend]
            made.scheduler_config.async_scheduling = chosen
            made.__post_init__()
            assert seen.pop() is wanted
    made.attention_config.backend = patches.add_backend_member()
    made.scheduler_config.async_scheduling, made.speculative_config = None, None
    made.__post_init__()
    assert seen == [None]


def test_a_symbol_patched_by_somebody_else_is_refused():
    class Owner:
        def method(self) -> None: ...

    Owner.method.__module__ = "other_plugin.patches"
    with pytest.raises(RuntimeError, match=r"Owner\.method is already patched by other_plugin"):
        patches._wrap(Owner, "method", lambda original: original)
    with pytest.raises(RuntimeError, match=r"Owner\.gone does not exist in this vLLM"):
        patches._wrap(Owner, "gone", lambda original: original)


def test_patching_twice_wraps_once():
    class Owner:
        def method(self) -> int:
            return 1

    Owner.method.__module__ = "vllm.fake"
    for _ in range(2):
        patches._wrap(Owner, "method", lambda original: lambda self: original(self) + 1)
    assert Owner().method() == 2


def test_a_failed_registration_does_not_stop_vllm_but_is_raised_when_chosen(monkeypatch):
    monkeypatch.setattr(patches, "_failure", None)
    monkeypatch.setattr(compat, "vllm_distribution", lambda: ("vllm", "0.12.0"))
    patches.apply()
    with pytest.raises(RuntimeError, match=r"supports vLLM 0\.26 to 0\.33, found vllm 0\.12\.0"):
        patches.check()


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("0.26.0", True),
        ("0.33.1", True),
        ("0.32.0+cpu", True),
        ("0.25.9", False),
        ("0.34.0", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_version_window(version, ok):
    assert compat.supported(version) is ok


def test_registering_is_light():
    """vLLM calls register() in every process; it must not import kernels or the model runner."""
    out = run_python(
        "import sys, dustin_vllm\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules\n"
        "dustin_vllm.register(); dustin_vllm.register()\n"
        "print([m for m in ('vllm.v1.worker.gpu_model_runner', 'dustin_vllm.runtime',"
        " 'dustin_vllm.backend') if m in sys.modules])"
    )
    assert out.strip().endswith("[]")


def test_triton_kernels_is_not_a_top_level_package():
    """That name belongs to OpenAI's MoE kernels, which vLLM probes for."""
    out = run_python(
        "import importlib.util as u\n"
        "print(u.find_spec('triton_kernels'), u.find_spec('dustin_vllm.triton_kernels').name)"
    )
    assert out.split() == ["None", "dustin_vllm.triton_kernels"]


def test_a_checkout_finds_its_subpackages_without_an_install(tmp_path):
    """`python -m` in a checkout imports it in place of the package that is installed."""
    for name in ("dustin_vllm", "configs", "triton_kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so"))
    out = run_python(
        "import sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import dustin_vllm, importlib.util as u\n"
        "from dustin_vllm import config\n"
        "print(dustin_vllm.__file__, u.find_spec('dustin_vllm.triton_kernels').origin,"
        " len(config._shipped_profiles()))"
    )
    package, kernels, profiles = out.split()
    assert package == str(tmp_path / "dustin_vllm" / "__init__.py")
    assert kernels == str(tmp_path / "triton_kernels" / "__init__.py")
    assert int(profiles) >= 10


def test_workers_import_the_package_that_started_them(monkeypatch, tmp_path):
    from dustin_vllm import demo
    from dustin_vllm.bench import engine

    for folder, wanted in ((tmp_path, "1"), (ROOT, None)):
        monkeypatch.chdir(folder)
        for made in (
            demo.worker_environment("dustin", {}, 1, "/tmp", verbose=False),
            engine.worker_environment("dustin", {}, verbose=False),
        ):
            assert made.get("PYTHONSAFEPATH") == wanted
