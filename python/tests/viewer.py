"""Goes back through a trace as PyTorch's memory viewer does, from the snapshot to the first event."""


def walk(snapshot, device):
    """Returns allocated and reserved bytes before the first event and after each, the last those of
    the snapshot.

    Fails where the viewer would: at a block outside of all segments, at an end of what is not live.
    """
    spaces, blocks = [], {}
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            at = segment["address"]
            spaces.append((at, at + segment["total_size"]))
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    blocks[block["address"]] = block["size"]
    sums = [_sums(spaces, blocks)]
    for entry in reversed(snapshot["device_traces"][device]):
        action, at, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            assert blocks.pop(at) == size, entry
        elif action == "free_completed":
            assert at not in blocks, entry
            blocks[at] = size
        elif action == "free_requested":
            assert blocks[at] == size, entry
        elif action == "segment_map":
            _cut(spaces, at, at + size)
        elif action == "segment_unmap":
            spaces.append((at, at + size))
        else:
            assert action == "oom", entry
        if action in ("free_requested", "segment_map", "oom"):
            sums.append(_sums(spaces, blocks))
    return sums[::-1]


def _cut(spaces, begin, end):
    # Pieces that lie side by side are one for the viewer.
    spaces.sort()
    joined = []
    for first, last in spaces:
        assert not joined or joined[-1][1] <= first, spaces
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    [(first, last)] = [it for it in joined if it[0] <= begin and end <= it[1]]
    joined.remove((first, last))
    joined += [it for it in ((first, begin), (end, last)) if it[0] < it[1]]
    spaces[:] = joined


def _sums(spaces, blocks):
    for at, size in blocks.items():
        assert any(first <= at and at + size <= last for first, last in _joined(spaces)), hex(at)
    return sum(blocks.values()), sum(last - first for first, last in spaces)


def _joined(spaces):
    joined = []
    for first, last in sorted(spaces):
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined
