"""Entry point of the `treespec` command and of `python -m treespec`.

Imports nothing slow at module level, so that `main` can install the Ctrl-C handler first.
"""

from treespec.utils import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.exit_on_interrupt()
    from treespec.cli import main as run

    try:
        run()
    except KeyboardInterrupt:  # Ctrl-C again, while the first was reported
        interrupts.exit_interrupted()
    except SystemExit as end:
        if end.code == interrupts.INTERRUPTED:
            interrupts.exit_interrupted()
        raise


if __name__ == "__main__":
    main()
