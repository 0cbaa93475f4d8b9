"""A GPU that is not there: engines run on device "cuda" in a process without one, held to CUDA's rules; see `Gpu`.

Kernels run in Triton's interpreter, other operations on the CPU; another process can compile the launches for a GPU.
"""

from tests.simulated_gpu.device import Gpu, simulated_gpu

__all__ = ["Gpu", "simulated_gpu"]
