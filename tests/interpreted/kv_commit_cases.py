"""Cases of kv_commit. Every copy is exact, so every comparison is equality."""

import random

import pytest
import torch

from tests.interpreted.common import DEVICE, IMPLEMENTATION
from treespec_kernels.attention.kv_commit import kv_commit_cpu, kv_commit_ref, kv_commit_triton
from treespec_kernels.tuning.testing import KvCommitInputs, kv_commit_inputs, path_to, tree_parents


def from_host(cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, *paths: torch.Tensor) -> None:
    """`kv_commit_cpu`, with the tables of the others cut to what each request has."""
    chosen = [row[:count].long().numpy() for row, count in zip(*paths, strict=True)]
    kv_commit_cpu(cache, list(table.long().numpy()), lengths.tolist(), chosen)


kv_commit = {"ref": kv_commit_ref, "cpu": from_host, "triton": kv_commit_triton}[IMPLEMENTATION]
ROUNDS = 12 if IMPLEMENTATION == "triton" else 300


def committed(inputs: KvCommitInputs) -> torch.Tensor:
    """The model: each request's slots as a list; a path picks from it. Nothing is moved in place."""
    after = inputs.kv_cache.clone()
    page_size = after.shape[4]
    for request, (length, path_len) in enumerate(
        zip(inputs.context_lens.tolist(), inputs.path_lens.tolist(), strict=True)
    ):
        pages = inputs.page_table[request].tolist()
        places = [(page, offset) for page in pages for offset in range(page_size)]
        slots = [inputs.kv_cache[:, :, page, :, offset] for page, offset in places]
        accepted = [slots[length + node] for node in inputs.paths[request, :path_len].tolist()]
        for (page, offset), moved in zip(places[length:], accepted, strict=False):
            after[:, :, page, :, offset] = moved
    return after


def assert_commits(inputs: KvCommitInputs) -> None:
    expected = committed(inputs)
    kv_commit(inputs.kv_cache, inputs.page_table, inputs.context_lens, inputs.paths, inputs.path_lens)
    wrong = (inputs.kv_cache != expected).nonzero()
    assert len(wrong) == 0, (
        f"{len(wrong)} elements differ, first (layer, kv, page, head, slot, dim) {wrong[0].tolist()}"
    )


def test_fuzz() -> None:
    choose = random.Random(0)
    for seed in range(ROUNDS):
        generator = torch.Generator().manual_seed(seed)
        paths, lengths = [], []
        for _ in range(choose.randint(1, 4)):
            kind = choose.choice(["chain", "star", "random", "scattered", "none"])
            num_nodes = choose.randint(1, 40)  # paths longer than a block of steps, too
            if kind == "none":
                paths.append([])
            elif kind == "scattered":
                paths.append([0, *sorted(choose.sample(range(1, 60), num_nodes - 1))])
            else:
                paths.append(path_to(tree_parents(kind, num_nodes, generator), choose.randrange(num_nodes)))
            lengths.append(choose.randint(0, 20))
        inputs = kv_commit_inputs(
            lengths,
            paths,
            num_layers=choose.randint(1, 2),
            num_kv_heads=choose.randint(1, 2),
            head_dim=choose.choice([4, 24]),
            page_size=choose.choice([4, 16]),
            device=DEVICE,
            seed=seed,
        )
        try:
            assert_commits(inputs)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, context_lens {lengths}, paths {paths}: {error}") from error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_every_bit_pattern_survives(dtype: torch.dtype) -> None:
    """NaN payloads and negative zeros included; the cache is a view whose outer strides are not dense."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    base = kv_commit_inputs([3], [[0, 2, 5]], num_layers=1, num_kv_heads=3, head_dim=40)
    cache = (base.kv_cache * 7919).to(bits).transpose(2, 3).contiguous().transpose(2, 3).to(DEVICE)
    tables = [t.to(DEVICE) for t in (base.page_table, base.context_lens, base.paths, base.path_lens)]
    inputs = KvCommitInputs(cache, *tables)
    expected = committed(inputs)
    kv_commit(cache.view(dtype), *tables)
    assert torch.equal(cache, expected)
