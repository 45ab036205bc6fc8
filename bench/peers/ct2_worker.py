"""CTranslate2 as one process (answers.py). Its libraries and instruction set are chosen by the environment.

  {"op": "info"}
  {"op": "run", "model": FOLDER, "type": "float32"|"int8", "threads": N, "prompts": [[...]...], "new_tokens": N}
                                     greedy, all prompts as one batch: seconds to the first token, and from there to the last
"""

import time

import answers
import ctranslate2

NEVER = "17"  # ends an answer; min_length keeps it from being chosen. Not the end token, which ours may choose

generators = {}


def run(request):
    if request["op"] == "info":
        return {"package": f"CTranslate2 {ctranslate2.__version__}",
                "types": sorted(ctranslate2.get_supported_compute_types("cpu"))}
    key = (request["model"], request["type"], request["threads"])
    if key not in generators:
        generators[key] = ctranslate2.Generator(request["model"], device="cpu", compute_type=request["type"],
                                                intra_threads=request["threads"])
    prompts = [list(map(str, prompt)) for prompt in request["prompts"]]
    count = request["new_tokens"]
    times = []
    begin = time.perf_counter()
    results = generators[key].generate_batch(
        prompts, include_prompt_in_result=False, max_length=count, min_length=count, sampling_topk=1, end_token=[NEVER],
        callback=lambda step: times.append(time.perf_counter()) or False)
    if len(times) != count * len(prompts):
        raise RuntimeError(f"CTranslate2 gave {len(times)} tokens of {count * len(prompts)}")
    # Each step tells its tokens one after another.
    return {"first_s": times[len(prompts) - 1] - begin, "rest_s": times[-1] - times[len(prompts) - 1],
            "tokens": [result.sequences_ids[0] for result in results]}


answers.serve(run)
