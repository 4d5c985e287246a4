"""``python -m trn_kernels.emulator check FILE...`` and ``python -m trn_kernels.emulator rules``."""

from __future__ import annotations

import argparse
import sys

from . import rules, source


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 1 if a checked file is legal in no NKI version or cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m trn_kernels.emulator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="constructs that the NKI compiler refuses or that changed, 0.3 to 0.7")
    check.add_argument("files", nargs="+", metavar="FILE")
    commands.add_parser("rules", help="the table of rules, docs/emulator-rules.md")
    options = parser.parse_args(arguments)
    if options.command == "rules":
        print(rules.table(), end="")
        return 0
    return source.report(options.files)


if __name__ == "__main__":
    sys.exit(main())
