"""Registers and spills of each instantiation, from the output of nvcc -Xptxas -v."""

import pathlib
import re
import sys

rows, name, spill = [], "", ("", "")
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    if found := re.search(r"Compiling entry function '(\S+)'", line):
        name = found.group(1)
    if found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
        spill = found.groups()
    if found := re.search(r"Used (\d+) registers", line):
        config = re.search(r"ConfigINS_\d+(\w+?)E((?:Li\d+E)+)E", name)
        numbers = tuple(int(x) for x in re.findall(r"Li(\d+)E", config.group(2)))
        rows.append((config.group(1), *numbers, int(found.group(1)), spill))
for config, dim, columns, groups, parts, blocks, registers, spills in sorted(rows):
    print(
        f"{config} dim {dim} columns {columns} groups {groups} parts {parts} blocks {blocks}: "
        f"{registers} registers, spills {spills}"
    )
