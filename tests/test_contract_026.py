# SPDX-License-Identifier: Apache-2.0
"""What we touch of vLLM has the shape we expect: in 0.26.0 (CUDA) and in the installed version.

The CUDA wheel is downloaded (``DUSTIN_VLLM_026`` may name an unpacked one) and its .py files
alone are kept; they import beside any torch, on no platform. Run as a script, this file is the
probe: it imports one vLLM and writes what it found as JSON. The rest is read from the source.
"""

import ast
import copy
import importlib.util
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
import zipfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

VERSION = "0.26.0"
COMMON = "vllm.v1.attention.backend:CommonAttentionMetadata"
FLASH = "vllm.v1.attention.backends.flash_attn:FlashAttention"
CPU = "vllm.v1.attention.backends.cpu_attn:CPUAttention"
ENUM = "vllm.v1.attention.backends.registry:AttentionBackendEnum"
REQUEST = "vllm.v1.worker.gpu_input_batch:CachedRequestState"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
PROPOSER = "vllm.v1.spec_decode.draft_model:DraftModelProposer"
BASE = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
SPECULATIVE = "vllm.config.speculative:SpeculativeConfig"
PLATFORM = "vllm.platforms.interface:Platform"
INPUT = "vllm.v1.engine.input_processor:InputProcessor"
PARALLEL = "vllm.distributed.parallel_state"
BUILD_DRAFT = "build_per_group_and_layer_attn_metadata"
BUILD = "self, common_prefix_len, common_attn_metadata, fast_build=False"
SIGNATURES = {  # bound class methods show no cls
    f"{RUNNER}.initialize_metadata_builders": "self, kv_cache_config, kernel_block_sizes",
    f"{RUNNER}._sample": "self, logits, spec_decode_metadata",
    f"{PROPOSER}.propose": "self, num_speculative_tokens, target_token_ids, target_positions, "
    "target_hidden_states, next_token_ids, token_indices_to_sample, common_attn_metadata, "
    "sampling_metadata, mm_embed_inputs=None, num_rejected_tokens_gpu=None, slot_mappings=None",
    f"{PROPOSER}.set_inputs_first_pass": "self, target_token_ids, next_token_ids, target_positions"
    ", target_hidden_states, token_indices_to_sample, cad, num_rejected_tokens_gpu",
    f"{PROPOSER}.{BUILD_DRAFT}": "self, common_attn_metadata, draft_index=0",
    f"{FLASH}MetadataBuilder.build": BUILD,
    f"{CPU}MetadataBuilder.build": BUILD,
    f"{FLASH}Impl.forward": "self, layer, query, key, value, kv_cache, attn_metadata, output, "
    "output_scale=None, output_block_scale=None",
    f"{SPECULATIVE}.verify_equal_vocab_size_if_draft_model": "self",
    f"{SPECULATIVE}._verify_and_get_draft_tp": "target_parallel_config, "
    "speculative_draft_tensor_parallel_size, draft_hf_config",
    f"{PROPOSER}._raise_if_draft_tp_mismatch": "self",
    f"{PROPOSER}._get_model": "self",
    f"{PROPOSER}._determine_batch_execution_and_padding": "self, num_tokens, use_cudagraphs=True",
    f"{PROPOSER}.dummy_run": "self, num_tokens, use_cudagraphs=True, is_graph_capturing=False, "
    "slot_mappings=None",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build_for_drafting": "self, "
    "common_attn_metadata, draft_index",
    f"{INPUT}._validate_params": "self, params, supported_tasks",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks": "self, request, "
    "num_computed_tokens",
    f"{PARALLEL}:GroupCoordinator.broadcast": "self, input_, src=0",
    f"{PARALLEL}:GroupCoordinator.all_reduce": "self, input_",
    f"{PLATFORM}.check_and_update_config": "vllm_config",
    f"{PLATFORM}.get_attn_backend_cls": "selected_backend, attn_selector_config, num_heads=None",
}
MEMBERS = f"""
{ENUM} CPU_ATTN CUSTOM FLASH_ATTN get_class get_path
{COMMON} block_table_tensor is_prefilling max_query_len max_seq_len num_actual_tokens num_reqs
{COMMON} query_start_loc query_start_loc_cpu replace seq_lens seq_lens_cpu_upper_bound slot_mapping
vllm.v1.attention.backend:AttentionMetadataBuilder kv_cache_spec
{FLASH}Backend get_builder_cls get_impl_cls get_name
{FLASH}MetadataBuilder aot_schedule block_size get_cudagraph_support max_num_splits
{FLASH}MetadataBuilder supports_update_block_table use_full_cuda_graph
{FLASH}Impl head_size num_heads num_kv_heads scale
{CPU}BackendImpl num_heads num_kv_heads scale
{CPU}MetadataBuilder isa
vllm.model_executor.layers.attention.attention:Attention impl kv_cache
{RUNNER} attn_groups device drafter input_batch requests scheduler_config vllm_config
{BASE} _draft_attn_layer_names draft_attn_groups draft_model_config input_ids max_model_len
{BASE} _enable_probabilistic_draft_probs _last_draft_probs vllm_config
{RUNNER} model_config use_async_scheduling
{REQUEST} num_tokens output_token_ids prompt_token_ids sampling_params
vllm.v1.outputs:SamplerOutput sampled_token_ids
vllm.v1.spec_decode.metadata:SpecDecodeMetadata num_draft_tokens
vllm.entrypoints.llm:LLM collective_rpc generate
vllm.v1.core.kv_cache_manager:KVCacheManager cache_blocks coordinator
vllm.v1.request:Request num_prompt_tokens
vllm.sampling_params:SamplingParams extra_args skip_reading_prefix_cache
{PARALLEL}:GroupCoordinator device_group local_rank rank_in_group world_size
vllm.v1.worker.gpu_input_batch:InputBatch req_ids
vllm.v1.worker.utils:AttentionGroup get_metadata_builder layer_names
vllm.v1.worker.worker_base:WorkerBase model_runner
vllm.config.cache:CacheConfig block_size cache_dtype user_specified_block_size
vllm.config.compilation:CompilationConfig static_forward_context
vllm.config.device:DeviceConfig device_type
vllm.config.model:ModelConfig dtype get_sliding_window get_vocab_size hf_text_config is_hybrid
vllm.config.model:ModelConfig is_attention_free is_encoder_decoder is_multimodal_model
vllm.config.model:ModelConfig runner_type use_mla uses_alibi
vllm.config.parallel:ParallelConfig decode_context_parallel_size prefill_context_parallel_size
vllm.config.parallel:ParallelConfig pipeline_parallel_size tensor_parallel_size worker_extension_cls
vllm.config.scheduler:SchedulerConfig async_scheduling get_scheduler_cls max_num_seqs
vllm.config.scheduler:SchedulerConfig scheduler_cls
{SPECULATIVE} draft_parallel_config
{SPECULATIVE} attention_backend draft_model_config draft_sample_method method
{SPECULATIVE} num_speculative_tokens parallel_drafting target_model_config use_heterogeneous_vocab
vllm.config.vllm:VllmConfig additional_config attention_config cache_config compilation_config
vllm.config.vllm:VllmConfig device_config lora_config model_config parallel_config
vllm.config.vllm:VllmConfig scheduler_config speculative_config use_v2_model_runner
"""
CODE = {  # parts of the source
    "vllm.model_executor.layers.attention.attention:Attention.__init__": "kv_cache = torch.tensor",
    f"{RUNNER}.__init__": "uses_draft_model(): self.drafter = DraftModelProposer(",
    f"{FLASH}MetadataBuilder.build": "max_num_splits = self.max_num_splits",
    "vllm.v1.attention.selector:_cached_get_attn_backend": "get_attn_backend_cls(backend, ",
    f"{RUNNER}.propose_draft_token_ids": "self.drafter.propose(num_speculative_tokens="
    "num_spec_tokens_to_schedule, target_token_ids=target_token_ids, target_positions="
    "target_positions, target_hidden_states=target_hidden_states, next_token_ids=next_token_ids, "
    "token_indices_to_sample=token_indices_to_sample, sampling_metadata=sampling_metadata, "
    "common_attn_metadata=common_attn_metadata, mm_embed_inputs=mm_embed_inputs, "
    "num_rejected_tokens_gpu=num_rejected_tokens_gpu, slot_mappings=slot_mappings)",
    f"{BASE}.set_inputs_first_pass": "return (num_tokens, token_indices_to_sample, cad)",
    f"{RUNNER}._dummy_run": "self.drafter.dummy_run(num_tokens, use_cudagraphs=use_cudagraphs, "
    "is_graph_capturing=is_graph_capturing, slot_mappings=slot_mappings)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "self.synchronize_input_prep()",
    f"{BASE}.__init__": "self.constant_draft_positions: bool = False",
    f"{BASE}.propose": "if not self.constant_draft_positions or token_index == 0: _, per_layer_att",
}
NAME = "added others_unchanged others_pickle by_value lower_case hashable copies spawn"


# The probe, in a process of its own with one vLLM on the path.
def signature(symbol):
    shape = inspect.signature(resolve_name(symbol))
    bare = [p.replace(annotation=p.empty) for p in shape.parameters.values()]
    return str(shape.replace(parameters=bare, return_annotation=shape.empty))[1:-1]


def in_child(config):
    """Runs spawned: ``config`` was unpickled before any plugin was loaded."""
    known = config.backend is resolve_name(ENUM)["DUSTIN"]
    return config, known and not resolve_name("vllm.plugins:plugins_loaded")


def name_facts():
    patches = resolve_name("dustin_vllm.patches")
    enum = resolve_name(ENUM)
    before = {m.name: m.value for m in enum}
    patches.compat.vllm_distribution = lambda: ("vllm", resolve_name("vllm:__version__"))
    resolve_name("vllm.plugins:load_general_plugins")()  # VLLM_PLUGINS=dustin: our entry point
    patches.apply()  # a second time
    patches.check()
    member = enum["DUSTIN"]
    config = resolve_name("vllm.config:AttentionConfig")(backend="dustin")
    os.environ["VLLM_PLUGINS"] = ""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        returned, good_in_child = pool.submit(in_child, config).result()
    return {
        "added": [m.name for m in enum] == [*before, "DUSTIN"] and len(enum) == len(before) + 1,
        "others_unchanged": {m.name: m.value for m in enum if m is not member} == before,
        "others_pickle": all(pickle.loads(pickle.dumps(enum[n])) is enum[n] for n in before),
        "by_value": enum(patches.BACKEND_PATH) is member and member.get_path() == member.value,
        "lower_case": config.backend is member,
        "hashable": {member: bool(config.compute_hash())}[enum.DUSTIN],
        "copies": copy.copy(member) is member is copy.deepcopy({"a": member})["a"],
        "spawn": good_in_child and returned.backend is member,
    }


def contract_our_methods_override_what_exists_and_take_what_vllm_passes():
    gone = {"use_cascade_attention"} if resolve_name("vllm:__version__") != VERSION else set()
    gone |= {"one_rank", "draft", "_finish", "_compare_replicas"}  # our own
    modules = [f"dustin_vllm.{name}" for name in ("proposer", "backend_cpu", "backend_cuda")]
    for ours in [value for module in modules for value in vars(resolve_name(module)).values()]:
        if inspect.isclass(ours) and ours.__module__.startswith("dustin_vllm."):
            for name in {n for n, v in vars(ours).items() if inspect.isroutine(v)} - gone:
                names = list(inspect.signature(getattr(ours.__base__, name)).parameters)
                inspect.signature(getattr(ours, name)).bind(*names)
                inspect.signature(getattr(ours, name)).bind(**dict.fromkeys(names))


def contract_draft_model_proposer_can_become_ours():
    seen, compacted, drafter = [], [], object.__new__(resolve_name(PROPOSER))
    drafter.__class__ = resolve_name("dustin_vllm.proposer:DustinProposer")
    drafter.runtime = SimpleNamespace(begin_draft_pass=seen.append, compact_draft=compacted.append)
    drafter._first_pass_rows, drafter.draft_attn_groups = "rows", []
    drafter.build_per_group_and_layer_attn_metadata(None)
    drafter.build_per_group_and_layer_attn_metadata(None, draft_index=1)
    assert (seen, compacted) == (["rows", None], [None, None])
    for name in ("propose", "set_inputs_first_pass", BUILD_DRAFT):
        assert getattr(resolve_name(PROPOSER), name) is getattr(resolve_name(BASE), name)
    assert "constant_draft_positions" not in inspect.getsource(resolve_name(PROPOSER))


def contract_request_state_counts_tokens():
    state = resolve_name(REQUEST)("id", [1, 2], [], None, None, ([],), 0, [3])
    assert (state.num_tokens, state.output_token_ids) == (3, [3])


def contract_hooks_are_wrapped_once_and_the_worker_extension_clashes_with_nothing():
    for _ in range(2):
        resolve_name("dustin_vllm.patches:apply_runner_patch")()
    platform = type(resolve_name("vllm.platforms:current_platform"))
    runner_hook = resolve_name(f"{RUNNER}.initialize_metadata_builders")
    for hook in (platform.check_and_update_config, runner_hook):
        assert (hook.__dustin__, hasattr(hook.__wrapped__, "__dustin__")) == (True, False)
    assert not hasattr(resolve_name("vllm.v1.worker.gpu_worker:Worker"), "dustin_stats")


CONTRACTS = [name for name in globals() if name.startswith("contract_")]


def attempt(function, *args):
    """One broken contract must not hide the others."""
    try:
        return function(*args)
    except Exception:
        return traceback.format_exc(limit=-1)


def probe():
    name = attempt(name_facts)
    facts = name if isinstance(name, dict) else dict.fromkeys(NAME.split(), name)
    facts.update((contract, attempt(globals()[contract]) or True) for contract in CONTRACTS)
    facts["version"] = resolve_name("vllm:__version__")
    return {**facts, "signatures": {symbol: attempt(signature, symbol) for symbol in SIGNATURES}}


def download(folder):
    """Folder with the .py files of the CUDA wheel, kept from run to run."""
    tree = folder / f"vllm-{VERSION}-py"
    if not tree.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = f"-m pip download --no-deps --only-binary=:all: vllm=={VERSION} -d".split()
            command = [sys.executable, *command, scratch, "--platform=manylinux_2_28_x86_64"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                why = "could not be downloaded (or set DUSTIN_VLLM_026): nothing is proven about it"
                pytest.fail(f"vllm=={VERSION} {why}\n{done.stderr[-1500:]}", pytrace=False)
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                wheel.extractall(f"{scratch}/t", [n for n in wheel.namelist() if n.endswith(".py")])
            Path(scratch, "t").rename(tree)
    return tree


class Vllm:
    """One vLLM: the folder that holds it, and the probe's facts about it."""

    def __init__(self, folder, out):
        self.folder = folder
        env = {**os.environ, "VLLM_PLUGINS": "dustin", "PYTHONPATH": str(folder)}
        command = [sys.executable, __file__, out]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            pytest.fail(f"{folder}: no vLLM to import\n{done.stderr[-3000:]}", pytrace=False)
        self.facts = json.loads(out.read_text())

    def tree(self, symbol):
        """Syntax tree of a module, class or method: ``module:``, ``module:Class.method``."""
        module, _, path = symbol.partition(":")
        found = ast.parse((self.folder / f"{module.replace('.', '/')}.py").read_text("utf-8"))
        for name in filter(None, path.split(".")):
            found = next((n for n in found.body if getattr(n, "name", None) == name), None)
            assert found, f"no {symbol} in this vLLM"
        return found

    def code(self, symbol):  # with uniform white space
        return " ".join(ast.unparse(self.tree(symbol)).split())


@pytest.fixture(scope="session")
def both(request, tmp_path_factory):
    old = Path(os.environ.get("DUSTIN_VLLM_026") or download(request.config.cache.mkdir("vllm")))
    new = Path(importlib.util.find_spec("vllm").origin).parent.parent
    out = tmp_path_factory.mktemp("facts")
    return {VERSION: Vllm(old, out / "old"), "installed": Vllm(new, out / "new")}


@pytest.fixture(scope="session", params=[VERSION, "installed"])
def vllm(request, both):
    return both[request.param]


def test_the_old_vllm_is_old_and_has_no_register_method(both):
    assert both[VERSION].facts["version"] == VERSION
    assert "def register(" not in both[VERSION].code(ENUM)


@pytest.mark.parametrize("fact", [*NAME.split(), *CONTRACTS])
def test_probe(vllm, fact):
    assert vllm.facts[fact] is True, vllm.facts[fact]


@pytest.mark.parametrize("symbol", SIGNATURES)
def test_signature(vllm, symbol):
    assert vllm.facts["signatures"][symbol] == SIGNATURES[symbol]


def test_signatures_do_not_differ_between_the_versions(both):
    assert both[VERSION].facts["signatures"] == both["installed"].facts["signatures"]


@pytest.mark.parametrize("line", MEMBERS.strip().splitlines(), ids=lambda m: m.split()[0])
def test_members(vllm, line):
    symbol, *wanted = line.split()
    owner = vllm.tree(symbol)
    found = {getattr(n, "name", None) for n in owner.body}
    for part in owner.body:
        prefix = "self." if isinstance(part, ast.FunctionDef) else ""
        stored = [n for n in ast.walk(part) if isinstance(getattr(n, "ctx", None), ast.Store)]
        texts = [ast.unparse(n) for n in stored]
        found |= {text.removeprefix(prefix) for text in texts if text.startswith(prefix)}
    assert set(wanted) - found == set()


@pytest.mark.parametrize("symbol", CODE)
def test_code(vllm, symbol):
    assert CODE[symbol] in vllm.code(symbol)


def test_every_symbol_of_the_ledger_exists(vllm):
    from dustin_vllm.patches import LEDGER

    for patch in LEDGER:
        symbol = patch.symbol.replace(".current_platform.", ".interface.Platform.")
        module, owner, name = symbol.rsplit(".", 2)
        if name == "_TP":  # a global of a module
            assert "_TP: GroupCoordinator | None = None" in vllm.code(f"{module}.{owner}:")
        else:
            assert name == "DUSTIN" or vllm.tree(f"{module}:{owner}.{name}")


@pytest.mark.parametrize("platform", ["cpu:CpuPlatform", "cuda:CudaPlatformBase"])
@pytest.mark.parametrize("name", ["check_and_update_config", "get_attn_backend_cls"])
def test_platform_hooks_are_class_methods_that_our_wrappers_fit(vllm, platform, name):
    hook = vllm.tree(f"vllm.platforms.{platform}.{name}")
    assert [ast.unparse(d) for d in hook.decorator_list] == ["classmethod"]
    names = ", ".join(a.arg for a in hook.args.args)
    assert names == f"cls, {SIGNATURES[f'{PLATFORM}.{name}'].removesuffix('=None')}"


def test_platform_sees_the_configuration_after_async_scheduling_is_decided(vllm):
    code = vllm.code("vllm.config.vllm:VllmConfig.__post_init__")
    before, after = code.split("current_platform.check_and_update_config(self)")
    assert "async_scheduling = False" in before
    assert "async_scheduling = " not in after


@pytest.mark.parametrize("builder", [FLASH, CPU])
def test_builders_take_lengths_only_from_what_we_replace(vllm, builder):
    """In 0.26 a copy of the metadata keeps stale shadows of the lengths; nobody may read them."""
    code = vllm.code(f"{builder}MetadataBuilder.build")
    read = set(re.findall(r"common_attn_metadata\.(\w*(?:seq_len|computed)\w*)", code))
    # The upper bound is read for context parallelism and multimodal prefixes, both refused.
    assert read - {"seq_lens_cpu_upper_bound"} == {"seq_lens", "max_seq_len"}


def test_metadata_is_built_once_before_every_draft_pass(vllm):
    later = [
        "for token_index in range(self.num_speculative_tokens - 1):",
        f"self.{BUILD_DRAFT}(common_attn_metadata, draft_index=token_index + 1)",
        "self.model(",
    ]
    first = ["self.set_inputs_first_pass(", f"self.{BUILD_DRAFT}(common_attn_metadata)", later[-1]]
    pattern = rf"self\.set_inputs_first_pass\(|self\.{BUILD_DRAFT}.*?\)|self\.model\(|for token.*?:"
    loops = [n for n in vllm.tree(f"{BASE}.propose").body if isinstance(n, ast.For)]
    assert re.findall(pattern, " ".join(ast.unparse(loops[-1]).split())) == later
    assert re.findall(pattern, vllm.code(f"{BASE}.propose")) == first + later


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(probe()))
