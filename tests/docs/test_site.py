"""The documentation site builds, and its links lead somewhere."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """mkdocs.yml is strict: a broken link fails the build."""
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False
    )
    assert not built.returncode, built.stdout + built.stderr
    first = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "token tree" in first and 'href="usage/"' in first
    assert {"architecture", "api", "CHANGELOG"} <= {path.name for path in tmp_path.iterdir()}
