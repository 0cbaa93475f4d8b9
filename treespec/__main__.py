"""`python -m treespec`."""

from treespec.cli import main

main()
