"""What a model folder says about its experts: the rules under which rollouts record their choices."""

from __future__ import annotations

from typing import Any

from protocol.errors import E_CONFIG, LocalFault
from protocol.messages import RouteRules
from protocol.weights.layout import Layout


def route_rules(config: dict[str, Any], layout: Layout) -> RouteRules:
    """The rules for the model of ``config.json`` and ``layout``: its routers are its tensors ``*.mlp.gate.weight``.

    Raises:
        LocalFault: ``E_CONFIG`` for a dense model, or more experts than a byte can name.
    """
    experts = config.get("num_experts", config.get("num_local_experts"))
    shapes = [entry.shape for entry in layout.entries if entry.name.endswith(".mlp.gate.weight")]
    routers = sum(shape[0] == experts for shape in shapes)
    per_token = config.get("num_experts_per_tok")
    if not routers or not isinstance(experts, int) or not isinstance(per_token, int) or experts > 256:
        raise LocalFault(
            E_CONFIG, "the experts of this model cannot be recorded", expected="a mixture of 2 to 256 experts",
            got=f"{experts or 'no'} experts, {routers} routers", hint="leave sampling.record_routes at false",
        )
    return RouteRules(layers=routers, experts=experts, per_token=per_token)
