"""Writes all known-answer files but those of the weights (``make_weights.py``).

Run from the root of the tree: ``python -m tests.vectors.make_vectors``. The files are frozen: running it must leave the
tree as it is, unless a format was changed on purpose.
"""

from __future__ import annotations

from tests.vectors import make_bundle, make_draw, make_log, make_messages, make_packed, make_sampler

if __name__ == "__main__":
    make_sampler.make()
    make_bundle.make()
    make_packed.make()
    make_messages.make()
    make_log.make()
    make_draw.make()
