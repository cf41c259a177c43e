"""Parameters, which are tensors here."""

from .tensors import Tensor


class Parameter(Tensor):
    def __init__(self, data, requires_grad=True):
        super().__init__(data.address, data.shape, data.dtype, data.device, data, data.strides)
        self.requires_grad = requires_grad
