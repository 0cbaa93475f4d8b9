"""The program `treespec`, also as `python -m treespec`.

Nothing that takes time is imported at the top: Ctrl-C must find `main` already running.
"""

from treespec import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.end_at_once()
    from treespec.cli import main as run

    run()


if __name__ == "__main__":
    main()
