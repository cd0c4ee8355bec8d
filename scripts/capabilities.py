"""The capability matrix: which policy is proved to do what on which family, and by which test."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from proofs import read_record  # noqa: E402
from script_lib.capability_page import page  # noqa: E402

RECORD, PAGE = ROOT / "docs" / "capabilities.json", ROOT / "docs" / "capabilities.md"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/capabilities", description=__doc__)
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders of tests (default: all)")
    parser.add_argument("--page", action="store_true", help="run nothing; write the page of the record that is there")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests (default: 2)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if not arguments.page:
        command = [sys.executable, "-m", "pytest", "-n", str(arguments.workers), "-m", "proves", "-q"]
        whole = [] if arguments.tests != ["tests"] else ["--capabilities-run", "scripts/capabilities"]
        ran = subprocess.run(
            [*command, "--capabilities", str(RECORD), *whole, *arguments.tests],
            cwd=ROOT,
            env=os.environ | {"KVPOLICY_TEST_FULL": "1"},
        )
        if ran.returncode:
            print("error: the tests did not pass, so the record is left as it was.", file=sys.stderr)
            return ran.returncode
    PAGE.write_text(page(read_record(RECORD)), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} is written.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
