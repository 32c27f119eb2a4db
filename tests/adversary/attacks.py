"""All attacks that are a bundle or a commitment; see ``tests.adversary.attack``."""

from __future__ import annotations

from typing import Final

import tests.adversary.attacks_model
import tests.adversary.attacks_structure
import tests.adversary.attacks_tokens  # noqa: F401 - these three register them
from tests.adversary import attack

ATTACKS: Final = tuple(attack.ATTACKS)
