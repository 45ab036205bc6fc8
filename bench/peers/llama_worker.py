"""llama.cpp as one process (answers.py); LLAMA_CPP_LIB_PATH says where its library is.

  {"op": "info"}                     what was built
  {"op": "run", "model": GGUF, "flash": BOOL, "ubatch": N, "threads": N, "prompts": [[...]...], "new_tokens": N}
                                     greedy, all prompts side by side: seconds to everyone's first token, and from there to
                                     the last of new_tokens. Prompts are computed one after another

It calls llama.cpp's C functions directly: what is timed is llama_decode and llama.cpp's own greedy sampler. Models and
contexts stay open, so that only the first run of a setting pays for opening it; prompts of another shape close contexts.
"""

import ctypes
import sys
import time

import answers
import llama_cpp as L


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
        self.shape = None
        self.contexts = {}
        self.sampler = L.llama_sampler_init_greedy()

    def info(self):
        return {"package": f"llama-cpp-python {L.__version__}",
                "system_info": L.llama_print_system_info().decode().strip()}

    def context(self, request):
        prompts = request["prompts"]
        # Rows of attention are padded to 256 anyway.
        length = -(-(max(map(len, prompts)) + request["new_tokens"]) // 256) * 256
        if self.shape != (len(prompts), length):
            for context in self.contexts.values():
                L.llama_free(context)
            self.shape, self.contexts = (len(prompts), length), {}
        key = tuple(request[name] for name in ("model", "flash", "ubatch", "threads"))
        if key in self.contexts:
            return self.contexts[key]
        file = request["model"]
        if file not in self.models:
            parameters = L.llama_model_default_params()
            parameters.n_gpu_layers = 0
            self.models[file] = L.llama_model_load_from_file(file.encode(), parameters)
            if not self.models[file]:
                raise RuntimeError(f"llama.cpp cannot load {file}")
        parameters = L.llama_context_default_params()
        parameters.n_seq_max = len(prompts)
        parameters.n_ctx = length * len(prompts)
        parameters.kv_unified = False  # each prompt has its own part, so that none attends over the others' masked keys
        # A whole prompt is one logical batch, so that no chunk but the last computes logits.
        parameters.n_batch = length
        parameters.n_ubatch = request["ubatch"]
        parameters.n_threads = parameters.n_threads_batch = request["threads"]
        parameters.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_ENABLED if request["flash"] else L.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = L.llama_init_from_model(self.models[file], parameters)
        if not context:
            raise RuntimeError(f"llama.cpp cannot open a context for {key}")
        self.contexts[key] = context
        return context

    def decode(self, context, batch):
        status = L.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status}")

    def run(self, request):
        prompts, count = request["prompts"], len(request["prompts"])
        context = self.context(request)
        L.llama_memory_clear(L.llama_get_memory(context), True)
        batches = [filled([(token, i, s, i == len(prompt) - 1) for i, token in enumerate(prompt)])
                   for s, prompt in enumerate(prompts)]
        out = [[] for _ in prompts]
        begin = time.perf_counter()
        for answer, batch in zip(out, batches):
            self.decode(context, batch)
            answer.append(L.llama_sampler_sample(self.sampler, context, -1))
        first = time.perf_counter()
        step = filled([(0, 0, s, True) for s in range(count)])
        for n in range(1, request["new_tokens"]):
            for s in range(count):
                step.token[s], step.pos[s] = out[s][-1], len(prompts[s]) + n - 1
            self.decode(context, step)
            for s in range(count):
                out[s].append(L.llama_sampler_sample(self.sampler, context, s))
        last = time.perf_counter()
        for batch in [*batches, step]:
            L.llama_batch_free(batch)
        return {"first_s": first - begin, "rest_s": last - first, "tokens": out}


def filled(rows):
    """A llama_batch of (token, position, sequence, whether its logits are wanted)."""
    batch = L.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.logits[i] = wanted
    return batch


peer = Peer()
answers.serve(lambda request: peer.info() if request["op"] == "info" else peer.run(request))
