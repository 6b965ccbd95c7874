"""Which known name a mistyped one was probably meant to be."""

from __future__ import annotations

import difflib
from typing import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The rest of an error sentence: the known name most like `name`, or all of them when none is alike."""
    known = sorted(known)
    same_ending = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    close = same_ending or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"the nearest is {close[0]}"
    return f"known are {', '.join(known)}" if len(known) <= 30 else "--help lists them"
