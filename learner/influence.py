"""A bound on what any one node can do to a step.

Influence is the share of a step's signal, the sum over tokens of |s A|. A node over the bound has all its advantages
scaled down; nobody's are scaled up. With n nodes the bound is at least 1/n, so that a small run is not starved.
"""

from __future__ import annotations


def share_factors(shares: dict[str, float], max_share: float) -> dict[str, float]:
    """Factor, at most 1, for each node's signal such that no node holds more than ``max_share`` of what remains.

    ``shares`` are not negative and finite. The largest k nodes are cut to one level L, with k as small as possible:
    L = b (k L + rest), so L = b rest / (1 - k b).
    """
    bound = max(max_share, 1.0 / max(1, sum(share > 0 for share in shares.values())))
    ordered = sorted(shares.values(), reverse=True)
    level = ordered[0] if ordered else 0.0
    for cut, largest_uncut in enumerate(ordered):
        level = bound * sum(ordered[cut:]) / max(1.0 - cut * bound, 1e-12)
        if largest_uncut <= level * (1 + 1e-12):
            break
    return {node: 1.0 if share <= level * (1 + 1e-12) else level / share for node, share in shares.items()}
