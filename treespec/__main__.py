"""The program `treespec`, also as `python -m treespec`.

Nothing is imported at the top that takes time: Ctrl-C must find `main` already running.
"""


def main() -> None:
    """Run the command line. Ctrl-C ends it with exit code 130 and without a traceback, also during imports."""
    try:
        from treespec.cli import main as run

        run()
    except KeyboardInterrupt:
        import sys

        if sys.stderr is not None:
            print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
