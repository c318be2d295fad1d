import subprocess,os
src=open('attention.cu').read()
os.makedirs('mut',exist_ok=True)
def m(a,b,n=0):
    parts=src.split(a); assert len(parts)>n+1,(a,len(parts))
    return a.join(parts[:n+1])+b+a.join(parts[n+1:])
W='      cp_async_wait<C::kSlots - 1>();\n      __syncwarp();'
muts={
 'no wait for keys': m('cp_async_wait<C::kSlots - 1>();\n      __syncwarp();','__syncwarp();'),
 'keys wait one short': m('cp_async_wait<C::kSlots - 1>();\n      __syncwarp();','cp_async_wait<C::kSlots>();\n      __syncwarp();'),
 'no syncwarp a': m('      __syncwarp();  // what other lanes','// what other lanes'),
 'no syncwarp b': m('      __syncwarp();  // all lanes have read','// all lanes have read'),
 'queries wait one short': m('  cp_async_wait<C::kSlots - 1>();\n  __syncthreads();  // the queries','  cp_async_wait<C::kSlots + 1>();\n  __syncthreads();  // the queries'),
 'no barrier queries': m('  __syncthreads();  // the queries',' // the queries'),
 'no barrier maxima': m('    __syncthreads();  // all maxima','    // all maxima'),
 'no barrier P': m('        __syncthreads();  // P and','        // P and'),
 'values wait one short': m('cp_async_wait<C::kSlots - 2>();','cp_async_wait<C::kSlots - 1>();'),
 'values wait 0 one short': m('cp_async_wait<C::kSlots - 1>();\n        __syncthreads();  // P','cp_async_wait<C::kSlots>();\n        __syncthreads();  // P'),
 'no barrier values': m('        __syncthreads();  // this round','        // this round'),
 'no barrier sums': m('if (last && here <= C::kWarps) __syncthreads();','if (0) __syncthreads();'),
 'no barrier ring': m('  __syncthreads();  // the ring is used up','// the ring'),
 'no cluster sync': m('  cluster_sync();\n','  __syncthreads();\n'),
 'no cluster sync end': m('  cluster_sync_reads();','  '),
 'single max copy': m('(c + 1) % 2 * C::kRows * 4 + i * 32','c % 2 * C::kRows * 4 + i * 32'),
 'no mask': m('x[i][j] = -INFINITY;','x[i][j] *= 1;'),
 'no pad': m('if (here % 2 && warp == here % C::kWarps)','if (0)'),
 'no rescale': m('acc[m][n][j] *= j % 2 ? shrink.y : shrink.x','acc[m][n][j] *= 1'),
 'no extra round': m('const int stop = last ? here : here + 1;','const int stop = here;'),
 'wait after table without flag': m('if (!a.early_table) wait_for_previous_kernel();',''),
 'no wait in early': m('if (a.early_table) wait_for_previous_kernel();',''),
 'early exit before wait': m('  if (a.early_table) wait_for_previous_kernel();\n','').replace('  if (queries <= 0) return;','  if (queries <= 0) return;\n  if (a.early_table) wait_for_previous_kernel();'),
 'speculation unbounded': m('if (index < entries) return','if (index < (1 << 20)) return'),
 'page not checked': m('j < inside);','true);'),
 'no swizzle': m('return (unit ^ (row & 7)) << 4;','return unit << 4;'),
}
from concurrent.futures import ThreadPoolExecutor
def one(item):
    i,(name,text)=item
    d='mut/%d'%i; os.makedirs(d,exist_ok=True)
    open(d+'/attention.cu','w').write(text); open(d+'/test.cpp','w').write(open('test.cpp').read())
    r=subprocess.run('g++ -std=c++17 -O0 -w -mf16c -I emu -I %s -I . %s/test.cpp -o %s/test && timeout 60 %s/test '%(d,d,d,d)+('stats1' if name=='no swizzle' else 'mutants'),shell=True,capture_output=True,text=True)
    lines=(r.stdout+r.stderr).splitlines()
    caught='FAIL' in r.stdout
    if name=='no swizzle': caught=' 0 extra' not in next(l for l in lines if 'ldmatrix' in l)
    return ('caught' if caught else 'MISSED')+' '+name+' -> '+(lines[-1] if lines else 'crash')+' | '+next((l.strip() for l in lines if l.startswith('  ')),'')[:110]
with ThreadPoolExecutor(2) as pool:
    for line in pool.map(one,[(i,x) for i,x in enumerate(muts.items()) if not os.environ.get("ONLY") or os.environ["ONLY"] in x[0]]): print(line,flush=True)
