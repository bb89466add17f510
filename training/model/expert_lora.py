"""PEFT's adapters for `target_parameters`, over experts that are ours.

PEFT folds such an adapter into the weight before each forward; a packed weight is never whole, so here the adapter's two low-rank
products run beside the frozen one. Names, layout, initialisation and scaling are PEFT's own (`peft.tuners.lora.layer.ParamWrapper`).
"""

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from training.model.experts import WEIGHTS, FrozenExperts, LowRank

_RANK_MULTIPLE = 8  # grouped_mm on CUDA wants rows of 16 bytes


class FrozenParameter(ParamWrapper):
    """The adapter of one expert weight; one for the other weight may be inside it."""

    def get_param(self) -> Tensor:
        """Stands in for the weight `[E, in, out]`, which PEFT asks for shape, dtype and device; takes no memory."""
        experts = self.get_base_layer()
        assert isinstance(experts, FrozenExperts)
        bias = experts.gate_up_proj_bias
        return torch.empty((), dtype=bias.dtype, device=bias.device).expand(experts.shape(self.parameter_name))

    @torch.compiler.disable
    def forward(
        self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor, **adapters: LowRank
    ) -> Tensor:
        if not self.disable_adapters:
            adapters[self.parameter_name] = self._low_rank()
        output: Tensor = self.base_layer(hidden_states, router_indices, routing_weights, **adapters)
        return output

    def _low_rank(self) -> LowRank:
        a, b, scale = self.get_delta_factors(self.active_adapters[0])
        missing = -a.shape[2] % _RANK_MULTIPLE
        return LowRank(F.pad(a, (0, missing)), F.pad(b.contiguous() * scale, (0, 0, 0, missing)))


def attach_to_experts(model: PeftModel, config: LoraConfig) -> None:
    """Adds the adapters of all experts of `model` that are ours, in the order in which PEFT would."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, FrozenExperts):
                setattr(module, name, _adapted(child, config))


def _adapted(experts: nn.Module, config: LoraConfig) -> nn.Module:
    for parameter in WEIGHTS:
        experts = FrozenParameter(
            experts, "default", parameter, config=config, r=config.r, lora_alpha=config.lora_alpha
        )
        for half in (experts.lora_A, experts.lora_B):
            half.float()  # as PEFT has all adapters that train
    return experts
