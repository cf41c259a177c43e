"""The reducers of `torch.multiprocessing`: those of memory on a device fail as with CUDA's IPC."""

from multiprocessing.reduction import ForkingPickler

from . import nn, tensors


def _reduce_tensor(tensor):
    if tensor.device.type == "cuda":
        tensor.untyped_storage()._share_cuda_()
    return _rebuild_tensor, (tensor.shape, tensor.dtype, tensor.bytes())


def _rebuild_tensor(shape, dtype, content):
    return tensors.empty(shape, dtype).fill(content)


def _reduce_storage(storage):
    raise RuntimeError("Cannot pickle CUDA storage; try pickling a CUDA tensor instead")


ForkingPickler.register(tensors.Tensor, _reduce_tensor)
ForkingPickler.register(nn.Parameter, _reduce_tensor)
ForkingPickler.register(tensors.Storage, _reduce_storage)
