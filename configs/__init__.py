# SPDX-License-Identifier: Apache-2.0
"""Profiles of target/draft pairs, one JSON file each."""
