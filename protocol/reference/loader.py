"""From a Hugging Face folder's ``config.json`` to a torch module, and weights in and out of it as bit patterns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from protocol.errors import E_CONFIG, LocalFault, code

if TYPE_CHECKING:
    from protocol.weights.layout import Layout, State

E_MODEL_CONFIG = code("E_MODEL_CONFIG", "a model folder's config.json cannot be read or names an unknown model")
E_MODEL_STATE = code("E_MODEL_STATE", "a state does not fit the model it is loaded into")

#: Ways to compute attention; ``eager`` shares no kernel with ``sdpa`` and so serves as the second look. Experts go with
#: it: one after another, or all in grouped products, which torch has for at most 32 bits.
Attention = Literal["sdpa", "eager"]

#: safetensors dtype name -> (numpy type of the bit pattern, torch type of the value).
BIT_TYPES: Final[dict[str, tuple[type[np.generic], torch.dtype]]] = {
    "BF16": (np.uint16, torch.bfloat16),
    "F16": (np.uint16, torch.float16),
    "F32": (np.uint32, torch.float32),
}
_SIGNED: Final = {2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}


def usable_device(name: str) -> str:
    """The name of a torch device, once something could be put there.

    Raises:
        LocalFault: ``E_CONFIG``.
    """
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise LocalFault(
            E_CONFIG, "this machine has no such device", expected="cpu, or one that torch can use here, like cuda:0",
            got=f"{name}: {str(error).splitlines()[0][:160]}",
        ) from None
    return name


def load_config_model(
    model_dir: Path, dtype: torch.dtype = torch.float32, *, device: str = "cpu", attention: Attention = "sdpa"
) -> nn.Module:
    """The causal language model that ``model_dir/config.json`` describes, with undefined weights, in eval mode.

    No code from the folder is executed and nothing is fetched. Fill it with :func:`set_state`.

    Raises:
        LocalFault: ``E_MODEL_CONFIG``.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention,
                experts_implementation="eager" if attention == "eager" or dtype is torch.float64 else None,
            )
        model.tie_weights()
    except (OSError, ValueError, KeyError) as error:
        raise LocalFault(
            E_MODEL_CONFIG, f"cannot build the model of {model_dir}", expected="a Hugging Face causal LM config.json",
            got=f"{type(error).__name__}: {str(error)[:200]}",
        ) from None
    module: nn.Module = model.to(device).eval()
    return module


@torch.no_grad()
def set_state(model: nn.Module, layout: Layout, state: State) -> None:
    """Copy every tensor of ``state`` into ``model``, converting bit patterns to the model's compute type.

    A tensor the model has but the layout lacks is an error unless it is tied to one that the layout has.

    Raises:
        LocalFault: ``E_MODEL_STATE`` for a missing, extra or misshapen tensor; the model may be half written then.
    """
    targets = model.state_dict()
    written: set[int] = set()
    for entry in layout.entries:
        name, shape = entry.name, entry.shape
        target = targets.get(name)
        if target is None:
            raise LocalFault(E_MODEL_STATE, "the model has no such tensor", expected="a tensor of the model", got=name)
        if tuple(target.shape) != shape:
            raise LocalFault(
                E_MODEL_STATE, f"tensor {name} has another shape", expected=tuple(target.shape), got=shape
            )
        target.copy_(_values(state[name], entry.dtype).reshape(shape))
        written.add(target.data_ptr())
    missing = sorted(name for name, tensor in targets.items() if tensor.data_ptr() not in written)
    if missing:
        raise LocalFault(E_MODEL_STATE, "the state lacks tensors of the model", expected=missing[0], got="nothing")


@torch.no_grad()
def export_state(model: nn.Module, layout: Layout) -> State:
    """The model's tensors as bit patterns of the layout's types (round to nearest even when narrowing).

    Raises:
        LocalFault: ``E_MODEL_STATE`` when the model lacks a tensor of the layout.
    """
    sources = model.state_dict()
    state: State = {}
    for entry in layout.entries:
        name, shape = entry.name, entry.shape
        source = sources.get(name)
        if source is None or tuple(source.shape) != shape:
            raise LocalFault(
                E_MODEL_STATE, f"tensor {name} is not in the model as the layout says", expected=shape,
                got=None if source is None else tuple(source.shape),
            )
        bits, value_type = _bit_type(entry.dtype)
        signed = _SIGNED[np.dtype(bits).itemsize][1]
        state[name] = source.detach().to("cpu", value_type).contiguous().view(signed).numpy().view(bits).copy()
    return state


def _values(bits: NDArray[np.generic], dtype: str) -> torch.Tensor:
    pattern, value_type = _bit_type(dtype)
    signed = _SIGNED[np.dtype(pattern).itemsize][0]
    array = np.ascontiguousarray(bits)
    if array.dtype.itemsize != np.dtype(pattern).itemsize:
        raise LocalFault(E_MODEL_STATE, "bit patterns of another width", expected=dtype, got=str(array.dtype))
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array.view(signed)).view(value_type)


def _bit_type(dtype: str) -> tuple[type[np.generic], torch.dtype]:
    try:
        return BIT_TYPES[dtype.upper()]
    except KeyError:
        raise LocalFault(
            E_MODEL_STATE, "unsupported tensor type", expected=" or ".join(BIT_TYPES), got=dtype
        ) from None
