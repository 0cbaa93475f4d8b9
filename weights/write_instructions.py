"""Write instructions and raw texts for a chat model, to train its drafts and to measure them.

    python weights/write_instructions.py --out prompts
    treespec train --target M --data prompts/train.jsonl --texts prompts/texts.jsonl --out drafts

The sources are documentation and code of installed packages, and of `--text-root` folders with one package each, such
as unpacked source distributions. Compared to `train.jsonl`, `heldout.jsonl` has other packages, other phrasings and two
more kinds of tasks; `texts.jsonl` has the sources of `train.jsonl`.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from treespec_training import data
from treespec_training.instructions import instructions, interleaved, raw_texts


def main(argv: Sequence[str] | None = None, installed: Iterable[data.Document] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of train.jsonl and heldout.jsonl")
    parser.add_argument("--per-kind", type=int, default=2000, help="training instructions of each kind")
    parser.add_argument("--heldout-per-kind", type=int, default=30)
    parser.add_argument("--held-out", nargs="+", default=list(data.HELD_OUT), help="packages excluded from training")
    parser.add_argument("--text-root", nargs="+", type=Path, default=[], help="folders of further packages")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    everything = sys.maxsize  # no limit of characters per package: instructions alternate between packages anyway
    documents = chain(installed or data.installed_documents(), data.folder_documents(args.text_root))
    halves = data.select(documents, data.KINDS, args.held_out, everything, args.seed)
    for name, half, count in (("train", halves[0], args.per_kind), ("heldout", halves[1], args.heldout_per_kind)):
        selected = interleaved(instructions(half, name == "heldout", count, args.seed))
        data.write_lines(args.out / f"{name}.jsonl", selected)
        print(f"{name}: {len(selected)} instructions, {dict(Counter(entry['kind'] for entry in selected))}")
    texts = list(raw_texts(halves[0]))
    data.write_lines(args.out / "texts.jsonl", texts)
    print(f"texts: {len(texts)}, {sum(len(entry['text']) for entry in texts) >> 20} MiB")


if __name__ == "__main__":
    main()
