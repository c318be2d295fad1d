# SPDX-License-Identifier: Apache-2.0
"""Packages and the C++ scoring library; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    packages=[
        "dustin_vllm",
        "dustin_vllm.bench",
        "dustin_vllm.calibrate",
        "dustin_vllm.eval",
        "dustin_vllm.policies",
        "dustin_vllm.triton_kernels",
        "dustin_vllm.configs",
        "dustin_vllm.csrc.cuda",
    ],
    package_dir={
        "dustin_vllm": "dustin_vllm",
        "dustin_vllm.triton_kernels": "triton_kernels",
        "dustin_vllm.configs": "configs",
        "dustin_vllm.csrc.cuda": "csrc/cuda",
    },
    package_data={
        "dustin_vllm": ["py.typed"],
        "dustin_vllm.configs": ["*.json"],
        "dustin_vllm.csrc.cuda": ["*.cu", "*.h"],  # compiled when first needed, see cuda_ops.py
    },
    ext_modules=[
        # A plain shared library (no Python or torch headers) that cpu_ops.py loads with
        # ctypes. Optional: without a compiler the build warns and cpu_ops.py runs in torch.
        # No -march: the kernels pick their instruction set at run time.
        Extension(
            "dustin_vllm._cpu",
            sources=["csrc/cpu/score.cpp"],
            depends=["csrc/cpu/kernels.h"],
            language="c++",
            extra_compile_args=["-O3", "-fopenmp", "-std=c++17", "-Wno-psabi"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ],
)
