"""What every kernel's module promises where triton is not interpreted, or is missing: a process for all modules."""

import json

import pytest

from tests.child import run_uninterpreted

pytestmark = pytest.mark.slow

# An implementation asked for by name never falls back. Each is called on CPU tensors that fit.
CALLS = {
    "coupled_choice": (
        "from treespec_kernels.sampling.coupled_choice import coupled_choice_triton\n"
        "zero = torch.zeros(1, dtype=torch.int64)\n"
        "coupled_choice_triton(torch.zeros(1, 5), torch.ones(1), zero, zero, zero)\n"
    ),
    "kv_commit": (
        "from treespec_kernels.attention.kv_commit import kv_commit_triton\n"
        "from treespec_kernels.tuning.testing import kv_commit_inputs\n"
        "i = kv_commit_inputs([3], [[0, 2]])\n"
        "kv_commit_triton(i.kv_cache, i.page_table, i.context_lens, i.paths, i.path_lens)\n"
    ),
    "lm_head": (
        "from treespec_kernels.linear.lm_head import lm_head_triton\n"
        "lm_head_triton(torch.zeros(1, 8), torch.zeros(5, 8))\n"
    ),
    "pass_layout": (
        "from treespec_kernels.attention.pass_layout import DeviceLayout\n"
        "layout = DeviceLayout.allocate(1, 1, 1, chain=True, max_context=1, num_heads=1, num_kv_heads=1, head_dim=16,\n"
        "                               dtype=torch.float32, device='cpu')\n"
        "zeros = torch.zeros(1, 1, dtype=torch.int32)\n"
        "layout.fill(zeros[0], zeros, zeros)\n"
    ),
    "qkv_rope": (
        "from tests.test_qkv_rope import fitting\n"
        "from treespec_kernels.attention.qkv_rope import qkv_rope_triton\n"
        "qkv_rope_triton(**fitting())\n"
    ),
    "rms_norm": (
        "from treespec_kernels.linear.rms_norm import rms_norm_triton\n"
        "rms_norm_triton(torch.zeros(1, 8), torch.ones(8), 1e-5)\n"
    ),
    "row_linear": (
        "from treespec_kernels.linear.row_linear import row_linear_triton\n"
        "row_linear_triton(torch.zeros(1, 16), torch.zeros(16, 16))\n"
    ),
    "row_topk": (
        "from treespec_kernels.sampling.row_topk import row_topk_triton\nrow_topk_triton(torch.zeros(1, 5), 1)\n"
    ),
    "tree_attention": (
        "from treespec_kernels.tuning.testing import tree_attention_inputs\n"
        "from treespec_kernels.attention.tree_attention import plan_tree_attention, tree_attention_triton\n"
        "i = tree_attention_inputs([3], [[-1]], num_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)\n"
        "plan = plan_tree_attention(**i.plan, num_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32,\n"
        "                           device='cpu')\n"
        "tree_attention_triton(i.q, i.k_cache, i.v_cache, **i.rows, plan=plan)\n"
    ),
    "tree_root": (
        "from treespec_kernels.tree.device_trees import DeviceForest\n"
        "from treespec_kernels.tree.tree_root import tree_root_triton\n"
        "forest = DeviceForest.allocate(1, frontier=1, num_ssms=1, proposals=1, max_depth=1)\n"
        "tree_root_triton(forest, torch.zeros(1, dtype=torch.int32))\n"
    ),
}
REFERENCES = (
    "aot.compiler sampling.coupled_choice attention.kv_commit linear.lm_head attention.pass_layout attention.qkv_rope "
    "linear.rms_norm linear.row_linear sampling.row_topk attention.tree_attention attention.tree_attention_masked "
    "tree.tree_merge tree.tree_root tree.tree_select tree.tree_walk"
).split()


def errors_of(scripts: dict[str, str], before: str = "") -> dict[str, str]:
    """Runs scripts one after another in one uninterpreted process; returns the error of each, empty where none."""
    child = run_uninterpreted(
        f"import json, sys, torch\n{before}\nerrors = {{}}\n"
        f"for name, script in {scripts!r}.items():\n"
        "    try:\n"
        "        exec(script, {'torch': torch})\n"
        "        errors[name] = ''\n"
        "    except Exception as error:\n"
        "        errors[name] = f'{type(error).__name__}: {error}'\n"
        "print(json.dumps(errors))"
    )
    assert child.returncode == 0, child.stderr
    errors = json.loads(child.stdout)
    assert errors.keys() == scripts.keys()
    return errors


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    pytest.importorskip("triton")
    return errors_of(CALLS)


@pytest.mark.parametrize("op", CALLS)
def test_cpu_tensors_are_refused_outside_the_interpreter(op: str, refusals: dict[str, str]) -> None:
    assert refusals[op].startswith(f"ValueError: {op}: implementation 'triton' got CPU tensors")
    assert "TRITON_INTERPRET=1" in refusals[op]


@pytest.fixture(scope="module")
def without_triton() -> dict[str, str]:
    scripts = {module: f"import treespec_kernels.{module}" for module in REFERENCES}
    return errors_of(scripts, "sys.modules['triton'] = None")


@pytest.mark.parametrize("module", REFERENCES)
def test_importing_the_reference_imports_no_triton(module: str, without_triton: dict[str, str]) -> None:
    assert not without_triton[module]
