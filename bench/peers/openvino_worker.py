"""OpenVINO GenAI as one process (answers.py): its pipeline with continuous batching, over a GGUF file.

  {"op": "info"}
  {"op": "run", "model": GGUF, "kv": "bf16"|"u8", "batch_tokens": N, "threads": N, "prompts": [[...]...], "new_tokens": N}
                                     greedy, all prompts side by side: seconds to everyone's first token, and from there to
                                     the last of new_tokens
"""

import time

import answers
import numpy as np
import openvino
import openvino_genai

CACHE_GIB = 1  # a pipeline; 16 sequences of 577 tokens of SmolLM2-135M take 0.2 in bf16

pipelines = {}


def pipeline(request):
    key = tuple(request[name] for name in ("model", "kv", "batch_tokens", "threads"))
    if key not in pipelines:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_batched_tokens = request["batch_tokens"]
        pipelines[key] = openvino_genai.ContinuousBatchingPipeline(
            request["model"], scheduler, "CPU",
            {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": request["kv"],
             "INFERENCE_NUM_THREADS": request["threads"]})
    return pipelines[key]


def run(request):
    if request["op"] == "info":
        return {"package": f"OpenVINO GenAI {openvino_genai.__version__}"}
    pipe, count = pipeline(request), request["new_tokens"]
    prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in request["prompts"]]
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = count, False, True
    tokens = [[] for _ in prompts]
    first = None
    begin = time.perf_counter()
    handles = [pipe.add_request(i, prompt, config) for i, prompt in enumerate(prompts)]
    while pipe.has_non_finished_requests():
        pipe.step()
        for handle, answer in zip(handles, tokens):
            if handle.can_read():
                answer.extend(next(iter(handle.read().values())).generated_ids)
        if first is None and all(tokens):
            first, early = time.perf_counter(), sum(map(len, tokens)) - len(prompts)
    last = time.perf_counter()
    if any(len(answer) != count for answer in tokens):
        raise RuntimeError(f"OpenVINO gave {list(map(len, tokens))} tokens and not {count} each")
    # Whoever had his first token before the last one had it went on meanwhile: those tokens are taken off the count.
    rest, whole = last - first, len(prompts) * (count - 1)
    return {"first_s": first - begin, "rest_s": rest * whole / max(1, whole - early), "tokens": tokens}


answers.serve(run)
