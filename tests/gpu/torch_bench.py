"""What PyTorch makes of the same sizes on the same device, and what the device can do: the
yardsticks of tests/gpu/report.py. Writes JSON; needs nothing but torch.

    torch_bench.py --json FILE [--device cuda|cpu] [--tiny]
"""
import argparse
import json
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

# (n, k) of a layer's matrices; heads, KV heads, head size.
SHAPES = {
    "llama-3.1-8b": {
        "matrices": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096),
                     "down": (4096, 14336)},
        "heads": 32, "kv_heads": 8, "head_dim": 128},
    "smollm2-135m": {
        "matrices": {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576),
                     "down": (576, 1536)},
        "heads": 9, "kv_heads": 3, "head_dim": 64},
    "tiny": {
        "matrices": {"qkv": (128, 64), "out": (64, 64), "gate_up": (192, 64), "down": (64, 96)},
        "heads": 4, "kv_heads": 2, "head_dim": 16},
}


class Bench:
    def __init__(self, device, repeats):
        self.device = torch.device(device)
        self.repeats = repeats
        self.rows = []

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ms(self, launch, inner=10):
        """The median over repeats of `inner` launches and one wait, a launch."""
        launch()
        self.wait()
        times = []
        for _ in range(self.repeats):
            begin = time.perf_counter()
            for _ in range(inner):
                launch()
            self.wait()
            times.append((time.perf_counter() - begin) / inner)
        return 1e3 * statistics.median(times)

    def add(self, **row):
        print(json.dumps(row), flush=True)
        self.rows.append(row)

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(torch.bfloat16)

    def copies(self, bytes_):
        a = torch.empty(bytes_, dtype=torch.uint8, device=self.device)
        b = torch.empty_like(a)
        # Read and written.
        self.add(bench="device_copy", ms=self.ms(lambda: b.copy_(a)), bytes=2 * bytes_)
        host = torch.empty(bytes_ // 4, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        part = a[:bytes_ // 4]
        self.add(bench="pinned_upload", ms=self.ms(lambda: part.copy_(host, non_blocking=True)),
                 bytes=bytes_ // 4)
        self.add(bench="pinned_download", ms=self.ms(lambda: host.copy_(part, non_blocking=True)),
                 bytes=bytes_ // 4)

    def square(self, side):
        x, w = self.random(side, side), self.random(side, side)
        self.add(bench="square_matmul", side=side, ms=self.ms(lambda: x @ w.T), flops=2 * side**3)

    def matrices(self, model, row_counts):
        for name, (n, k) in SHAPES[model]["matrices"].items():
            w = self.random(n, k)
            for rows in row_counts:
                x = self.random(rows, k)
                self.add(bench="matmul", model=model, matrix=name, rows=rows,
                         ms=self.ms(lambda: x @ w.T), flops=2 * rows * n * k)

    def attention(self, model, batch, rows, context):
        s = SHAPES[model]
        q = self.random(batch, s["heads"], rows, s["head_dim"])
        k = self.random(batch, s["kv_heads"], context, s["head_dim"])
        v = self.random(batch, s["kv_heads"], context, s["head_dim"])
        causal = rows > 1

        def grouped():
            return sdpa(q, k, v, is_causal=causal, enable_gqa=True)

        def repeated():  # for a PyTorch whose fast kernels know no groups
            return sdpa(q, k.repeat_interleave(s["heads"] // s["kv_heads"], 1),
                        v.repeat_interleave(s["heads"] // s["kv_heads"], 1), is_causal=causal)

        times = []
        for way in (grouped, repeated):
            try:
                times.append(self.ms(way))
            except (RuntimeError, TypeError):  # not known, or too large
                pass
        if times:
            self.add(bench="attention", model=model, batch=batch, rows=rows, context=context,
                     ms=min(times))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.device, 2 if args.tiny else 5)
    torch.manual_seed(1)
    with torch.inference_mode():
        bench.copies(1 << 20 if args.tiny else 1 << 30)
        bench.square(64 if args.tiny else 8192)
        models = ["tiny"] if args.tiny else ["llama-3.1-8b", "smollm2-135m"]
        prompts, contexts, batches = ([40], [50], [1, 3]) if args.tiny else (
            [1024, 8192], [1024, 8192], [1, 32])
        for model in models:
            bench.matrices(model, batches + prompts)
            for tokens in prompts:
                bench.attention(model, 1, tokens, tokens)
            for batch in batches:
                for context in contexts:
                    bench.attention(model, batch, 1, context)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    with open(args.json, "w") as out:
        json.dump({"device": name, "torch": torch.__version__, "rows": bench.rows}, out, indent=1)


if __name__ == "__main__":
    main()
