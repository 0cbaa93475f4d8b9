"""The program `treespec`, also as `python -m treespec`.

Nothing that takes time is imported at the top: Ctrl-C must find `main` already running.
"""

from treespec import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.exit_on_interrupt()
    from treespec.cli import main as run

    try:
        run()
    except KeyboardInterrupt:  # another one, while the first was reported
        interrupts.exit_interrupted()
    except SystemExit as end:
        if end.code == interrupts.INTERRUPTED:
            interrupts.exit_interrupted()
        raise


if __name__ == "__main__":
    main()
