"""A GPU that is not there: engines run on device "cuda" in a process without one, and are held to CUDA's rules.

Kernels run in Triton's interpreter and torch's operations on the CPU, but what they are given must lie where they run;
graphs are captured and replayed from what was captured alone; copies of pinned memory happen late; a launch leaves its
signature, so that another process can compile it for a real target. See `Gpu` for what is refused and what is counted.
"""

from tests.simulated_gpu.device import Gpu, simulated_gpu

__all__ = ["Gpu", "simulated_gpu"]
