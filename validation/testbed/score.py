"""Scores the recorded runs of the testbed: python validation/testbed/score.py [DIR]   (no root, no torch)"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import predict


def main(folder: Path) -> int:
    for what, runs in (("emulated", predict.emulated), ("train", predict.trained)):
        found = list(runs(folder / "results", folder / "profiles"))
        if not found:
            continue
        sizes = [abs(s.error) for s in found if s.quiet]
        sys.stdout.write(f"{predict.table(found)}\n\n{what}: {len(found)} runs, {len(sizes)} of them quiet")
        if sizes:
            sys.stdout.write(f"; mean error {sum(sizes) / len(sizes):.1%}, worst {max(sizes):.1%}")
        sys.stdout.write("\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else predict.HERE))
