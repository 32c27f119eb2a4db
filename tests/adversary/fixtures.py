"""All fixtures of the attack zoo; importing this registers them."""

from __future__ import annotations

from typing import Final

import tests.adversary.fixtures_bundles
import tests.adversary.fixtures_power
import tests.adversary.fixtures_rewards
import tests.adversary.fixtures_run
import tests.adversary.fixtures_screen
import tests.adversary.fixtures_steering  # noqa: F401 - these six register them
from tests.adversary import registry

FIXTURES: Final = tuple(sorted(registry.FIXTURES, key=lambda fixture: (fixture.row, fixture.kind, fixture.name)))
