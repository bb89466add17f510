"""RMS norms in one kernel: transformers' take eight, of which decoding launches hundreds a step."""

import types
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel


def use_fused_norms(model: PreTrainedModel) -> None:
    """Makes a gpt-oss model on CUDA normalise so: squares, mean and product in fp32, rounded once."""
    for module in model.modules():
        if type(module).__name__ == "GptOssRMSNorm":
            module.forward = types.MethodType(_fused, module)  # type: ignore[method-assign]


def _fused(self: Any, hidden: Tensor) -> Tensor:
    normalised: Tensor = F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)
    return normalised
