"""Tensors of shareable pools in other processes, in place, over the stand-in for libcuda."""

import tempfile
import unittest

from support import frame, needs_stand_in

BEGIN = """
import ctypes, gc, json, multiprocessing, os, select, signal, socket, subprocess, sys, time, warnings, weakref
from multiprocessing.reduction import ForkingPickler
import torch
from device import live
import cuvmm, cuvmm.torch
from cuvmm.torch import _sharing

def made(shape, kind=torch.uint8, first=1, nbytes=None):
    "Makes a tensor of the pool that is entered, and fills it."
    size = kind.itemsize
    for extent in shape:
        size *= extent
    raw = torch.empty(nbytes or size)
    tensor = torch.Tensor(raw.address, shape, kind, torch.device("cuda", 0), raw)
    return tensor.fill(bytes((first + at) % 251 for at in range(size)))

CHILD = '''
import gc, multiprocessing, os, pickle, sys
import torch
import cuvmm, cuvmm.torch
multiprocessing.current_process().authkey = bytes.fromhex(input())
def got():
    return pickle.loads(bytes.fromhex(input()))
def say(*words):
    print(*words, flush=True)
'''

class Child:
    "Another process, which gets pickled objects as by a queue and says lines."
    def __init__(self, code):
        self.process = subprocess.Popen([sys.executable, "-W", "error", "-c", CHILD + code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.write(multiprocessing.current_process().authkey.hex())

    def write(self, line):
        self.process.stdin.write(line + "\\n")
        self.process.stdin.flush()

    def send(self, *objects):
        self.write(bytes(ForkingPickler.dumps(objects if len(objects) > 1 else objects[0])).hex())

    def heard(self):
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(60)

def until(count):
    "Waits until this number of storages is kept for other processes."
    late = time.monotonic() + 60
    while cuvmm.torch.sent() != count:
        assert time.monotonic() < late, (cuvmm.torch.sent(), count)
        time.sleep(0.001)
"""


case = frame(BEGIN, fakes=True)


@needs_stand_in
class InPlace(unittest.TestCase):
    def test_another_process_has_the_tensor_itself(self):
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                whole = made((64, 32), torch.float32)
            turned = whole.as_strided((16, 8), (1, 32), 5)
            child = Child('''
            whole, turned = got()
            assert whole.dtype is torch.float32 and whole.shape == (64, 32) and whole.stride() == (32, 1)
            assert turned.shape == (16, 8) and turned.stride() == (1, 32)
            # One mapping for both: they share memory as they did.
            assert turned.data_ptr() - whole.data_ptr() == 20, (turned.data_ptr(), whole.data_ptr())
            say(whole.bytes().hex())
            say(turned.bytes().hex())
            whole.fill(bytes(64 * 32 * 4))
            say("written")
            input()
            ''')
            # The child changes the bytes.
            expected = [whole.bytes().hex(), turned.bytes().hex()]
            child.send(whole, turned)
            assert [child.heard(), child.heard()] == expected
            assert child.heard() == "written"
            assert whole.bytes() == bytes(64 * 32 * 4)
            assert cuvmm.torch.sent() == 2
            child.write("end")
            assert child.end() == 0
            until(0)
            """
        )

    def test_parameters_and_storages_and_tensors_for_reading(self):
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((8,), torch.float32)
            parameter = torch.nn.Parameter(tensor, requires_grad=True)
            child = Child('''
            parameter, storage, tensor = got()
            assert type(parameter) is torch.nn.Parameter and parameter.requires_grad
            assert type(storage) is torch.UntypedStorage and storage.nbytes() == 32
            assert storage.data_ptr() == parameter.data_ptr() != tensor.data_ptr()
            library = cuvmm._library.get()
            say([library.access(it.data_ptr(), 0) for it in (parameter, tensor)], tensor.bytes().hex())
            ''')
            child.send(parameter, tensor.untyped_storage(), cuvmm.torch.read_only(tensor))
            assert child.heard() == "[3, 1] " + tensor.bytes().hex()
            assert child.end() == 0
            until(0)
            """
        )

    def test_a_spawned_process_gets_tensors_as_arguments(self):
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((MIB,))
            code = "assert tensor.bytes()[:3] == bytes((1, 2, 3)); tensor.fill(bytes(1 << 20))"
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=exec, args=(code, {"tensor": tensor}))
            process.start()
            process.join()
            assert process.exitcode == 0
            assert tensor.bytes() == bytes(MIB)
            until(0)
            # A process that ends before it takes its arguments leaves nothing.
            process = context.Process(target=exec, args=("", {"tensor": tensor}))
            process.start()
            process.kill()
            process.join()
            del process
            gc.collect()
            until(0)
            """
        )

    def test_the_storage_is_kept_until_the_process_has_let_go(self):
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            kept = weakref.ref(tensor.untyped_storage())
            child = Child('''
            tensor, again = got(), got()
            del tensor
            gc.collect()
            say("one")
            input()
            del again
            gc.collect()
            say("none")
            input()
            ''')
            child.send(tensor)
            child.send(tensor)
            assert child.heard() == "one"
            until(1)
            tensor.keeps.storage = None
            del tensor
            gc.collect()
            assert kept() is not None
            child.write("")
            assert child.heard() == "none"
            until(0)
            assert kept() is None
            child.write("")
            assert child.end() == 0
            """
        )

    def test_a_process_that_is_killed_lets_go(self):
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            child = Child('''
            tensor = got()
            say("here")
            input()
            ''')
            child.send(tensor)
            assert child.heard() == "here" and cuvmm.torch.sent() == 1
            child.process.kill()
            until(0)
            assert child.end() == -signal.SIGKILL
            """
        )

    def test_a_killed_process_is_looked_for_where_it_cannot_be_watched(self):
        case(
            """
            def forbidden(process):
                raise PermissionError("as in some containers")

            os.pidfd_open = forbidden
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            child = Child('''
            tensor = got()
            say("here")
            input()
            ''')
            child.send(tensor)
            assert child.heard() == "here"
            child.process.kill()
            assert child.end() == -signal.SIGKILL
            until(0)
            """
        )

    def test_a_process_that_lives_is_not_gone_where_proc_hides_it(self):
        case(
            """
            import threading
            def forbidden(process):
                raise PermissionError("as in some containers")

            exists, kill, looked = os.path.exists, os.kill, threading.Event()
            def looking(process, number):
                kill(process, number)
                looked.set()

            os.pidfd_open, os.kill = forbidden, looking
            os.path.exists = lambda path: not path.startswith("/proc/") and exists(path)
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            child = Child('''
            import socket
            giver = socket.socket(fileno=got()[1][1][0].detach())
            giver.send(b"W")
            assert giver.recv(1 << 17)
            giver.close()
            input()
            ''')
            child.send(_sharing._in_place(tensor, False))
            assert looked.wait(60)
            assert cuvmm.torch.sent() == 1
            child.write("")
            assert child.end() == 0
            until(0)
            """
        )

    def test_a_thread_that_the_system_refuses_is_started_for_the_next_tensor(self):
        case(
            """
            import threading
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((1000,))
            start = threading.Thread.start
            def refuses(thread):
                if thread.name == "cuvmm-sharing":
                    raise RuntimeError("can't start new thread")
                start(thread)

            threading.Thread.start = refuses
            refused(RuntimeError, lambda: ForkingPickler.dumps(tensor), "can't start")
            threading.Thread.start = start
            assert cuvmm.torch.sent() == 0
            again = ForkingPickler.loads(ForkingPickler.dumps(tensor))
            assert again.bytes() == tensor.bytes()
            del again
            gc.collect()
            until(0)
            """
        )

    def test_threads_that_get_one_block_at_once_map_it_once(self):
        case(
            """
            import threading
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            for _ in range(10):
                sent, got, together = [ForkingPickler.dumps(tensor) for _ in range(4)], [], threading.Barrier(4)
                def get(it):
                    together.wait()
                    got.append(ForkingPickler.loads(it))

                threads = [threading.Thread(target=get, args=(it,)) for it in sent]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert len(got) == 4 and len({it.data_ptr() for it in got}) == 1, got
                for it in got:
                    refused(cuvmm.Error, lambda: ForkingPickler.dumps(it), "clone()")
                del it
                got.clear()
                gc.collect()
                until(0)
            """,
            # Mapping takes a while.
            FAKECUDA_LATENCY="h200",
        )

    def test_the_end_of_the_socket_alone_frees_nothing(self):
        "Work of a process whose socket closed may still run: its end is waited for."
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            child = Child('''
            import socket
            handle = got()[1][1][0]
            giver = socket.socket(fileno=handle.detach())
            giver.send(b"W")
            assert giver.recv(1 << 17)
            giver.close()
            say("closed")
            input()
            ''')
            # What is pickled, in place of what is made of it.
            child.send(_sharing._in_place(tensor, False))
            assert child.heard() == "closed"
            late = time.monotonic() + 60
            while not _sharing._senders._killed:
                assert time.monotonic() < late
                time.sleep(0.001)
            assert cuvmm.torch.sent() == 1
            child.write("")
            assert child.end() == 0
            until(0)
            """
        )

    def test_memory_outlives_a_sender_that_is_killed(self):
        case(
            """
            sender = Child('''
            from multiprocessing.reduction import ForkingPickler
            with cuvmm.torch.pool("w", shareable=True):
                raw = torch.empty(3 << 20)
            tensor = torch.Tensor(raw.address, (3 << 20,), torch.uint8, torch.device("cuda", 0), raw)
            tensor.fill(bytes([7]) * (3 << 20))
            say(bytes(ForkingPickler.dumps(tensor)).hex())
            say(bytes(ForkingPickler.dumps(tensor)).hex())
            input()
            ''')
            first, second = (ForkingPickler.loads(bytes.fromhex(sender.heard())) if at == 0 else sender.heard()
                for at in range(2))
            sender.process.kill()
            sender.end()
            assert first.bytes() == bytes([7]) * (3 * MIB)
            refused(cuvmm.Error, lambda: ForkingPickler.loads(bytes.fromhex(second)), "has ended")
            assert live()[0] > 0
            del first
            gc.collect()
            assert live() == (0, 0), live()
            """
        )

    def test_other_memory_is_refused_and_says_how_it_is_shared(self):
        case(
            """
            with cuvmm.torch.pool("plain"):
                plain = made((16,))
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((16,))
            refused(cuvmm.Error, lambda: ForkingPickler.dumps(plain), '"plain"', "shareable=True")
            def late():
                with cuvmm.torch.pool("plain", shareable=True):
                    pass
            refused(cuvmm.Error, late, '"plain" has memory that is not shareable')
            # Others are PyTorch's.
            host = torch.empty((4,), torch.uint8, "cpu").fill(b"abcd")
            assert ForkingPickler.loads(ForkingPickler.dumps(host)).bytes() == b"abcd"
            outside = made((16,))
            refused(RuntimeError, lambda: ForkingPickler.dumps(outside), "shareIPcHandle")
            refused(cuvmm.Error, lambda: ForkingPickler.dumps(cuvmm.torch.read_only(outside)), "shareable=True")
            tensor.is_leaf, tensor.requires_grad = False, True
            refused(RuntimeError, lambda: ForkingPickler.dumps(tensor), "detach()")
            tensor.is_leaf, tensor.requires_grad = True, False
            # What came from another process is not sent on.
            sender = Child('''
            from multiprocessing.reduction import ForkingPickler
            with cuvmm.torch.pool("w", shareable=True):
                raw = torch.empty(3 << 20)
            tensor = torch.Tensor(raw.address, (3 << 20,), torch.uint8, torch.device("cuda", 0), raw)
            say(bytes(ForkingPickler.dumps(tensor)).hex())
            input()
            ''')
            came = ForkingPickler.loads(bytes.fromhex(sender.heard()))
            refused(cuvmm.Error, lambda: ForkingPickler.dumps(came), "clone()")
            sender.write("")
            assert sender.end() == 0
            assert cuvmm.torch.sent() == 0
            """
        )

    def test_installed_pools_are_shareable_too(self):
        case(
            """
            cuvmm.torch.install()
            with cuvmm.torch.pool("w", shareable=True):
                small, large = made((512,)), made((5 * MIB,), first=9)
            outside = made((512,))
            refused(RuntimeError, lambda: ForkingPickler.dumps(outside), "shareable=True")
            child = Child('''
            small, large = got()
            say(small.bytes() == bytes((1 + at) % 251 for at in range(512)), large.bytes()[:3].hex())
            input()
            ''')
            child.send(small, large)
            assert child.heard() == "True 090a0b"
            # Freed here, and there still.
            large.keeps.free()
            child.write("")
            assert child.end() == 0
            until(0)
            figures = cuvmm.stats()
            assert figures.live <= figures.held, figures
            """
        )


@needs_stand_in
class Room(unittest.TestCase):
    def test_shareable_memory_counts_against_the_limit(self):
        case(
            """
            cuvmm.configure(limit=64 * MIB)
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((4096,), nbytes=40 * MIB)
            refused(cuvmm.OutOfMemoryError, lambda: cuvmm.empty(32 * MIB), "limit")
            def more():
                with cuvmm.torch.pool("w"):
                    torch.empty(32 * MIB)
            refused(torch.cuda.OutOfMemoryError, more, "out of memory")
            cuvmm.empty(16 * MIB)
            # Asleep, it leaves the room to others, and needs it to wake.
            content = tensor.bytes()
            cuvmm.sleep("w")
            taken = cuvmm.empty(50 * MIB)
            refused(cuvmm.OutOfMemoryError, lambda: cuvmm.wake("w", timeout=0), "shareable memory")
            assert cuvmm.asleep() == {"w"}
            del taken
            cuvmm.wake("w")
            assert tensor.bytes() == content
            """
        )

    def test_a_ledger_counts_it_once_and_for_as_long_as_a_process_has_it(self):
        with tempfile.TemporaryDirectory() as folder:
            case(
                """
                folder = os.environ["LEDGER"]
                cuvmm.configure(ledger=folder, tenant="taker")
                sender = Child('''
                from multiprocessing.reduction import ForkingPickler
                cuvmm.configure(ledger=os.environ["LEDGER"], ledger_limit="64MiB", tenant="giver")
                with cuvmm.torch.pool("w", shareable=True):
                    raw = torch.empty(8 << 20)
                tensor = torch.Tensor(raw.address, (8 << 20,), torch.uint8, torch.device("cuda", 0), raw)
                tensor.fill(bytes([7]) * (8 << 20))
                say(bytes(ForkingPickler.dumps((tensor, tensor))).hex())
                input()
                ''')
                both = ForkingPickler.loads(bytes.fromhex(sender.heard()))
                refused(cuvmm.OutOfMemoryError, lambda: cuvmm.empty(58 * MIB), "the ledger leaves 56 MiB")
                # The giver's end changes nothing while this process has it.
                sender.process.kill()
                sender.end()
                refused(cuvmm.OutOfMemoryError, lambda: cuvmm.empty(58 * MIB), "the ledger leaves 56 MiB")
                assert both[1].bytes()[:2] == bytes([7, 7])
                del both
                gc.collect()
                cuvmm.empty(58 * MIB)
                """,
                LEDGER=folder,
            )

    def test_what_was_sent_does_not_sleep(self):
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            with cuvmm.torch.pool("other"):
                other = made((3 * MIB,))
            child = Child('''
            tensor = got()
            say("here")
            input()
            say(tensor.bytes()[:2].hex())
            input()
            ''')
            child.send(tensor)
            assert child.heard() == "here"
            refused(cuvmm.Error, lambda: cuvmm.sleep(["other", "w"]), '"w"', "sent to other processes")
            assert not cuvmm.asleep()
            cuvmm.sleep("other")
            refused(cuvmm.Error, lambda: cuvmm.exchange("w", "other"), '"w" is shareable')
            child.write("")
            assert child.heard() == "0102"
            child.write("")
            assert child.end() == 0
            until(0)
            # Also when no process has it: one that kept a descriptor would write to it.
            refused(cuvmm.Error, lambda: cuvmm.sleep("w"), "sent to other processes")
            # Graphs are no other process's.
            refused(cuvmm.Error, lambda: cuvmm.torch.graphs("w").__enter__(), "graphs")
            """
        )


@needs_stand_in
class Hostile(unittest.TestCase):
    def test_what_a_sender_says_is_checked(self):
        "Each forged answer is an error, after which nothing is open or mapped."
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            reduced = _sharing._in_place(tensor, False)
            handle, key, device, offset, nbytes, read_only = reduced[1][1]
            number = int(key.rpartition("-")[2])
            library = cuvmm._library.get()
            offered = json.loads(library.required("offered", number))
            handles = (ctypes.c_int * offered["handles"])()
            library.check(library.offer_handles(number, handles, len(handles)))
            hole, _ = os.pipe()

            class Forged:
                "A handle of a sender that gives an answer and descriptors."
                def __init__(self, answer, descriptors):
                    self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self.theirs.send(answer)
                    if descriptors:
                        socket.send_fds(self.theirs, [b"H"], descriptors)
                    self.theirs.shutdown(socket.SHUT_WR)
                def detach(self):
                    return self.ours.detach()
                def __enter__(self):
                    return self
                def __exit__(self, *failure):
                    self.theirs.close()

            def description(**changed):
                return json.dumps({**offered, **changed}).encode()

            def received(answer, descriptors=handles, **arguments):
                given = {"key": "other", "device": 0, "offset": offset, "nbytes": nbytes, "read_only": False}
                with Forged(answer, descriptors) as forged:
                    return _sharing._received(forged, **{**given, **arguments})

            right = offered["description"]
            # A right answer is taken: the rest differs from it.
            assert received(description(), key="right").nbytes == nbytes
            # The sender's number of the device may be another one here, or none.
            for number in (1, 7):
                assert received(description(), key=f"from {number}", device=number).device == 0
            gc.collect()
            before, open_before = live(), len(os.listdir("/proc/self/fd"))
            for text, arguments in [
                ("does not give", dict(answer=b"", descriptors=[])),
                ("does not give", dict(answer=b"[1]")),
                ("does not give", dict(answer=b"no json")),
                ("handles", dict(answer=b"{}")),
                ("came", dict(answer=description(handles=9))),
                ("does not give", dict(answer=description(handles="x"))),
                ("less than the minimum", dict(answer=description(handles=0), descriptors=[])),
                ("bytes", dict(answer=description(description=right[:-2]))),
                ("text", dict(answer=description(description="zz" + right[2:]))),
                ("not describe", dict(answer=description(description=None))),
                ("", dict(answer=description(), descriptors=[hole] * len(handles))),
                ("not all in a block", dict(answer=description(), offset=1 << 40)),
            ]:
                refused(cuvmm.Error, lambda: received(**arguments), text)
                assert live() == before, (arguments, live(), before)
            gc.collect()
            assert len(os.listdir("/proc/self/fd")) == open_before
            # A tensor larger than its storage is none.
            for shape, strides, start in [((nbytes + 1,), (1,), 0), ((8,), (-1,), 8), ((8,), (1,), -1)]:
                with Forged(description(), handles) as forged:
                    given, elements = (forged, "other", 0, offset, nbytes, False), (torch.uint8, 1, shape, strides, start)
                    refused(cuvmm.Error, lambda: _sharing._rebuild_tensor(torch.Tensor, given, elements, False), "is said")
            # The real one still works.
            os.close(handle.detach())
            until(0)
            """
        )

    def test_a_receiver_that_says_nonsense_gets_nothing(self):
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            for words in ([b"?"], [b""], [b"L"], [b"K", b"L"], [b"W", b"L"], [b"W", b"W", b"L"]):
                handle = _sharing._in_place(tensor, False)[1][1][0]
                with socket.socket(fileno=handle.detach()) as giver:
                    for word in words:
                        giver.send(word)
                        if word == b"W":
                            # The answer is there, and is not read.
                            select.select([giver], [], [])
                until(0)
            assert tensor.bytes()[:2] == bytes((1, 2))
            """
        )

    def test_a_forked_child_leaves_all_to_its_parent(self):
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensor = made((3 * MIB,))
            handle = _sharing._in_place(tensor, False)[1][1][0]
            reader, writer = os.pipe()
            with warnings.catch_warnings():
                # This process has threads, and its child calls no function that could wait for one.
                warnings.simplefilter("ignore")
                child = os.fork()
            if child == 0:
                os.write(writer, bytes([cuvmm.torch.sent(), len(_sharing._inherited)]))
                os._exit(0)
            assert os.read(reader, 2) == bytes([0, 1])
            os.waitpid(child, 0)
            assert cuvmm.torch.sent() == 1
            os.close(handle.detach())
            until(0)
            """
        )

    def test_a_receiver_that_may_open_no_more_files_says_so(self):
        case(
            """
            with cuvmm.torch.pool("w", shareable=True):
                tensors = [made((2 * MIB,), first=number) for number in range(10)]
            child = Child('''
            import resource
            first, hard = got(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
            files = []
            try:
                while True:
                    files.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
            refused = 0
            for spare in range(8):
                # One more file may be opened each time.
                if spare:
                    os.close(files.pop())
                try:
                    got()
                except cuvmm.Error as error:
                    assert "RLIMIT_NOFILE" in str(error), str(error)
                    refused += 1
            for file in files:
                os.close(file)
            say(refused > 2, first.bytes()[0], got().bytes()[0])
            ''')
            for tensor in tensors:
                child.send(tensor)
            assert child.heard() == "True 0 9"
            assert child.end() == 0
            """
        )
