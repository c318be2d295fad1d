# SPDX-License-Identifier: Apache-2.0
"""``dustin calibrate``: find a pair's scoring heads and selection parameters.

Works on plain transformers models, without vLLM. In the order of a run:

* ``text``: windows of real text, copies and needles.
* ``attention``: an attention function for transformers that records, and that verifies sparsely.
* ``traces``: what one window's keys, values and queries were; scores from them.
* ``heads``: semantic retrieval heads.
* ``policies``: settings to selections (by the package's own functions), recovery.
* ``quality``: KL of the target under selections against dense attention.
* ``search``: layers greedily, then Optuna.
* ``report``: tables, intervals, figures, the profile.
"""
