"""The processes that compute one learner's step together, and what they say to each other.

Rank 0 is the learner: it alone talks to the coordinator, reads the store and publishes. The others hold their share of
the weights and do what rank 0 tells them (``learner.crew``). ``torchrun`` starts them and says by its environment
variables who is who; gloo carries what lies on a CPU, NCCL what lies on a GPU.

Every wait has a deadline, and a process that ends takes the others with it: their next exchange fails with
``E_RANK_LOST``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from protocol.errors import E_CONFIG, LocalFault, code

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from learner.config import ProcessConfig

E_RANK_LOST = code("E_RANK_LOST", "another process of this learner ended or does not answer")

#: What carriers call themselves in their errors, which are plain ``RuntimeError``.
_CARRIERS: Final = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out waiting")


@dataclass(frozen=True)
class Ranks:
    """One process's view of the group. A learner of one process is a group of one, without any carrier."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    mesh: DeviceMesh | None = None

    @classmethod
    def join(cls, config: ProcessConfig, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Meet the other processes that ``torchrun`` started; alone when there are none.

        Raises:
            LocalFault: ``E_CONFIG`` without the GPU that was asked for; ``E_RANK_LOST`` when they do not come.
        """
        device = _device(config, int(environment.get("LOCAL_RANK", "0")))
        size = int(environment.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(device=device)
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with rank_faults():
            dist.init_process_group(backend, timeout=timedelta(seconds=config.rank_timeout_s))
            mesh = init_device_mesh(device.type, (size,))
        return cls(int(environment["RANK"]), size, device, mesh)

    def leave(self) -> None:
        """Part from the others. Nothing may be exchanged afterwards."""
        if self.mesh is not None:
            import torch.distributed as dist

            dist.destroy_process_group()

    # -- words -------------------------------------------------------------------------------------------

    def tell(self, message: object) -> None:
        """Rank 0 tells all others. Raises ``E_RANK_LOST``."""
        self._broadcast([message])

    def hear(self) -> Any:
        """The next thing rank 0 tells. Raises ``E_RANK_LOST``, also after ``rank_timeout_s`` of silence."""
        return self._broadcast([None])[0]

    def _broadcast(self, box: list[Any]) -> list[Any]:
        if self.mesh is not None:
            import torch.distributed as dist

            with rank_faults():
                dist.broadcast_object_list(box, src=0)
        return box

    # -- numbers -----------------------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` holds at any rank; also a meeting point."""
        if self.mesh is None:
            return flag
        import torch.distributed as dist

        flags = torch.tensor([int(flag)])
        with rank_faults():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def total(self, value: Tensor) -> Tensor:
        """Sum of a tensor over the ranks, in rank order of the carrier's reduction."""
        if self.mesh is not None:
            import torch.distributed as dist

            with rank_faults():
                dist.all_reduce(value)
        return value

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, in order of ranks, at every rank."""
        if self.mesh is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with rank_faults():
            dist.all_gather_object(values, value)
        return values

    # -- weights -----------------------------------------------------------------------------------------

    def share(self, model: nn.Module) -> nn.Module:
        """A module that computes with ``model``, whose weights are divided among the ranks (FSDP2).

        It is called with what shall be computed and the arguments of that. Gradients are *summed* over ranks: the
        loss is a plain sum over tokens, every token already carrying its share of the global denominators.
        """
        together = _Together(model)
        if self.mesh is not None:
            from torch.distributed.fsdp import fully_shard

            for part in (*_layers(model), together):
                module = fully_shard(part, mesh=self.mesh)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return together


class _Together(nn.Module):
    """A model and what is computed with it, so that sharding wraps both: the head is used outside the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *given: Any) -> Any:
        return compute(*given)


def settle(together: nn.Module) -> None:
    """Let go of whole weights that a forward pass without a backward left in place; they would not see an update."""
    reshard = getattr(together, "reshard", None)
    if callable(reshard):
        reshard()


def _layers(model: Any) -> list[nn.Module]:
    """The transformer's layers: the units in which weights are gathered."""
    count = model.config.num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(lists[0]) if lists else []


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that this rank holds; a plain tensor as it is."""
    return cast("Tensor", tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, at every rank; a plain tensor as it is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    with rank_faults():
        return cast("Tensor", tensor.full_tensor())


@contextmanager
def rank_faults() -> Iterator[None]:
    """Turn what a carrier says when another process is gone into ``E_RANK_LOST``."""
    try:
        yield
    except RuntimeError as error:
        if not _is_carriers(error):
            raise
        raise LocalFault(
            E_RANK_LOST, "the processes of this learner lost each other", expected="an answer of every rank",
            got=str(error).splitlines()[0][:300],
            hint="the rank that ended first says why, in its own log; start them all again, nothing is lost",
        ) from None


def _is_carriers(error: RuntimeError) -> bool:
    return type(error).__name__.startswith("Dist") or any(name in str(error).lower() for name in _CARRIERS)


def _device(config: ProcessConfig, local_rank: int) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LocalFault(
            E_CONFIG, "there is no GPU that torch can use", expected="a CUDA device", got="none",
            hint="set process.device=cpu, or install a build of torch for this machine's GPU",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
