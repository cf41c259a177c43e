"""Tensors of shareable memory, published without a copy, over the stand-in for libcuda."""

import unittest

from support import needs_stand_in
from test_sharing_in_place import case

ATTACH = """
READ = '''
import cuvmm, sys
weights = cuvmm.attach("m")
print(weights.in_place, weights.version, dict(weights.metadata))
for name in weights:
    tensor = weights[name]
    print(name, tensor.dtype, tensor.shape, tensor.stride(), tensor.bytes().hex())
'''

def read():
    "Attaches the publication in another process, and returns what it printed."
    ended = subprocess.run([sys.executable, "-W", "error", "-c", READ], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()

def line(name, tensor):
    return f"{name} {tensor.dtype} {tensor.shape} {tensor.stride()} {tensor.bytes().hex()}"
"""


def published(code: str, **variables: str) -> str:
    return case(ATTACH + code, **variables)


@needs_stand_in
class PublishingInPlace(unittest.TestCase):
    def test_other_processes_read_the_tensors_themselves(self):
        published(
            """
with cuvmm.torch.pool("w", shareable=True):
    large, small = made((3, MIB)), made((64, 32), torch.float32, 7)
    half = made((16,), torch.bfloat16, 9)
    none = torch.Tensor(0, (0, 4), torch.float32, torch.device("cuda", 0), None)
tensors = {
    "large": large.as_strided((2, 5), (MIB, 1), 11), "small": small, "turned": small.as_strided((16, 8), (1, 32), 5),
    "half": half, "tied": half, "none": none,
}
before = live()[0]
publication = cuvmm.publish(tensors, "m", metadata={"step": "4"}, copy=False)
assert live()[0] == before, "memory was created"
assert cuvmm.stats().published == 0
assert publication.version == 1 and publication.nbytes > MIB
said = read()
assert said[0] == "True 1 {'step': '4'}", said[0]
assert said[1:6] == [line(name, tensors[name]) for name in list(tensors)[:5]], said
assert said[6].startswith("none torch.float32 (0, 4)"), said[6]
# What is written later is seen.
small.fill(bytes(64 * 32 * 4))
assert read()[2] == line("small", small)
"""
        )

    def test_tensors_are_kept_until_the_name_is_published_again_or_withdrawn(self):
        published(
            """
with cuvmm.torch.pool("w", shareable=True):
    tensor, other = made((16,)), made((16,), first=100)
kept = weakref.ref(tensor.keeps)
first = cuvmm.publish({"t": tensor}, "m", copy=False)
expected = line("t", tensor)
del tensor
gc.collect()
assert kept() is not None
assert read()[1] == expected
# A publication that is refused leaves the earlier one.
refused(ValueError, lambda: cuvmm.publish({"t": torch.empty((4,), torch.uint8, "cpu")}, "m", copy=False), "host memory")
refused(cuvmm.Error, lambda: cuvmm.publish({"t": other}, "m\\n", copy=False))
gc.collect()
assert kept() is not None and read()[0].startswith("True 1")
second = cuvmm.publish({"t": other}, "m", copy=False)
gc.collect()
assert kept() is None and second.version == 2
assert read()[:2] == ["True 2 {}", line("t", other)]
kept = weakref.ref(other.keeps)
# A copy takes the place of what lies here too.
third = cuvmm.publish({"t": other}, "m")
del other
gc.collect()
assert kept() is None and read()[0] == "False 3 {}"
third.withdraw()
assert cuvmm.stats().published == 0
"""
        )

    def test_an_interrupt_when_it_is_published_leaves_the_tensors_kept(self):
        published(
            """
from cuvmm import _library
with cuvmm.torch.pool("w", shareable=True):
    tensor, other = made((16,)), made((16,), first=100)
kept = [weakref.ref(it.keeps) for it in (tensor, other)]
first = cuvmm.publish({"t": tensor}, "m", copy=False)
number = _library.Library.number
def interrupted(*arguments):
    "Ends as a call does at whose end a signal is handled."
    number(*arguments)
    raise KeyboardInterrupt
_library.Library.number = interrupted
refused(KeyboardInterrupt, lambda: cuvmm.publish({"t": other}, "m", copy=False))
_library.Library.number = number
expected = line("t", other)
del tensor, other
gc.collect()
assert read()[:2] == ["True 2 {}", expected]
assert all(it() is not None for it in kept)
cuvmm.publish({"t": cuvmm.empty(16)}, "m")
gc.collect()
assert all(it() is None for it in kept)
"""
        )

    def test_memory_that_is_not_shareable_is_refused_and_nothing_is_published(self):
        published(
            """
with cuvmm.torch.pool("plain"):
    plain = made((16,))
with cuvmm.torch.pool("w", shareable=True):
    good = made((16,))
outside = torch.empty((16,), torch.uint8, "cuda:0")
for tensor in (plain, outside):
    refused(cuvmm.Error, lambda: cuvmm.publish({"good": good, "t": tensor}, "m", copy=False), "shareable=True")
beyond = torch.Tensor(good.address, (16 * MIB,), torch.uint8, good.device, good)
refused(cuvmm.Error, lambda: cuvmm.publish({"t": beyond}, "m", copy=False))
refused(ValueError, lambda: cuvmm.publish({}, "m", device=0, copy=False), "copy=True")
good.is_conj = lambda: True
refused(ValueError, lambda: cuvmm.publish({"t": good}, "m", copy=False), "copy=True")
del good.is_conj
refused(cuvmm.NotPublishedError, lambda: cuvmm.attach("m"))
# What came from another process is not published here.
cuvmm.publish({"t": good}, "m", copy=False)
attached = cuvmm.attach("m")
refused(cuvmm.Error, lambda: cuvmm.publish({"t": attached["t"]}, "n", copy=False), "another process")
"""
        )

    def test_a_pool_sleeps_again_when_what_was_published_is_freed(self):
        published(
            """
with cuvmm.torch.pool("w", shareable=True):
    tensor = made((4 * MIB,))
publication = cuvmm.publish({"t": tensor}, "m", copy=False)
refused(cuvmm.Error, lambda: cuvmm.sleep("w"), "other processes")
publication.withdraw()
refused(cuvmm.Error, lambda: cuvmm.sleep("w"), "other processes")
tensor.keeps.free()
del tensor
cuvmm.trim("w")
cuvmm.sleep("w")
cuvmm.wake("w")
"""
        )

    def test_a_ledger_counts_the_memory_once(self):
        published(
            """
import shutil, tempfile
ledger = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
cuvmm.configure(ledger=ledger, ledger_limit="64MiB", limit="64MiB")
with cuvmm.torch.pool("w", shareable=True):
    tensors = {str(number): made((6 * MIB,), first=number) for number in range(3)}
# A ledger has 256 entries for memory that is shared at a time.
for version in range(1, 301):
    assert cuvmm.publish(tensors, "m", copy=False).version == version
child = Child('''
cuvmm.configure(ledger=input(), limit="64MiB")
weights = cuvmm.attach("m")
array = cuvmm.empty(44 << 20)
say(sum(len(weights[name].bytes()) for name in weights))
try:
    cuvmm.empty(6 << 20)
except cuvmm.OutOfMemoryError:
    say("full")
input()
''')
child.write(ledger)
assert child.heard() == str(18 * MIB)
assert child.heard() == "full"
child.write("end")
assert child.end() == 0
shutil.rmtree(ledger)
"""
        )


@needs_stand_in
class ShareableHeap(unittest.TestCase):
    def test_tensors_of_the_heap_are_published_in_place(self):
        published(
            """
cuvmm.torch.install(limit="200MiB", shareable=True)
pieces = [torch.empty(2 * MIB) for _ in range(20)]
for piece in pieces:
    piece.free()
large, small, other = made((30 * MIB,)), made((64, 32), torch.float32, 7), made((16,), torch.bfloat16, 9)
with cuvmm.torch.pool("w", shareable=True):
    pooled = made((16,), first=50)
held = live()[0]
tensors = {"large": large[MIB : MIB + 9], "small": small, "other": other, "pooled": pooled}
publication = cuvmm.publish(tensors, "m", copy=False)
assert live()[0] == held
assert read()[1:] == [line(*item) for item in tensors.items()]
small.fill(bytes(64 * 32 * 4))
assert read()[2] == line("small", small)
# The publication keeps the memory although PyTorch frees it.
expected = read()
address = small.keeps.address
for tensor in (large, small, other):
    tensor.keeps.free()
again = [made((64, 32), torch.float32, 90) for _ in range(20)]
assert all(tensor.keeps.address != address for tensor in again)
assert read() == expected
publication.withdraw()
again.append(made((30 * MIB,)))
torch.cuda.synchronize()
torch.cuda.empty_cache()
"""
        )

    def test_tensors_of_the_heap_are_sent_in_place(self):
        published(
            """
cuvmm.configure(shareable=True)
cuvmm.torch.install(limit="200MiB")
whole = made((64, 32), torch.float32)
turned = whole.as_strided((16, 8), (1, 32), 5)
child = Child('''
whole, turned = got()
say(whole.bytes().hex())
say(turned.bytes().hex(), turned.data_ptr() - whole.data_ptr())
whole.fill(bytes(64 * 32 * 4))
say("written")
input()
''')
expected = [whole.bytes().hex(), turned.bytes().hex() + " 20"]
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

    def test_without_it_the_error_says_how(self):
        published(
            """
cuvmm.torch.install(limit="200MiB")
tensor = made((16,))
refused(cuvmm.Error, lambda: cuvmm.publish({"t": tensor}, "m", copy=False), "install(shareable=True)", "copy=True")
refused(TypeError, lambda: cuvmm.configure(shareable=1), "shareable is True or False")
refused(cuvmm.Error, lambda: cuvmm.configure(shareable=True), "memory was allocated before")
"""
        )
