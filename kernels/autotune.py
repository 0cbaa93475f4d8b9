"""The kernel autotuner: tunes kernels on a GPU, compiles them without one, and measures the cost of passes.

The same command as `treespec autotune`.
"""

import typer

from treespec.cli.autotune import autotune
from treespec.cli.group import Command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(cls=Command)(autotune)

if __name__ == "__main__":
    app()
