"""Predicts the time of an 8B target pass from its launches and their compiled code. Needs Triton, but no GPU.

    PYTHONPATH=.:kernels:weights python perf/launch_model.py --rows 1 32

Each kernel of a bfloat16 pass is compiled for sm_90, and its machine code gives the programs that a multiprocessor
holds and the bytes of weights and K/V that they keep in flight. Kernels run one after another:

- ordinary launches: a kernel starts `GAP` after its predecessor, waits `RAMP` for its first bytes, and then reads at
  `SUSTAINED` of the bandwidth of a copy;
- programmatic launches: the gap is `GAP_PDL`;
- with prefetch, a kernel also requests its first weights while its predecessor runs, unless that one is bound by
  memory itself.

The gaps and the ramp are assumptions, of the order of published measurements on H100. The stage `passes` of
`perf/gpu_suite.py` measures passes.
"""

import argparse
import math
import re
from dataclasses import dataclass

import torch

from treespec_kernels.aot.compiler import compiled_code, default_shapes, register_count, specs_of
from treespec_kernels.aot.kernel_spec import KernelShape, KernelSpec
from treespec_kernels.launch.triton_launch import SHARED_BYTES

TARGET = "sm_90"
LAYERS, PARAMETERS = 32, 7_504_924_672  # of Llama 3 8B, without the embedding
MULTIPROCESSORS, REGISTERS = 132, 1 << 16
COPY = {"H100": 3.0e12, "H200": 4.3e12}  # bytes per second, read and written, of a copy
GAP, GAP_PDL, RAMP, SMALL, SUSTAINED = 1.1e-6, 0.6e-6, 0.9e-6, 1.2e-6, 0.95
PREFETCH_LATENCY = 0.6e-6  # seconds from the start of a kernel until its first requests are answered


@dataclass(frozen=True)
class Launch:
    """A kernel of the pass.

    Attributes:
        name: what it computes.
        count: launches per pass.
        programs: programs per launch.
        nbytes: bytes of weights, or of K and V, that a launch reads.
        prefetched: bytes that it requests before its wait.
        spec: what to compile; None for one of torch's kernels.
    """

    name: str
    count: int
    programs: int
    nbytes: float = 0.0
    prefetched: float = 0.0
    spec: KernelSpec | None = None


def launches_of(shape: KernelShape, rows: int, context: int) -> list[Launch]:
    """Return the launches of a layer in order, then those around the layers."""
    specs = specs_of("programmatic_launch", shape, TARGET)
    kinds = {name: [s for s in specs if s.kernel.__name__ == name] for name in {s.kernel.__name__ for s in specs}}
    size, heads = shape.dtype.itemsize, shape.num_kv_heads
    rope, head = kinds["rotate_and_write"][0], kinds["project_to_vocab"][0]
    attend, combine = kinds["attend_items"][0], kinds["combine_segments"][0]
    norm = next(spec for spec in kinds["norm_rows"] if spec.constants["HAS_RESIDUAL"])

    def product(name: str) -> Launch:
        layer = next(each for each in shape.linear_layers if each.name == name)
        sizes = {"OUT_FEATURES": layer.out_features, "IN_FEATURES": layer.in_features}
        spec = next(s for s in kinds["multiply_rows"] if sizes.items() <= s.constants.items())
        tiles = -(-layer.out_features // spec.config["block_n"])
        programs = tiles * spec.config["split_k"] * -(-rows // spec.config["block_m"])
        nbytes = layer.out_features * layer.in_features * size
        early = min(512 * layer.out_features * spec.config["split_k"], nbytes)
        return Launch(name, LAYERS, programs, nbytes, early, spec)

    segments = math.ceil((context + rows) / 256)
    kv = 2 * heads * shape.head_dim * (context + rows) * size
    vocabulary = -(-shape.vocab_size // head.config["block_n"])
    weights = shape.vocab_size * shape.hidden_size * size
    return [
        product("qkv"),
        Launch("rope, K/V write", LAYERS, rows, spec=rope),
        Launch("attention", LAYERS, segments * heads, kv, spec=attend),
        Launch("combine segments", LAYERS, rows * shape.num_heads, spec=combine),
        product("o"),
        Launch("residual, norm", LAYERS, rows, spec=norm),
        product("gate_up"),
        product("down"),
        Launch("residual, norm", LAYERS, rows, spec=norm),
        Launch("embedding, first norm", 2, rows),
        Launch("head", 1, vocabulary, weights, min(512 * 132 * head.config["block_n"], weights), head),
    ]


def described(launch: Launch) -> list[object]:
    """Return a row of the table: launches, programs, resident programs, KiB in flight, waits and prefetches."""
    if launch.spec is None:
        return [launch.name, launch.count, launch.programs, "", "", "", ""]
    compiled = compiled_code(TARGET, launch.spec)
    ptx, threads = compiled.asm["ptx"], 32 * launch.spec.options["num_warps"]
    registers = register_count(compiled.asm["cubin"]) * threads
    residents = min(REGISTERS // registers, SHARED_BYTES[TARGET] // max(compiled.metadata.shared + 1024, 1), 32)
    residents = min(residents, -(-launch.programs // MULTIPROCESSORS))
    loop = re.search(r"^\$L__BB0_\d+:[^$]*cp\.async\.wait_group", ptx, re.MULTILINE)
    copies = len(re.findall(r"cp\.async\.c[ag]\S+ .*0x10", ptx[: loop.start()])) if loop else 0
    in_flight = residents * copies * 16 * threads / 1024
    waits = ptx.count("griddepcontrol.wait")
    early = f"{launch.prefetched / 2**20:.1f} MiB" if launch.prefetched else ""
    return [launch.name, launch.count, launch.programs, residents, f"{in_flight:.0f}", waits, early]


def seconds(launches: list[Launch], copy: float, gap: float, prefetch: bool) -> float:
    """Return the predicted time of a pass at the bandwidth of a copy."""
    bandwidth, total, before = SUSTAINED * copy, 0.0, SMALL
    for launch in launches:
        early = 0.0
        if prefetch:
            early = min(launch.prefetched, max(before + gap - PREFETCH_LATENCY, 0.0) * bandwidth)
        body = RAMP * (not early) + (launch.nbytes - early) / bandwidth if launch.nbytes else SMALL
        total += launch.count * (gap + body)
        before = SMALL if not launch.nbytes else 0.0  # memory is busy during the others
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="rows of the pass")
    parser.add_argument("--context", type=int, default=2048, help="committed positions")
    args = parser.parse_args()
    shape = default_shapes((torch.bfloat16,))[2]
    for rows in args.rows:
        launches = launches_of(shape, rows, args.context)
        print(f"\n{rows} rows, context {args.context}: {sum(launch.count for launch in launches)} launches")
        print(
            "| kernel | launches | programs | resident | KiB of copies in flight | waits | prefetched |\n"
            + "|---" * 7
            + "|"
        )
        for launch in launches:
            print("| " + " | ".join(map(str, described(launch))) + " |")
        nbytes = 2 * PARAMETERS + LAYERS * sum(each.nbytes for each in launches if each.name == "attention")
        for device, copy in COPY.items():
            times = [seconds(launches, copy, *kind) for kind in ((GAP, False), (GAP_PDL, False), (GAP_PDL, True))]
            shown = ", ".join(
                f"{name} {1e3 * time:.2f} ms ({nbytes / copy / time:.0%})"
                for name, time in zip(("ordinary", "programmatic", "with prefetch"), times, strict=True)
            )
            print(f"{device}: floor {1e3 * nbytes / copy:.2f} ms; {shown}")


if __name__ == "__main__":
    main()
