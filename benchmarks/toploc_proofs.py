"""TOPLOC's own code as the yardstick: proofs of last hidden states, and what its check finds in them.

TOPLOC (Ong et al. 2025, arXiv 2501.16007; package ``toploc``, MIT) commits to the 128 largest activations of every 32
tokens as a polynomial: 258 bytes. Its check evaluates the polynomial where the verifier's own largest activations are,
counts exponents that differ, and takes mean and median of the mantissas' differences where they do not.

The package's compiled modules are bound to the torch they were built with. Where they do not load, its C++ sources,
which it ships, are compiled once against the torch at hand; that takes g++, ninja and some minutes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

#: Tokens per proof, values per proof: the published setting.
CHUNK: Final = 32
TOPK: Final = 128
#: Thresholds that its authors publish for bfloat16 models.
LIMITS: Final = {"exponent mismatches": 90.0, "mean mantissa error": 10.0, "median mantissa error": 8.0}
#: Where no exponent agrees there is no mantissa to compare: the largest difference there is.
_WORST: Final = 128.0
_MODULES: Final = ("ndd", "utils", "poly")


def load(cache: Path, say: Callable[[str], None]) -> Any | None:
    """The module ``toploc``, its extensions compiled inside ``cache`` where the packaged ones do not load.

    None when the package is not installed or cannot be compiled; ``say`` hears why.
    """
    spec = importlib.util.find_spec("toploc")
    if spec is None or not spec.submodule_search_locations:
        say("toploc is not installed: its column stays empty")
        return None
    try:
        return importlib.import_module("toploc")
    except ImportError:
        _forget()
    try:
        _compile(Path(spec.submodule_search_locations[0]) / "C" / "csrc", cache / f"toploc-torch-{torch.__version__}")
        return importlib.import_module("toploc")
    except (ImportError, OSError, RuntimeError) as error:
        say(f"toploc neither loads nor compiles, its column stays empty: {str(error)[-300:]}")
        return None


def _forget() -> None:
    """Leave nothing of a half imported package behind."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "toploc"]:
        del sys.modules[name]


def _compile(sources: Path, build: Path) -> None:
    """Compile the package's extensions and put them where its own code imports them from."""
    from torch.utils import cpp_extension

    build.mkdir(parents=True, exist_ok=True)
    for name in _MODULES:
        sys.modules[f"toploc.C.csrc.{name}"] = cpp_extension.load(
            name=name, sources=[str(sources / f"{name}.cpp")], build_directory=str(build),
            extra_cflags=["-O3", "-fopenmp"], extra_ldflags=["-lgomp"],
        )


def build(toploc: Any, hidden_TD: torch.Tensor) -> list[bytes]:
    """Proofs of a rollout whose maker saw these last hidden states, bfloat16."""
    proofs: list[bytes] = toploc.build_proofs_bytes(list(hidden_TD[:, None]), CHUNK, _topk(hidden_TD), True)
    return proofs


def check(toploc: Any, hidden_TD: torch.Tensor, proofs: Sequence[bytes]) -> list[dict[str, float]]:
    """The three errors of each proof against the verifier's last hidden states, bfloat16."""
    return [
        {
            "exponent mismatches": float(found.exp_mismatches),
            "mean mantissa error": min(float(found.mant_err_mean), _WORST),
            "median mantissa error": min(float(found.mant_err_median), _WORST),
        }
        for found in toploc.verify_proofs_bytes(list(hidden_TD[:, None]), proofs, CHUNK, _topk(hidden_TD), True)
    ]


def _topk(hidden_TD: torch.Tensor) -> int:
    """Values per proof; fewer where the last piece of a rollout has fewer activations."""
    tokens, width = hidden_TD.shape
    return min(TOPK, ((tokens - 1) % CHUNK + 1) * width)
