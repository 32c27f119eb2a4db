"""Whether the codes of a run are fine enough for the limits of its profiles; if not, every honest node would be banned.

With s steps per nat a code is within 1 / 2s of its log-probability, and a head of such codes within a divergence of
1 / 8s² of what it was made from; arithmetic adds its part, which a low temperature magnifies
(``docs/spec/verification.md``, "Thresholds").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from protocol.errors import E_CONFIG, LocalFault
from protocol.messages import Profile, SamplingRules

#: Most that float32 moved a log-probability between decoding and prefill, other batches and other stacks at T = 1 is
#: 4e-5 nats (SmolLM2-135M); half as much again.
ARITHMETIC_MICRO: Final = 60


def check_steps(rules: SamplingRules, profiles: Iterable[Profile]) -> None:
    """Refuse rules under which rounding alone may reach a limit of a listed profile.

    Raises:
        LocalFault: ``E_CONFIG``.
    """
    for profile in profiles:
        least = least_steps(profile, rules.temperature_milli)
        if least is None or rules.steps_per_nat < least:
            if profile.max_margin_micro <= _arithmetic_micro(rules.temperature_milli):
                raise LocalFault(
                    E_CONFIG, f"at this temperature honest arithmetic reaches the limits of profile {profile.name}",
                    expected=f"max_margin_micro > {_arithmetic_micro(rules.temperature_milli)}",
                    got=profile.max_margin_micro, hint="give limits measured at it: --calibration FILE, a record of "
                    "`assay verifier calibrate`",
                )
            raise LocalFault(
                E_CONFIG, f"sampling.steps_per_nat is too coarse for the limits of profile {profile.name}",
                expected="limits above 0" if least is None else f"steps_per_nat >= {least}", got=rules.steps_per_nat,
                hint="leave steps_per_nat and head_max_code as the preset has them, or give limits measured for such "
                "steps: --calibration FILE, a record of `assay verifier calibrate`",
            )


def least_steps(profile: Profile, temperature_milli: int) -> int | None:
    """Fewest steps per nat whose rounding stays below every limit of a profile; None when no number does."""
    nano = min(profile.max_mean_kl_nano, 1000 * profile.max_token_kl_micro)
    micro = profile.max_margin_micro - _arithmetic_micro(temperature_milli)
    if nano <= 0 or micro <= 0:
        return None
    return 1 + max(math.isqrt(10**9 // (8 * nano)), 10**6 // (2 * micro))


def _arithmetic_micro(temperature_milli: int) -> int:
    """What float32 alone may move a log-probability by at a temperature, 1e-6 nats."""
    return math.ceil(ARITHMETIC_MICRO * 1000 / temperature_milli)
