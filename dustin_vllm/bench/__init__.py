# SPDX-License-Identifier: Apache-2.0
"""``dustin bench``: what sparse verification gains, by layer (attention) and in vLLM (engine)."""
