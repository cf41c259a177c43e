"""Publications: `cuvmm.publish` and `cuvmm.attach`, over the stand-in for libcuda."""

import os
import tempfile
import unittest

from support import needs_stand_in, run

BEGIN = """
import ctypes, os, subprocess, sys, time
import torch
from device import live
import cuvmm

def made(shape, kind, device="cuda:0", first=1):
    size = torch.Tensor.numel(tensor := torch.empty(shape, dtype=kind, device=device))
    return tensor.fill(bytes((first + at) % 251 for at in range(size * kind.itemsize)))

def other(code, *arguments):
    "Runs code in another process, and returns what it printed."
    ended = subprocess.run([sys.executable, "-W", "error", "-c", "import cuvmm, sys, torch\\n" + code,
        *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()
"""


KEPT = """
            import signal

            class Keeping:
                "A keeper in another process, which ends on a signal."
                def __init__(self, command):
                    self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
                    assert b"until Ctrl-C" in self.process.stdout.readline()

                def __enter__(self):
                    return self

                def __exit__(self, *error):
                    self.process.terminate()
                    assert self.process.wait(30) == 0

            code = '''
            import ctypes, os
            array = cuvmm.empty(1 << 16)
            ctypes.memset(array.address, 9, 1 << 16)
            published = cuvmm.publish({"it": array}, "model")
            assert published.keep() == 1
            assert cuvmm.attach("model").path == published.path
            print("ready", flush=True)
            os.kill(os.getpid(), 9)
            '''

            def outlives():
                "Has a publisher killed, three times, and the last one's memory attached."
                global weights
                for turn in range(3):
                    giver = subprocess.Popen([sys.executable, "-c", "import cuvmm, sys\\n"
                        + dedent(code)], stdout=subprocess.PIPE)
                    assert giver.stdout.readline() == b"ready\\n"
                    giver.wait()
                    weights = cuvmm.attach("model")
                    assert weights.path.endswith("/keeper.sock"), weights
                    assert weights["it"].bytes() == bytes([9]) * (1 << 16)

            def is_dropped():
                refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("model"), "publishes anything")
                assert weights["it"].bytes() == bytes([9]) * (1 << 16)
"""


def case(code: str) -> str:
    """Runs code in a process of its own, whose publications are in a folder of their own."""
    import textwrap

    with tempfile.TemporaryDirectory() as folder:
        return run(BEGIN + textwrap.dedent(code), fakes=True, XDG_RUNTIME_DIR=folder)


@needs_stand_in
class Publish(unittest.TestCase):
    def test_another_process_reads_all_tensors(self):
        case(
            """
            from torch import tensors
            state = {f"of {kind.name}": made((3, 5), kind, first=at * 7)
                for at, kind in enumerate(tensors.types.values())}
            state["scalar"] = made((), torch.float64)
            state["empty"] = made((0, 4), torch.int32)
            state["on the host"] = made((100,), torch.int16, "cpu")
            state["no torch"] = cuvmm.empty((7, 2), "int32")
            ctypes.memmove(state["no torch"].address, bytes(range(56)), 56)
            published = cuvmm.publish(state, "all", metadata={"step": 7})
            assert published.version == 1 and published.device == 0
            assert "'all' version 1" in repr(published), published

            read = '''
            weights = cuvmm.attach("all")
            assert weights.metadata == {"step": "7"}, weights.metadata
            for name, tensor in weights.items():
                assert tensor.device.type == "cuda" and tensor.device.index == 0
                print(name, tensor.shape, tensor.stride(), tensor.dtype, tensor.bytes().hex(), sep="|")
            '''
            said = other(dedent(read)).splitlines()
            plain = torch.from_dlpack(state.pop("no torch"))
            expected = [f"{name}|{it.shape}|{it.stride()}|{it.dtype}|{it.bytes().hex()}"
                for name, it in [*state.items(), ("no torch", plain)]]
            assert said == expected, (said, expected)
            """
        )

    def test_what_shares_memory_is_stored_once_and_shares_it_again(self):
        case(
            """
            whole = made((64, 32), torch.float32)
            left = whole.as_strided((64, 8), (32, 1))
            right = whole.as_strided((64, 24), (32, 1), 8)
            turned = made((32, 48), torch.bfloat16).as_strided((48, 32), (1, 48))
            state = {"embedding": whole, "head": whole, "left": left, "right": right, "turned": turned}
            published = cuvmm.publish(state, "tied")
            assert published.nbytes == 64 * 32 * 4 + 32 * 48 * 2, published.nbytes
            weights = cuvmm.attach("tied")
            start = weights["embedding"].data_ptr()
            assert weights["head"].data_ptr() == start and weights["right"].data_ptr() == start + 32
            for name, tensor in weights.items():
                assert tensor.bytes() == state[name].bytes(), name
                assert tensor.stride() == state[name].stride(), name
            # The library's own array has the same strides.
            array = weights.array("turned")
            assert array.strides == (1, 48)
            assert array.__cuda_array_interface__["strides"] == (2, 96)
            assert cuvmm.from_dlpack(array).strides == (1, 48)
            """
        )

    def test_holes_are_left_out_and_tensors_are_aligned(self):
        case(
            """
            whole = made((1000, 8), torch.float32)
            column = whole.as_strided((1000,), (8,), 3)
            odd = made((4096,), torch.int8).as_strided((100,), (1,), 17)
            published = cuvmm.publish({"column": column, "odd": odd}, "holes")
            assert published.nbytes < 5000, published
            weights = cuvmm.attach("holes")
            assert weights["column"].bytes() == column.bytes()
            assert weights["column"].stride() == (1,)
            assert weights["odd"].bytes() == odd.bytes()
            assert weights["odd"].data_ptr() % 512 == 0 != odd.data_ptr() % 512
            # A tensor that repeats its elements takes their bytes once.
            row = made((32,), torch.float32).as_strided((500, 32), (0, 1))
            published = cuvmm.publish({"row": row}, "repeated")
            assert published.nbytes == 128, published
            again = cuvmm.attach("repeated")["row"]
            assert again.shape == (500, 32) and again.bytes() == row.bytes()
            """
        )

    def test_alignment_takes_no_more_memory(self):
        case(
            """
            size = 2 << 20
            whole = made((size + 512,), torch.uint8)
            before = live()[0]
            for first in (1, 3, 511):
                odd = whole.as_strided((size,), (1,), first)
                published = cuvmm.publish({"odd": odd}, f"at {first}")
                assert published.nbytes == size, published.nbytes
                assert live()[0] == before + 1, (live(), before)
                assert cuvmm.attach(f"at {first}")["odd"].bytes() == odd.bytes()
                published.withdraw()
            """
        )

    def test_descriptors_run_out(self):
        case(
            """
            bounded = dedent('''
            import os, resource
            kept, hard = [], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            def until_refused(spare, call):
                limit = len(os.listdir("/proc/self/fd")) + spare
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                try:
                    for at in range(limit):
                        kept.append(call(at))
                except cuvmm.Error as error:
                    assert not isinstance(error, cuvmm.OutOfMemoryError), repr(error)
                    said = str(error)
                    assert "descriptors" in said and f"{limit} (RLIMIT_NOFILE)" in said, said
                    return
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                raise AssertionError("not refused")
            ''')
            exec(bounded)
            x = made((100,), torch.uint8)
            for spare in range(8, 14):
                until_refused(spare, lambda at: cuvmm.publish({"x": x}, f"{spare} {at}"))
            read = '''
            names = sys.argv[1:]
            cuvmm.attach(names.pop())
            for spare in range(8):
                until_refused(spare, lambda at: cuvmm.attach(names.pop()))
            '''
            other(bounded + dedent(read), *(it.name for it in kept))
            """
        )

    def test_nothing_but_empty_tensors(self):
        case(
            """
            cuvmm.publish({"none": made((0,), torch.float32)}, "empty", device="cuda:0")
            weights = cuvmm.attach("empty")
            assert list(weights) == ["none"] and weights["none"].shape == (0,)
            assert "none" in weights and "other" not in weights and len(weights) == 1
            refused(KeyError, lambda: weights["other"])
            cuvmm.publish({}, "nothing", device=0)
            assert len(cuvmm.attach("nothing")) == 0
            """
        )

    def test_the_copy_is_apart_from_the_tensors(self):
        case(
            """
            tensor = made((100,), torch.uint8)
            before = tensor.bytes()
            cuvmm.publish({"it": tensor}, "model")
            tensor.fill(bytes(100))
            assert cuvmm.attach("model")["it"].bytes() == before
            assert ": 1 tensor, " in repr(cuvmm.attach("model")), cuvmm.attach("model")
            """
        )

    def test_what_cannot_be_published(self):
        case(
            """
            tensor, host = made((4,), torch.float32), made((4,), torch.float32, "cpu")
            one = made((4,), torch.float32, "cuda:1")
            before = live()
            publish = lambda tensors, name="x", **named: lambda: cuvmm.publish(tensors, name, **named)
            refused(TypeError, publish([tensor]), "list")
            refused(TypeError, publish({"step": 5}), "'step' is of type int")
            refused(TypeError, publish({5: tensor}), "5")
            refused(ValueError, publish({"a": host}), "'a' is in host memory", "name the device")
            refused(ValueError, publish({}), "there are no tensors")
            refused(ValueError, publish({"a": tensor, "b": one}), "'b' is on device 1")
            refused(ValueError, publish({"a": tensor}, device=1), "'a' is on device 0")
            refused(TypeError, publish({"a": tensor}, device=1.5), "cuda:0")
            sparse, meta, wrapped = (made((4,), torch.float32) for _ in range(3))
            sparse.layout = torch.sparse_coo
            refused(ValueError, publish({"a": sparse}), "'a' is sparse or quantized")
            meta.device = torch.device("meta")
            refused(ValueError, publish({"a": meta}), "'a' is on device meta")
            wrapped.address = 0
            refused(ValueError, publish({"a": wrapped}), "'a' has no memory of its own")
            refused(TypeError, publish({"a": tensor}, 5), "name of a publication", "5")
            refused(TypeError, lambda: cuvmm.attach(None), "name of a publication", "None")
            refused(cuvmm.Error, publish({"a": tensor}, ""), "use 1 to 255 bytes")
            refused(cuvmm.Error, publish({"a": tensor}, "a\\n"), "control characters")
            refused(cuvmm.Error, publish({"a": tensor}, path="/no/such/folder/x.sock"), "/no/such/folder")
            refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("x"), "publishes anything")
            for users, kind, text in [([-1], ValueError, "-1"), ([1 << 32], ValueError, "4294967295"),
                    (1000, TypeError, "[1000]"), (["root"], TypeError, "root")]:
                refused(kind, publish({"a": tensor}, path="/tmp/x.sock", users=users), text)
                refused(kind, lambda: cuvmm.attach("x", "/tmp/x.sock", users=users), text)
            assert live() == before
            """
        )

    def test_limits(self):
        case(
            """
            cuvmm.configure(limit="64MiB")
            source = cuvmm.empty(20 * MIB)
            # Free memory of the heap gives way.
            del (more := [cuvmm.empty(40 * MIB)])[:]
            published = cuvmm.publish({"a": source}, "model")
            assert cuvmm.stats().limit == 44 * MIB, cuvmm.stats().limit
            assert cuvmm.stats().published == 20 * MIB
            assert "published  20 MiB" in str(cuvmm.stats()), str(cuvmm.stats())
            refused(cuvmm.OutOfMemoryError, lambda: cuvmm.empty(30 * MIB), "44 MiB")
            # A second version needs room beside the first.
            again = lambda: cuvmm.publish({"a": source}, "model")
            assert again().version == 2 and cuvmm.stats().limit == 44 * MIB
            larger = cuvmm.empty(10 * MIB)
            held = cuvmm.stats().held
            refused(cuvmm.OutOfMemoryError, again, "no room for 20 MiB",
                "the limit is 64 MiB", "shareable memory 20 MiB")
            assert cuvmm.stats().limit == 44 * MIB and cuvmm.stats().held == held
            assert cuvmm.attach("model").version == 2
            published.withdraw()
            assert cuvmm.stats().limit == 64 * MIB
            assert cuvmm.stats().published == 0 and "published" not in str(cuvmm.stats())
            cuvmm.empty(30 * MIB)
            refused(cuvmm.NotPublishedError, published.withdraw, "no such name")
            """
        )

    def test_fractions(self):
        case(
            """
            from cuvmm import _library
            library = _library.get()
            published = cuvmm.publish({"a": cuvmm.empty(8 * MIB)}, "model")
            library.memory_fraction(0.25, 0)
            assert cuvmm.stats().limit == 56 * MIB, cuvmm.stats().limit
            assert library.get_memory_fraction(0) == 0.25
            published.withdraw()
            assert cuvmm.stats().limit == 64 * MIB
            """
        )

    def test_the_driver_has_too_little(self):
        case(
            """
            source = cuvmm.empty(130 << 20)
            refused(cuvmm.OutOfMemoryError, lambda: cuvmm.publish({"a": source}, "model"), "130 MiB")
            refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("model"))
            del source
            assert cuvmm.publish({"a": cuvmm.empty(30 << 20)}, "model").version == 1
            """
        )

    def test_a_graph_is_captured(self):
        case(
            """
            from cuvmm import _library

            class Id(ctypes.Structure):
                _fields_ = [("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]

            loaded = ctypes.CDLL(cuvmm.library_path())
            loaded.cuvmm_begin_allocate_to_pool.argtypes = [ctypes.c_int, Id, ctypes.c_void_p]
            loaded.cuvmm_end_allocate_to_pool.argtypes = [ctypes.c_int, Id]
            tensor = made((4,), torch.float32)
            published = cuvmm.publish({"it": tensor}, "model")
            loaded.cuvmm_begin_allocate_to_pool(0, Id(1, 0), None)
            refused(cuvmm.Error, lambda: cuvmm.publish({"it": tensor}, "model"), "captured")
            loaded.cuvmm_end_allocate_to_pool(0, Id(1, 0))
            assert cuvmm.publish({"it": tensor}, "model").version == 2
            """
        )

    def test_a_ledger_has_what_the_heap_gave_back(self):
        case(
            """
            folder = os.environ["XDG_RUNTIME_DIR"] + "/ledger"
            os.mkdir(folder)
            cuvmm.configure(ledger=folder, ledger_limit="64MiB")
            for _ in range(3):
                del (it := [cuvmm.empty(50 << 20)])[:]
                published = cuvmm.publish({"a": torch.empty((50 << 20,), torch.uint8)}, "m", device=0)
                published.withdraw()
            """
        )

    def test_a_ledger_counts_publications(self):
        case(
            """
            folder = os.environ["XDG_RUNTIME_DIR"] + "/ledger"
            os.mkdir(folder)
            cuvmm.configure(ledger=folder, ledger_limit="64MiB", tenant="giver")
            source = cuvmm.empty(4 << 20)
            published = cuvmm.publish({"a": source}, "model")
            code = '''
            cuvmm.configure(ledger=sys.argv[1], tenant="taker")
            weights = cuvmm.attach("model")
            print(weights["a"].numel())
            large = int(sys.argv[2]) << 20
            try:
                cuvmm.empty(large)
            except cuvmm.OutOfMemoryError as error:
                print(error)
            '''
            said = other(dedent(code), folder, "58").splitlines()
            assert said[0] == str(4 << 20) and "the ledger leaves 56 MiB" in said[1], said
            """
        )


@needs_stand_in
class Attach(unittest.TestCase):
    def test_versions(self):
        case(
            """
            tensor = made((1000,), torch.uint8)
            old = tensor.bytes()
            first = cuvmm.publish({"it": tensor}, "model")
            weights = cuvmm.attach("model")
            assert weights.version == 1 and weights.newer() is None
            begun = time.monotonic()
            assert weights.newer(timeout=0.6) is None and time.monotonic() - begun >= 0.6
            tensor.fill(new := bytes(at % 7 for at in range(1000)))
            second = cuvmm.publish({"it": tensor}, "model")
            assert second.version == 2
            newer = weights.newer()
            assert newer.version == 2 and newer["it"].bytes() == new
            assert weights["it"].bytes() == old and newer.newer() is None
            second.withdraw()
            refused(cuvmm.NotPublishedError, newer.newer, "model")
            assert cuvmm.publish({"it": tensor}, "model").version == 3
            assert weights.newer().version == 3
            """
        )

    def test_the_publisher_ends(self):
        case(
            """
            code = '''
            import ctypes
            array = cuvmm.empty(3 << 20)
            ctypes.memset(array.address, 9, 3 << 20)
            cuvmm.publish({"it": array}, "model")
            print("ready", flush=True)
            sys.stdin.read()
            if sys.argv[1:] == ["abort"]:
                import os
                os.kill(os.getpid(), 9)
            '''
            for how in ([], ["abort"]):
                giver = subprocess.Popen([sys.executable, "-c", "import cuvmm, sys\\n"
                    + dedent(code), *how], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert giver.stdout.readline() == b"ready\\n"
                weights = cuvmm.attach("model")
                giver.stdin.close()
                giver.wait()
                refused(cuvmm.NotPublishedError, weights.newer, "no process listens at")
                assert weights["it"].bytes() == bytes([9]) * (3 << 20)
                # What a process that was killed has left is removed.
                refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("model"), "publishes anything")
                assert os.listdir(os.environ["XDG_RUNTIME_DIR"] + "/cuvmm") == []
            """
        )

    def test_a_publisher_that_ends_after_it_was_found_is_looked_for_again(self):
        case(
            """
            import socket, struct, threading

            array = cuvmm.empty(3 << 20)
            folder = os.environ["XDG_RUNTIME_DIR"] + "/cuvmm"
            os.mkdir(folder, 0o700)
            dies = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            dies.bind(folder + "/1.sock")
            dies.listen()

            def die():
                "Lists the name. When it is attached, another process publishes it, and this one has ended."
                found = b'{"Publications":[{"name":"model","version":7,"held":1,"extents":1,"tensors":1}]}'
                lists, _ = dies.accept()
                lists.recv(1 << 16)
                lists.send(struct.pack("<4sHHIIHH", b"cvmm", 3, 4, 0, len(found), 0, 0) + found)
                attaches, _ = dies.accept()
                cuvmm.publish({"it": array}, "model")
                for it in (dies, lists, attaches):
                    it.close()
                os.unlink(folder + "/1.sock")

            dying = threading.Thread(target=die)
            dying.start()
            weights = cuvmm.attach("model")
            dying.join()
            assert weights.version == 1 and weights.path == f"{folder}/{os.getpid()}.sock", weights
            """
        )

    def test_no_keeper_listens(self):
        case(
            """
            array = cuvmm.empty(3 << 20)
            published = cuvmm.publish({"it": array}, "model")
            folder = os.path.dirname(published.path)
            try:
                published.keep()
            except cuvmm.NotPublishedError:
                raise
            except cuvmm.Error as error:
                assert folder + "/keeper.sock: `cuvmm share keep`" in str(error), error
            else:
                raise AssertionError("kept by nothing")
            refused(cuvmm.Error, lambda: published.keep(folder + "/other"), folder + "/other")
            # A publisher is no keeper.
            refused(cuvmm.Error, lambda: published.keep(published.path), "keeps nothing")
            assert cuvmm.attach("model").version == 1
            published.withdraw()
            refused(cuvmm.NotPublishedError, published.keep, "this process has no such name")
            """
        )

    @unittest.skipUnless(os.environ.get("CUVMM_COMMAND"), "CUVMM_COMMAND names no command cuvmm")
    def test_the_command_s_keeper_outlives_the_publisher(self):
        case(
            KEPT
            + """
            command = os.environ["CUVMM_COMMAND"]
            with Keeping([command, "share", "keep"]):
                outlives()
                dropped = subprocess.run([command, "share", "drop", "model"], capture_output=True)
                assert dropped.returncode == 0, dropped
                is_dropped()
            """
        )

    def test_a_keeper_outlives_the_publisher(self):
        case(
            KEPT
            + """
            # As under nohup.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            with Keeping([sys.executable, "-W", "error", "-m", "cuvmm.keeper"]) as keeping:
                keeping.process.send_signal(signal.SIGHUP)
                outlives()
                assert cuvmm.drop("model") and not cuvmm.drop("model")
                is_dropped()
                refused(cuvmm.Error, cuvmm.Keeper, "another process listens at")
            refused(cuvmm.Error, lambda: cuvmm.drop("model"), "no keeper listens", "python3 -m cuvmm.keeper")
            """
        )

    def test_a_keeper_that_is_started_again_takes_what_publishers_gave(self):
        case(
            """
            published = cuvmm.publish({"it": cuvmm.empty(3 << 20)}, "model")
            folder = os.path.dirname(published.path)
            elsewhere = cuvmm.Keeper(folder + "/other", ledger=folder)
            with cuvmm.Keeper() as keeper:
                assert keeper.path == folder + "/keeper.sock" and keeper.path in repr(keeper)
                assert published.keep() == published.keep(elsewhere.path) == 1
            assert "closed" in repr(keeper)
            keeper.close()
            refused(cuvmm.Error, lambda: cuvmm.drop("model"), "no keeper listens")
            again = cuvmm.Keeper()
            pid = os.fork()
            if pid == 0:
                # The child has none of it.
                again.close()
                refused(cuvmm.Error, lambda: cuvmm.drop("model"), "forked")
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert cuvmm.attach("model", again.path).version == 1
            assert cuvmm.drop("model") and cuvmm.drop("model", elsewhere.path)
            refused(TypeError, lambda: cuvmm.drop(7), "text")
            del again
            assert sorted(os.listdir(folder))[-2:] == ["other", "other.cuvmm-lock"]
            """
        )

    def test_garbage_collection_inside_of_a_capture_breaks_nothing(self):
        case(
            """
            import gc
            from cuvmm import _library
            cuvmm.publish({"it": made((100,), torch.uint8)}, "model")
            weights = cuvmm.attach("model")
            number, attached = weights._memory.number, _library.get().text
            torch.cuda.init()
            libcuda, stream, graph = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
            assert libcuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
            torch.cuda.stream = stream.value
            # The library is not told of this capture.
            assert libcuda.cuStreamBeginCapture_v2(stream, 0) == 0
            del weights
            gc.collect()
            assert libcuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
            assert attached("attached", number)
            before = live()
            again = cuvmm.attach("model")
            assert not attached("attached", number)
            assert live() == before
            """
        )

    def test_a_tensor_keeps_the_memory(self):
        case(
            """
            import copy, gc, pickle
            published = cuvmm.publish({"it": made((100,), torch.uint8)}, "model")
            cuvmm.empty_cache()
            before = live()
            weights = cuvmm.attach("model")
            assert live()[1] == before[1] + 1
            tensor, array = weights["it"], weights.array("it")
            refused(TypeError, lambda: pickle.dumps(weights), "attach it again")
            refused(TypeError, lambda: copy.deepcopy(array), "neither pickled nor copied")
            published.withdraw()
            del weights, array
            gc.collect()
            assert tensor.bytes() == bytes((1 + at) % 251 for at in range(100))
            mappings = live()[1]
            part = tensor.as_strided((10,), (1,), 5)
            del tensor
            assert live()[1] == mappings
            del part
            gc.collect()
            assert live()[1] == mappings - 1
            """
        )

    def test_waiting_for_a_name(self):
        case(
            """
            import threading
            tensor = made((4,), torch.float32)
            later = threading.Timer(0.3, lambda: cuvmm.publish({"it": tensor}, "late"))
            refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("late"))
            later.start()
            assert cuvmm.attach("late", timeout=30)["it"].bytes() == tensor.bytes()
            cuvmm.publish({"it": tensor}, "other")
            refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("model"),
                '"late"', '"other"')
            weights = cuvmm.attach("late")
            for kind, timeout in ((TypeError, "3"), (ValueError, -1), (ValueError, float("nan"))):
                refused(kind, lambda: cuvmm.attach("late", timeout=timeout), "a timeout is")
                refused(kind, lambda: weights.newer(timeout), "a timeout is")
            """
        )

    def test_a_publisher_without_files_is_named(self):
        case(
            """
            code = '''
            import resource
            cuvmm.publish({"it": cuvmm.empty(3 << 20)}, "model")
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
            files = []
            try:
                while True:
                    files.append(open("/dev/null"))
            except OSError:
                pass
            print("ready", flush=True)
            sys.stdin.read()
            '''
            giver = subprocess.Popen([sys.executable, "-c", "import cuvmm, sys\\n"
                + dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert giver.stdout.readline() == b"ready\\n"
            refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("model"), "does not answer")
            giver.stdin.close()
            giver.wait()
            """
        )

    def test_paths(self):
        case(
            """
            folder = os.environ["XDG_RUNTIME_DIR"]
            path = folder + "/my.sock"
            tensor = made((4,), torch.float32)
            published = cuvmm.publish({"it": tensor}, "model", path)
            assert published.path == path
            refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("model"))
            refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("other", path), path)
            refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("model", folder + "/none"), "none")
            assert cuvmm.attach("model", path).path == path
            refused(cuvmm.Error, lambda: cuvmm.publish({"it": tensor}, "model", path, users=[5]),
                "other users than these")
            elsewhere = f"cuvmm.publish({{'it': cuvmm.empty(4)}}, 'model', sys.argv[1])"
            said = other("try:\\n  " + elsewhere + "\\nexcept cuvmm.Error as error: print(error)", path)
            assert "another process listens at " + path in said, said
            # A relative one is that of the folder at the time.
            os.chdir(folder)
            relative = cuvmm.publish({"it": tensor}, "relative", "here.sock")
            os.chdir("/")
            assert relative.path == folder + "/here.sock"
            assert cuvmm.attach("relative", relative.path).version == 1
            relative.withdraw()
            refused(ValueError, lambda: cuvmm.publish({"it": tensor}, "a", users=[5]), "name a path")
            refused(ValueError, lambda: cuvmm.attach("a", users=[5]), "name it")
            # Several publish one name.
            mine = cuvmm.publish({"it": tensor}, "model")
            code = elsewhere.replace("sys.argv[1]", "None") + '''
            try:
                cuvmm.attach("model")
            except cuvmm.Error as error:
                print(error)
            '''
            said = other(code.replace("\\n            ", "\\n"))
            assert "several processes" in said and mine.path in said, said
            """
        )

    def test_other_devices(self):
        case(
            """
            tensor = made((4,), torch.float32, "cuda:1")
            published = cuvmm.publish({"it": tensor}, "model")
            assert published.device == 1
            refused(cuvmm.Error, lambda: cuvmm.attach("model"), '"model" is on device 1')
            weights = cuvmm.attach("model", device="cuda:1")
            assert weights["it"].device.index == 1 and weights["it"].bytes() == tensor.bytes()
            """
        )

    def test_peers_read_it(self):
        for peers, outcome in (("[]", "refused"), ("[0, 1]", "read")):
            said = case(
                f"""
                import cuvmm.torch
                cuvmm.configure(peers={peers})
                cuvmm.publish({{"it": made((4,), torch.float32)}}, "model")
                it = cuvmm.attach("model")["it"]
                try:
                    cuvmm.torch.check_access(it, "cuda:1")
                    print("read")
                except cuvmm.Error as error:
                    assert "peers=[0, 1]" in str(error), error
                    print("refused")
                """
            )
            self.assertEqual(said.strip(), outcome)

    def test_a_publisher_that_says_what_is_wrong(self):
        case(
            """
            import json
            from cuvmm import _library
            library, array = _library.get(), cuvmm.empty(4096)

            def publish(shape, size, metadata):
                it = {"name": "it", "dtype": "F32", "shape": shape, "offset": 0, "size": size}
                library.number("publish", json.dumps({"name": "model", "path": None, "device": 0,
                    "size": 4096, "manifest": {"tensors": [it], "metadata": metadata},
                    "parts": []}).encode())

            take = lambda: cuvmm.attach("model").array("it")
            publish([4, 4], 64, {})
            assert take().strides == (4, 1)
            refused(cuvmm.Error, lambda: publish([4, 4], 60, {}), "60 B, but 64 B are needed")
            for strides, text in [('{"it": [9, 1]}', "and takes 124"), ('{"it": [1]}', "2 dimensions"),
                    ('{"it": [-4, 1]}', "negative"), ('{"it": ["a", 1]}', "not understood"),
                    ("[1]", "not understood"), ("{", "not understood")]:
                publish([4, 4], 64, {"cuvmm.strides": strides})
                refused(cuvmm.Error, take, text)
            publish([4, 4], 64, {"cuvmm.strides": '{"other": [1], "it": [1, 4]}'})
            assert take().strides == (1, 4)
            refused(cuvmm.Error, lambda: publish([4, 4], 8192 << 20, {}), "it")
            """
        )

    def test_types_without_a_name(self):
        case(
            """
            state = {"new": made((4,), torch.tensors.dtype("float3", 1)), "wide": made((2,), torch.complex128),
                "odd": made((2,), torch.float8_e4m3fnuz)}
            cuvmm.publish(state, "model")
            weights = cuvmm.attach("model")
            assert weights.array("wide").dtype == "complex128"
            refused(cuvmm.Error, lambda: weights.array("new"), "float3", "DLPack")
            del torch.float8_e4m3fnuz
            refused(cuvmm.Error, lambda: weights["odd"], "float8_e4m3fnuz", "this PyTorch")
            """
        )

    def test_other_users(self):
        if os.geteuid() != 0:
            # Only root can become another user.
            return
        case(
            """
            path = os.environ["XDG_RUNTIME_DIR"] + "/open.sock"
            os.chmod(os.environ["XDG_RUNTIME_DIR"], 0o755)
            private = os.environ["XDG_RUNTIME_DIR"] + "/private.sock"
            state = {"it": made((4,), torch.float32)}
            cuvmm.publish(state, "model", path, users=[4321])
            cuvmm.publish(state, "model", private)
            code = '''
            import os
            cuvmm.empty(4)
            os.setuid(int(sys.argv[1]))
            try:
                weights = cuvmm.attach("model", sys.argv[2], users=[int(user) for user in sys.argv[3:]])
                print(weights["it"].bytes().hex())
            except cuvmm.Error as error:
                print(error)
            '''
            attach = lambda *arguments: other(dedent(code), *arguments)
            assert attach("4321", path, "0") == state["it"].bytes().hex()
            said = attach("4321", path)
            assert "of user 0 is not allowed" in said, said
            assert "not allowed" in (said := attach("1234", path, "0")) or "closed" in said, said
            assert "PERM" in (said := attach("4321", private, "0")) or "ermission" in said, said
            """
        )

    def test_a_forked_child(self):
        case(
            """
            tensor = made((4,), torch.float32)
            published = cuvmm.publish({"it": tensor}, "model")
            weights = cuvmm.attach("model")
            child = os.fork()
            if child == 0:
                forked = lambda call: refused(cuvmm.Error, call, "forked")
                forked(lambda: cuvmm.publish({"it": tensor}, "model"))
                forked(lambda: cuvmm.attach("model"))
                forked(weights.newer)
                forked(published.withdraw)
                del weights
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert weights["it"].bytes() == tensor.bytes() and weights.newer() is None
            assert cuvmm.attach("model").version == 1
            """
        )
