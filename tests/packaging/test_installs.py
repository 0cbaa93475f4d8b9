"""What wheels hold, and what is importable from an editable install, as the README makes it, and seen by mypy."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script
from tests.packaging.test_layout import PACKAGES, ROOT

pytestmark = pytest.mark.slow

# Line by line: a code of mypy, what is revealed, or nothing wrong.
SCRIPT = """\
from treespec import LLM, EngineArgs, LLMEngine, SamplingParams, SpecConfig, StructuredOutputsParams, TokensPrompt  # ok
from treespec import train_drafts  # ok
llm = LLM(model="x", max_num_seqs=4, gpu_memory_utilization=0.5, enforce_eager=True, seed=0)  # ok
reveal_type(llm.generate("x"))  # list[treespec.outputs.RequestOutput]
params = llm.get_default_sampling_params()  # ok
params.temperature = 0.5; params.stop = ["a"]  # ok
llm.generate([TokensPrompt(prompt_token_ids=[1])], [params], use_tqdm=False, lora_request=None)  # ok
form = StructuredOutputsParams(choice=["a", "b"])  # ok
SamplingParams(temperature=0.5, stop=["a"], structured_outputs=form, best_of=1)  # ok
LLM.from_engine_args(EngineArgs(model="x", tensor_parallel_size=1)).chat([{"role": "user", "content": "x"}])  # ok
reveal_type(LLMEngine(llm).step())  # list[treespec.outputs.RequestOutput]
LLM(max_num_seq=4)  # call-arg
SamplingParams(max_token=4)  # call-arg
SamplingParams(0.5)  # call-arg
SamplingParams(max_tokens="4")  # arg-type
StructuredOutputsParams(choices=["a"])  # call-arg
SpecConfig(node=4)  # call-arg
LLM(max_num_seqs="4")  # arg-type
train_drafts("target", ["data"], "out", minute=3)  # call-arg
EngineArgs(modell="x")  # call-arg
llm.generate("x", use_tdqm=True)  # call-arg
llm.genrate("x")  # attr-defined
params.max_token = 4  # attr-defined
"""


def copy_without_weights(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        Path(target).touch()
    else:
        shutil.copy(source, target)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that the checkout stays clean."""
    project = tmp_path_factory.mktemp("installs") / "project"
    clutter = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for name in ("treespec", "kernels", "weights", "tests", "tools"):
        shutil.copytree(ROOT / name, project / name, ignore=clutter, copy_function=copy_without_weights)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    return project


@pytest.fixture(scope="module")
def wheel_names(project: Path) -> set[str]:
    """Names of the files in the wheel, built by way of the sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "out", "."]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (project / "out").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def on_disk(package: str, pattern: str) -> set[str]:
    """Files of a package as the wheel should name them."""
    folder = PACKAGES[package]
    files = (path for path in folder.glob(pattern) if path.is_file() and "__pycache__" not in path.parts)
    return {f"{package}/{path.relative_to(folder).as_posix()}" for path in files}


def test_every_module_and_nothing_else_is_in(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    modules = set.union(*(on_disk(package, "**/*.py") for package in PACKAGES))
    assert modules == {name for name in wheel_names if name.endswith(".py")}


@pytest.mark.parametrize(
    ("package", "pattern", "one"),
    [
        ("treespec", "serve/page/*", "treespec/serve/page/index.html"),
        ("treespec_kernels", "tuned/*.json", None),
        ("treespec_weights", "smollm2/**/*", None),
        ("treespec_weights", "default/**/*", "treespec_weights/default/target/tokenizer.json"),
        *((package, "py.typed", f"{package}/py.typed") for package in PACKAGES),
    ],
)
def test_data_files_are_in(package: str, pattern: str, one: str | None, wheel_names: set[str]) -> None:
    """An editable install would hide missing data."""
    files = on_disk(package, pattern)
    assert files <= wheel_names, sorted(files - wheel_names)
    assert one is None or one in files


# --- an editable install


@pytest.fixture(scope="module")
def python(project: Path) -> Path:
    """The interpreter of an environment that holds an editable install, and nothing else."""
    folder = project.parent
    build = "import sys; sys.path.insert(0, 'tools'); from build_backend import build_editable; build_editable('..')"
    run_script(build, project)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    interpreter = folder / "venv" / "bin" / "python"
    site = printed(interpreter, "import sysconfig; print(sysconfig.get_path('purelib'))", folder)
    zipfile.ZipFile(wheel).extractall(site)
    return interpreter


def printed(python: Path, code: str, folder: Path) -> str:
    """What code prints that runs in a folder, isolated from the environment."""
    command = [python, "-I", "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_the_packages_and_nothing_else_are_importable(python: Path, project: Path, tmp_path: Path) -> None:
    """New files, too, without another install."""
    (project / "treespec" / "added.py").write_text("value = 3\n")
    assert printed(python, "import treespec.added as a; print(a.value)", tmp_path) == "3"
    (project / "treespec" / "added.py").unlink()
    others = {"kernels", "weights", "tests", "perf", "tools", "load_model", "treespec_training"}
    names = sorted({*PACKAGES, *others})
    code = f"import json, importlib.util as u; print(json.dumps([n for n in {names} if u.find_spec(n)]))"
    assert set(json.loads(printed(python, code, tmp_path))) == set(PACKAGES)
    code = (
        "from importlib.metadata import entry_points, version\n"
        "print(version('treespec'), 'treespec' in entry_points(group='console_scripts').names)"
    )
    assert printed(python, code, tmp_path) == "0.1.0 True"


def test_a_type_checker_sees_the_api(python: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--cache-dir", "cache", "script.py"]
    env = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if found := re.match(r"script\.py:(\d+): (error|note): (.*)", line):
            said.setdefault(int(found[1]), found[3])
    for number, line in enumerate(SCRIPT.splitlines(), start=1):
        expected = line.rpartition("# ")[2]
        heard = said.get(number, "ok")
        assert heard == expected or f"[{expected}]" in heard or f'"{expected}"' in heard, (line, done.stdout)
