"""Publications between processes: `cuvmm.publish` and `cuvmm.attach`."""

import array
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
import unittest

from modes import MIB, MODE, GpuTest, only_cuvmm, torch

if MODE != "native":
    import cuvmm

NAME = f"tests-{os.getpid()}"


def other(code: str, *arguments: str) -> str:
    """Runs code in another process, and returns what it printed."""
    begin = "import sys, torch, cuvmm\n"
    ended = subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if ended.returncode != 0:
        raise AssertionError(ended.stdout + ended.stderr)
    return ended.stdout


def free_on_the_device() -> int:
    return torch.cuda.cudart().cudaMemGetInfo(0)[0]


@only_cuvmm
class Sharing(GpuTest):
    def publish(self, tensors, **named):
        published = cuvmm.publish(tensors, NAME, **named)
        self.addCleanup(self.withdraw, published)
        return published

    @staticmethod
    def withdraw(published):
        try:
            published.withdraw()
        except cuvmm.NotPublishedError:
            pass

    def test_bytes_of_all_types_in_another_process(self):
        names = (
            "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8"
            " uint64 uint32 uint16 uint8 bool complex64 complex128"
        )
        state = {}
        for name in names.split():
            dtype = getattr(torch, name)
            high = 2 if dtype == torch.bool else 100
            raw = torch.randint(high, (7 * 11 * dtype.itemsize,), dtype=torch.uint8, device="cuda")
            state[name] = raw.view(dtype).reshape(7, 11)
        for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"):
            if hasattr(torch, name):
                raw = torch.randint(256, (7, 11), dtype=torch.uint8, device="cuda")
                state[name] = raw.view(getattr(torch, name))
        state["scalar"] = torch.tensor(2.5, device="cuda")
        state["empty"] = torch.empty(0, 3, device="cuda")
        state["turned"] = torch.randn(5, 9, device="cuda").t()
        state["part"] = torch.randn(20, 20, device="cuda")[::2, 3:]
        state["host"] = torch.arange(100)
        self.publish(state, device=0, metadata={"kind": "all"})
        said = other(
            """
            import hashlib
            weights = cuvmm.attach(sys.argv[1])
            assert weights.metadata == {"kind": "all"}
            for name, tensor in weights.items():
                assert tensor.is_cuda
                data = tensor.cpu().contiguous()
                raw = data.reshape(-1).view(torch.uint8) if data.numel() else data
                content = hashlib.sha256(bytes(raw.tolist())).hexdigest()
                print(name, tuple(tensor.shape), tensor.dtype, content)
            """,
            NAME,
        )
        import hashlib

        expected = []
        for name, tensor in state.items():
            data = tensor.cpu().contiguous()
            raw = data.reshape(-1).view(torch.uint8) if data.numel() else data
            content = hashlib.sha256(bytes(raw.tolist())).hexdigest()
            expected.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} {content}")
        self.assertEqual(said.splitlines(), expected)

    def test_a_model_answers_the_same_in_another_process(self):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024)
        ).cuda()
        inputs = torch.ones(4, 1024, device="cuda")
        self.publish(model.state_dict())
        said = other(
            """
            weights = cuvmm.attach(sys.argv[1])
            with torch.device("meta"):
                model = torch.nn.Sequential(
                    torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024))
            model.load_state_dict(weights, assign=True)
            del weights
            found = model(torch.ones(4, 1024, device="cuda"))
            print(found.double().sum().item().hex())
            """,
            NAME,
        )
        self.assertEqual(said.strip(), model(inputs).double().sum().item().hex())

    def test_the_device_has_the_bytes_once(self):
        tensor = torch.full((256 * MIB,), 7, dtype=torch.uint8, device="cuda")
        self.publish({"it": tensor})
        said = other(
            """
            torch.zeros(1, device="cuda")
            free = lambda: torch.cuda.cudart().cudaMemGetInfo(0)[0]
            cuvmm.empty(1)
            before = free()
            it = cuvmm.attach(sys.argv[1])["it"]
            print(before - free(), int(it.min()), int(it.max()))
            """,
            NAME,
        )
        taken, least, most = map(int, said.split())
        self.assertEqual((least, most), (7, 7))
        self.assertLess(taken, 32 * MIB)

    def test_versions_and_lifetimes_in_one_process(self):
        tensor = torch.full((40 * MIB,), 1, dtype=torch.uint8, device="cuda")
        first = self.publish({"it": tensor})
        weights = cuvmm.attach(NAME)
        self.assertIsNone(weights.newer())
        tensor.fill_(2)
        self.publish({"it": tensor})
        newer = weights.newer()
        self.assertEqual(newer.version, first.version + 1)
        old, new = weights["it"], newer["it"]
        first.withdraw()
        with self.assertRaises(cuvmm.NotPublishedError):
            newer.newer()
        del weights, newer
        self.assertEqual((int(old.max()), int(new.min())), (1, 2))
        self.assertEqual(int((old + new).min()), 3)
        free = free_on_the_device()
        del old, new
        self.assertGreaterEqual(free_on_the_device() - free, 80 * MIB)

    def test_a_tensor_outlives_its_publisher(self):
        giver = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys, torch, cuvmm\n"
                "it = torch.full((30 << 20,), 9, dtype=torch.uint8, device='cuda')\n"
                "cuvmm.publish({'it': it}, sys.argv[1])\n"
                "print('ready', flush=True)\n"
                "sys.stdin.read()\n",
                NAME + "-giver",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.assertEqual(giver.stdout.readline(), b"ready\n")
            weights = cuvmm.attach(NAME + "-giver")
        finally:
            giver.kill()
            giver.wait()
            giver.stdin.close()
            giver.stdout.close()
        with self.assertRaises(cuvmm.NotPublishedError):
            weights.newer()
        it = weights["it"]
        del weights
        self.assertEqual((int(it.min()), int(it.max())), (9, 9))

    def test_kernels_streams_and_graphs_read_it(self):
        tensor = torch.randn(512, 512, device="cuda")
        tied = {"one": tensor, "same": tensor, "half": tensor[:256]}
        self.publish(tied)
        weights = cuvmm.attach(NAME)
        one, half = weights["one"], weights["half"]
        self.assertEqual(one.data_ptr(), weights["same"].data_ptr())
        self.assertEqual(one.data_ptr(), half.data_ptr())
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            product = one @ half.t()
            one.record_stream(side)
        side.synchronize()
        torch.testing.assert_close(product, tensor @ tensor[:256].t())

    def test_limits_count_what_is_published(self):
        tensor = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        before = cuvmm.stats().limit
        published = self.publish({"it": tensor})
        self.assertEqual(before - cuvmm.stats().limit, 64 * MIB)
        # The copy would need as much again, which the limit does not leave.
        large = cuvmm.empty(before // 2 + 4 * MIB)
        with self.assertRaises(cuvmm.OutOfMemoryError):
            cuvmm.publish({"large": large}, NAME + "-large")
        del large
        published.withdraw()
        self.assertEqual(cuvmm.stats().limit, before)

    def test_kernels_read_a_tensor_at_an_odd_place_of_a_file(self):
        # A kernel that reads float32 at such an address ends the process's use of the GPU.
        command = os.environ.get("CUVMM_BIN") or shutil.which("cuvmm")
        if command is None:
            self.skipTest("there is no command cuvmm: name it in CUVMM_BIN")
        count, name = 1 << 16, NAME + "-odd"
        end = 3 + 4 * count
        header = {
            "mask": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "weights": {"dtype": "F32", "shape": [count], "data_offsets": [3, end]},
        }
        text = json.dumps(header).encode()
        values = array.array("f", range(count))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, name + ".safetensors")
            with open(path, "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text + bytes([7, 8, 9]))
                file.write(values.tobytes())
            publisher = subprocess.Popen(
                [command, "share", "publish", "--driver", "cuda", path],
                stdout=subprocess.DEVNULL,
            )
            try:
                odd = cuvmm.attach(name, timeout=60)
                weights, mask = odd["weights"], odd["mask"]
            finally:
                publisher.terminate()
                publisher.wait()
        self.assertEqual(weights.data_ptr() % 16, 0)
        torch.testing.assert_close((weights + 1).cpu(), torch.arange(1.0, count + 1))
        torch.cuda.synchronize()
        self.assertEqual(mask.tolist(), [7, 8, 9])

    def test_cupy_reads_it(self):
        try:
            import cupy
        except ImportError:
            self.skipTest("CuPy is not installed")
        tensor = torch.arange(1000, dtype=torch.int32, device="cuda")
        self.publish({"it": tensor})
        array = cupy.from_dlpack(cuvmm.attach(NAME).array("it"))
        self.assertEqual(int(array.sum()), 499500)


@only_cuvmm
class Captured(GpuTest):
    enters = False

    def test_a_graph_reads_it(self):
        tensor = torch.full((MIB,), 2.0, device="cuda")
        cuvmm.publish({"it": tensor}, NAME + "-graph")
        it = cuvmm.attach(NAME + "-graph")["it"]
        inputs = torch.ones(MIB, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = inputs * it
        inputs.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual((float(result.min()), float(result.max())), (14.0, 14.0))


if __name__ == "__main__":
    unittest.main()
