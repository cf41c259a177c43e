"""The physical memory under tensors: `cuvmm.extents`, over the stand-in for libcuda."""

import unittest

from support import needs_stand_in
from test_sharing import case


@needs_stand_in
class Extents(unittest.TestCase):
    def test_each_piece_under_a_tensor(self):
        case(
            """
            few = [cuvmm.empty(20 * MIB) for _ in range(3)]
            for array in few:
                pieces = cuvmm.extents(array)
                assert pieces[0].address <= array.address < sum(pieces[0]), (array, pieces)
                assert sum(pieces[-1]) >= array.address + array.nbytes, (array, pieces)
                assert all(sum(one) == next.address for one, next in zip(pieces, pieces[1:])), pieces
                assert all(piece.address % (2 * MIB) == piece.nbytes % (2 * MIB) == 0 for piece in pieces)
            held = cuvmm.stats().held
            # Free memory of two of them is mapped side by side for one that fits in neither.
            del few[0], array
            few.pop()
            large = cuvmm.empty(36 * MIB)
            assert cuvmm.stats().held == held, cuvmm.stats()
            pieces = cuvmm.extents(large)
            assert len(pieces) > 1, pieces
            # A part of it has the pieces that it lies in.
            inner = pieces[1]
            place = torch.device("cuda", 0)
            part = torch.Tensor(inner.address + 512, (10,), torch.float32, place, large)
            assert cuvmm.extents(part) == [inner]
            last = torch.Tensor(inner.address - 4, (2,), torch.float32, place, large)
            assert cuvmm.extents(last) == pieces[:2]
            # With a gap between its elements it lies in what is between them too.
            wide = torch.Tensor(large.address, (2,), torch.uint8, place, large, (36 * MIB - 1,))
            assert cuvmm.extents(wide) == pieces
            """
        )

    def test_tensors_that_share_a_piece(self):
        case(
            """
            one, two = cuvmm.empty(1000), cuvmm.empty(1000)
            (piece,) = cuvmm.extents(one)
            assert piece == cuvmm.extents(two)[0] and isinstance(piece, tuple), piece
            assert piece.address <= one.address < two.address < piece.address + piece.nbytes
            assert cuvmm.extents(cuvmm.empty((0, 4))) == []
            other = cuvmm.empty(3 << 20, device=1)
            assert cuvmm.extents(other)[0].address <= other.address
            """
        )

    def test_a_publication(self):
        case(
            """
            cuvmm.publish({"it": cuvmm.empty(9 << 20)}, "model")
            weights = cuvmm.attach("model")
            array = weights.array("it")
            pieces = cuvmm.extents(array)
            assert cuvmm.extents(weights["it"]) == pieces
            assert pieces[0].address <= array.address and sum(pieces[-1]) >= array.address + (9 << 20)
            """
        )

    def test_what_has_none(self):
        case(
            """
            array = made((4,), torch.float32, "cpu")
            refused(ValueError, lambda: cuvmm.extents(array), "host memory")
            refused(TypeError, lambda: cuvmm.extents(5), "int")
            place = torch.device("cuda", 0)
            nowhere = torch.Tensor(1 << 40, (4,), torch.float32, place, None)
            refused(cuvmm.Error, lambda: cuvmm.extents(nowhere), "not allocated here")
            live = cuvmm.empty(4)
            refused(cuvmm.Error, lambda: cuvmm.extents(nowhere), "no memory of the device is mapped at 0x10000000000")
            beyond = torch.Tensor(live.address, (1 << 40,), torch.uint8, place, live)
            refused(cuvmm.Error, lambda: cuvmm.extents(beyond), "no memory of the device is mapped")
            overflow = torch.Tensor((1 << 64) - 4, (8,), torch.uint8, place, live)
            refused(cuvmm.Error, lambda: cuvmm.extents(overflow), "no memory of the device is mapped")
            sparse = torch.Tensor(live.address, (1,), torch.uint8, place, live)
            sparse.layout = torch.sparse_coo
            refused(ValueError, lambda: cuvmm.extents(sparse), "sparse")
            """
        )

    def test_a_pool_that_sleeps(self):
        case(
            """
            from cuvmm import _library
            library = ctypes.CDLL(cuvmm.library_path())
            token = ctypes.c_uint64()
            assert library.cuvmm_tag_begin(b"weights", ctypes.byref(token)) == 0
            allocate = library.cuvmm_malloc
            allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            address = allocate(5 << 20, 0, None)
            library.cuvmm_tag_end.argtypes = [ctypes.c_uint64]
            library.cuvmm_tag_end(token)
            tensor = torch.Tensor(address, (5 << 20,), torch.uint8, torch.device("cuda", 0), None)
            pieces = cuvmm.extents(tensor)
            assert pieces[0].address <= address and sum(pieces[-1]) >= address + (5 << 20), pieces
            cuvmm.sleep("weights")
            refused(cuvmm.Error, lambda: cuvmm.extents(tensor), "its pool sleeps")
            cuvmm.wake("weights")
            assert cuvmm.extents(tensor)[0].address == pieces[0].address
            """
        )
