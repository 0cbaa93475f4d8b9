"""Programmatic launches: a kernel whose programs begin while the kernel before it still runs. Import this module only
where triton is installed.

Why results cannot change by it. A launch with the option begins as soon as every program of the kernel before it, in
the order of the stream or along the edge of a captured graph, has let it or has ended; that kernel may then still run,
and nothing that it wrote is visible. `gdc_wait` is what makes up for it: it returns when the kernel before has
completed, all of it, and its writes are visible. So here

1. every program waits, as the first thing that its kernel does: before each load, store and copy, and before each way
   out. What it reads has been written (read after write), and what it writes nobody reads any more (write after read)
   or writes later (write after write), weights and tables included: no access needs an argument of its own.
2. Only then does it let dependents begin. A dependent therefore begins when all programs of this kernel have waited,
   that is, when the kernel before this one has completed and its writes are visible: of all that was launched before,
   no more than one kernel is unfinished, and that is the one which the dependent waits for. A kernel with a program
   that ended without waiting could complete before its predecessor, and the next would begin too early.
3. A kernel without the option, a copy or a fill begins when all before it has completed, as ever: the last kernel of a
   chain completes after the ones before it, by 1. Behind a copy the option does nothing: CUDA joins kernels alone by
   it. The chain that `treespec autotune` checks begins behind one.
4. The option and the wait are switched together, by `launch_options`. A kernel that waits and was launched without the
   option goes on at once.

No compiler may move an access above the wait: the operation that it is in Triton 3.9 has side effects, and so has the
inline assembly that it is in 3.6. It stands outside of loops, where software pipelining would put a loop's first loads
before it. On sm_100 a block allocates its tensor memory before anything else, the wait included. That cannot lock up:
dependents begin when every program here has its own, and go on when these have ended. The order is not taken on trust:
`aot_order` proves it of the PTX and the machine code of every configuration that is compiled ahead of time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_predecessors(PDL: tl.constexpr):
    """The first statement of a kernel that may be launched programmatically; nothing without PDL."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
