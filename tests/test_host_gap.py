"""The measurement of the host's time between captured rounds."""

import json
from pathlib import Path

import pytest

from tests.child import run_uninterpreted
from tests.commands import ROOT

pytestmark = pytest.mark.slow


def test_each_mode_is_measured(tmp_path: Path) -> None:
    """Tokens that the engine loses or changes fail the script itself."""
    pytest.importorskip("triton")
    out, few = tmp_path / "gaps.json", ["--batches", "1", "3", "--rounds", "9", "--repeats", "1", "--scales", "0"]
    child = run_uninterpreted(
        f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "perf")!r})
sys.argv[1:] = {[*few, "--json", str(out)]!r}
runpy.run_path({str(ROOT / "perf" / "host_gap.py")!r}, run_name="__main__")
"""
    )
    assert child.returncode == 0, child.stderr
    results = json.loads(out.read_text())["results"]
    assert {row["batch"] for row in results} == {1, 3} and len(results) == 2 * 5
    for row in results:
        assert 0 < row["gap_us"][1] <= row["gap_us"][0] <= row["gap_us"][2], row
        plain = row["mode"] == "plain"
        assert row["tokens"] == pytest.approx(1.0, abs=0.01) if plain else row["tokens"] > 2.5, row
