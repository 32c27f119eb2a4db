"""Whether the codes of a run are fine enough for the limits of its profiles; if not, every honest node would be banned.

With s steps per nat a code is within 1 / 2s of its log-probability, and a head of such codes within a divergence of
1 / 8s² of what it was made from (``docs/spec/verification.md``, "Thresholds").
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from protocol.errors import E_CONFIG, LocalFault
from protocol.messages import Profile, SamplingRules


def check_steps(rules: SamplingRules, profiles: Iterable[Profile]) -> None:
    """Refuse rules under which rounding alone may reach a limit of a listed profile.

    Raises:
        LocalFault: ``E_CONFIG``.
    """
    for profile in profiles:
        least = least_steps(profile)
        if least is None or rules.steps_per_nat < least:
            raise LocalFault(
                E_CONFIG, f"sampling.steps_per_nat is too coarse for the limits of profile {profile.name}",
                expected="limits above 0" if least is None else f"steps_per_nat >= {least}", got=rules.steps_per_nat,
                hint="leave steps_per_nat and head_max_code as the preset has them, or give limits measured for such "
                "steps: --calibration FILE, a record of `assay verifier calibrate`",
            )


def least_steps(profile: Profile) -> int | None:
    """Fewest steps per nat whose rounding stays below every limit of a profile; None when a limit is 0."""
    nano = min(profile.max_mean_kl_nano, 1000 * profile.max_token_kl_micro)
    if not (nano and profile.max_margin_micro):
        return None
    return 1 + max(math.isqrt(10**9 // (8 * nano)), 10**6 // (2 * profile.max_margin_micro))
