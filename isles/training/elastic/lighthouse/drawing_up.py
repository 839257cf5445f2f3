"""The process that `charter.drawn_up` starts: tables on stdin, what a lighthouse must know of them on stdout."""

from __future__ import annotations

import json
import os
import sys
import warnings

from isles.parsing import parse_json
from isles.training.config.reading import to_toml
from isles.training.elastic.lighthouse.charter import REFUSED, as_told
from isles.training.elastic.terms import elastic, rules


def main() -> int:
    """The exit code."""
    tables = parse_json(sys.stdin.read())
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a module of one's own may print
    with warnings.catch_warnings(record=True) as warned:
        try:
            config = elastic(tables)
        except (ValueError, OSError) as error:
            print(error, file=answer, flush=True)
            return REFUSED
    lines = dict.fromkeys(" ".join(str(one.message).split()) for one in warned)
    print(json.dumps(as_told(to_toml(config), rules(config), list(lines))), file=answer, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
