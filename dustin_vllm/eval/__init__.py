# SPDX-License-Identifier: Apache-2.0
"""``dustin eval`` and ``dustin trace``: what sparse verification costs, and how it looks.

Everything runs in vLLM with the DUSTIN backend; only the selection policy differs. One engine
serves all policies and budgets of a granularity: they are switched between batches, and prompts,
whose keys and values are dense, come from the prefix cache. In the order of a run:

* ``tasks``: samples from real text, and their scores.
* ``run``: the options, one process per engine, the JSON, resuming, Ray.
* ``engine``: that process: every configuration on all samples.
* ``forcing``: a known continuation verified in place of drafts; perplexity and KL to dense.
* ``report``: intervals, tables, figures.
* ``trace``: one prompt, step by step, as a picture.
* ``cli``: the commands.
"""
