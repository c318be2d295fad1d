# SPDX-License-Identifier: Apache-2.0
"""Source of the CUDA kernel, compiled by cuda_ops.py."""
