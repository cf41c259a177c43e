"""cuDNN's settings, as a module whose attributes are properties."""

import sys
import types

from .. import _C


class _Property:
    def __init__(self, getter, setter):
        self.getter, self.setter = getter, setter

    def __get__(self, instance, owner=None):
        return self.getter()

    def __set__(self, instance, value):
        self.setter(value)


class CudnnModule(types.ModuleType):
    """The module `torch.backends.cudnn`."""

    benchmark = _Property(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark)


cudnn = sys.modules[__name__ + ".cudnn"] = CudnnModule(__name__ + ".cudnn")
