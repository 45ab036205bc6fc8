"""llama.cpp as one process: reads one JSON request a line, answers with one JSON line. Runs in build/peers-venv.

  {"op": "info"}                     what was built
  {"op": "run", "gguf": FILE, "flash": BOOL, "ubatch": N, "context": N, "threads": N, "tokens": [...], "new_tokens": N}
                                     greedy: seconds to the first token, and from there to the last of new_tokens

It calls llama.cpp's C functions directly: what is timed is llama_decode and llama.cpp's own greedy sampler. Models and
contexts stay open, so that only the first run of a setting pays for opening it.
"""

import ctypes
import json
import os
import sys
import time

# Only answers go to standard output: whatever llama.cpp prints joins standard error.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import llama_cpp as L  # noqa: E402  (after standard output is safe)


@L.llama_log_callback
def drop_log(level, text, data):
    errors = 4
    if level == errors:
        sys.stderr.write(text.decode(errors="replace"))


class Peer:
    def __init__(self):
        L.llama_log_set(drop_log, ctypes.c_void_p(0))
        L.llama_backend_init()
        self.models = {}
        self.contexts = {}
        self.sampler = L.llama_sampler_init_greedy()

    def info(self):
        return {"package": f"llama-cpp-python {L.__version__}",
                "system_info": L.llama_print_system_info().decode().strip()}

    def context(self, request):
        key = tuple(request[name] for name in ("gguf", "flash", "ubatch", "context", "threads"))
        if key in self.contexts:
            return self.contexts[key]
        file = request["gguf"]
        if file not in self.models:
            parameters = L.llama_model_default_params()
            parameters.n_gpu_layers = 0
            self.models[file] = L.llama_model_load_from_file(file.encode(), parameters)
            if not self.models[file]:
                raise RuntimeError(f"llama.cpp cannot load {file}")
        parameters = L.llama_context_default_params()
        parameters.n_ctx = request["context"]
        # The whole prompt is one logical batch, so that no chunk but the last computes logits.
        parameters.n_batch = request["context"]
        parameters.n_ubatch = request["ubatch"]
        parameters.n_threads = parameters.n_threads_batch = request["threads"]
        parameters.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_ENABLED if request["flash"] else L.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.contexts[key] = L.llama_init_from_model(self.models[file], parameters)
        if not self.contexts[key]:
            raise RuntimeError(f"llama.cpp cannot open a context for {key}")
        return self.contexts[key]

    def decode(self, context, tokens, count):
        """One pass over `count` tokens of a C array; returns the greedy next token."""
        status = L.llama_decode(context, L.llama_batch_get_one(tokens, count))
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status}")
        return L.llama_sampler_sample(self.sampler, context, -1)

    def run(self, request):
        context = self.context(request)
        L.llama_memory_clear(L.llama_get_memory(context), True)
        prompt = (L.llama_token * len(request["tokens"]))(*request["tokens"])
        one = (L.llama_token * 1)()
        begin = time.perf_counter()
        out = [self.decode(context, prompt, len(prompt))]
        first = time.perf_counter()
        while len(out) < request["new_tokens"]:
            one[0] = out[-1]
            out.append(self.decode(context, one, 1))
        return {"first_s": first - begin, "rest_s": time.perf_counter() - first, "tokens": out}


def main():
    peer = Peer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = peer.info() if request["op"] == "info" else peer.run(request)
        except RuntimeError as error:
            answer = {"error": str(error)}
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()


main()
