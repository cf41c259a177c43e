"""Ordinals of devices."""


def _get_device_index(device, optional=False):
    import torch

    if device is None:
        return torch.cuda.current_device()
    return getattr(device, "index", device)
