"""Write instructions for a chat model, to train its drafts and to measure them.

    python weights/write_instructions.py --out prompts
    treespec train --target M --data prompts/train.jsonl --out drafts

The texts are documentation and source of installed packages. `heldout.jsonl` has other packages, other phrasings and
two more kinds of tasks than `train.jsonl`.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from treespec.training.files import atomic_write_text
from treespec_training import data
from treespec_training.instructions import instructions, interleaved


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of train.jsonl and heldout.jsonl")
    parser.add_argument("--per-kind", type=int, default=2000, help="training instructions of each kind")
    parser.add_argument("--heldout-per-kind", type=int, default=30)
    parser.add_argument("--held-out", nargs="+", default=list(data.HELD_OUT), help="packages excluded from training")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    everything = sys.maxsize  # characters per package: instructions alternate between packages anyway
    halves = data.select(data.installed_documents(), data.KINDS, args.held_out, everything, args.seed)
    for name, half, count in (("train", halves[0], args.per_kind), ("heldout", halves[1], args.heldout_per_kind)):
        found = interleaved(instructions(half, name == "heldout", count, args.seed))
        lines = [json.dumps({"prompt": each.text, "kind": each.kind, "package": each.package}) for each in found]
        atomic_write_text(args.out / f"{name}.jsonl", "".join(line + "\n" for line in lines))
        print(f"{name}: {len(found)} instructions, {dict(Counter(each.kind for each in found))}")


if __name__ == "__main__":
    main()
