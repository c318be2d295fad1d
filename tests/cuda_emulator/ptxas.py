import re,sys
rows=[];name=None
for l in open(sys.argv[1]):
    m=re.search(r"Compiling entry function '(\S+)'",l)
    if m: name=m.group(1)
    m=re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads",l)
    if m: sp=m.groups()
    m=re.search(r"Used (\d+) registers",l)
    if m:
        c=re.search(r"ConfigINS_(\d+)(\w+?)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E",name)
        rows.append((c.group(2)[:8],)+tuple(map(int,c.groups()[2:]))+(int(m.group(1)),sp))
for r in sorted(rows):
    if r[0].startswith("BF") or r[-1]!=('0','0'): print('D%d cols %d warps %d rounds %d blocks %d: regs %d spill %s'%(r[1:7]+(r[7],)),r[0])
