#!/usr/bin/env python3
"""Reference logits and greedy continuations from Hugging Face transformers, in fp32.

  make_golden.py tiny                     draws tiny/<name>/ (one random checkpoint an architecture)
                                          and writes reference/<name>.safetensors
  make_golden.py folder DIR NAME          writes reference/NAME.safetensors for an existing folder

Needs the packages of requirements.txt. What it wrote is committed; run it again only to add a case.

A reference file holds, all as F32 so that the C++ reader of checkpoints can read it:
  std                 standard deviation of all logits of all prompts
  I.tokens            (n) token ids of prompt I
  I.stride            1, or s where only every s-th column of the logits is kept
  I.logits            (n, columns)
  I.logsumexp         (n) over all columns
  I.top_ids, I.top    (n, 16) the largest logits, where the stride is not 1
  I.greedy            (64) the greedy continuation, for some prompts
  I.margin            (64) the gap between the two largest logits at each of its steps
"""

import argparse
import json
import pathlib
import shutil
import sys

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
LENGTHS = (1, 15, 16, 17, 33, 97)  # around a block of 16 tokens, and beyond every window
GREEDY_STEPS = 64
# A step's gap between the two best tokens, over the standard deviation: fifty times what the test
# allows a logit to move, so that greedy text must agree exactly.
MIN_MARGIN = 0.005
MIN_DISTINCT = 12  # a continuation that repeats a few tokens would prove little
TOP = 16
VOCAB = 320

BASE = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)


def old_keys(**fields):
  """Rewrites a saved config with the keys that transformers wrote before version 5."""
  def rewrite(config):
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    config.update(fields)
  return rewrite


def keep(config):
  pass


# name: (config class, its fields, dtype of the checkpoint, shards, rewrite of config.json)
TINY = {
    "llama3": (transformers.LlamaConfig,
               dict(BASE, rope_parameters=dict(
                   rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                   high_freq_factor=4.0, original_max_position_embeddings=64)),
               torch.float32, 2, keep),
    "llama_linear": (transformers.LlamaConfig,
                     dict(BASE, attention_bias=True, mlp_bias=True),
                     torch.float16, 1,
                     old_keys(rope_scaling={"type": "linear", "factor": 4.0})),
    "llama2": (transformers.LlamaConfig, dict(BASE, num_key_value_heads=4),
               torch.bfloat16, 1, old_keys(rope_scaling=None)),
    "smollm2": (transformers.LlamaConfig,
                dict(BASE, hidden_size=96, num_attention_heads=6, tie_word_embeddings=True,
                     rope_parameters=dict(rope_type="default", rope_theta=100000.0)),
                torch.bfloat16, 1, old_keys(rope_scaling=None)),
    "mistral": (transformers.MistralConfig, dict(BASE, sliding_window=24),
                torch.bfloat16, 1, keep),
    "qwen2": (transformers.Qwen2Config,
              dict(BASE, num_hidden_layers=3, use_sliding_window=True, sliding_window=20,
                   max_window_layers=1, tie_word_embeddings=True,
                   rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
              torch.bfloat16, 1, keep),
    "qwen3": (transformers.Qwen3Config,
              dict(BASE, head_dim=32, rope_parameters=dict(rope_type="default",
                                                           rope_theta=1000000.0)),
              torch.bfloat16, 1, keep),
}

# Fields that every config gets and no model here reads.
NOISE = {"_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder",
         "output_attentions", "output_hidden_states", "return_dict", "initializer_range",
         "pretraining_tp", "use_cache", "attention_dropout"}

# For models that know language. Written for this file.
TEXTS = (
    "The lighthouse keeper wrote down the weather every evening, and after forty years his notes "
    "filled three shelves. When the new keeper arrived she asked him what he had learned from "
    "them. He thought about it for a while and said that the sea never repeats itself, but that "
    "people who watch it do, and that the best nights were those when there was nothing to write. "
    "She kept the habit all the same, and on her first evening she noted a light wind from the "
    "west, a ship far out, and a gull asleep on the railing.",
    "def moving_average(values, width):\n    total = 0.0\n    result = []\n    for i, value in "
    "enumerate(values):\n        total += value\n        if i >= width:\n            total -= "
    "values[i - width]\n        result.append(total / min(i + 1, width))\n    return result\n\n\n"
    "def test_moving_average():\n    assert moving_average([1, 2, 3, 4], 2) == [1.0, 1.5, 2.5, "
    "3.5]\n    assert moving_average([], 3) == []\n\n\nif __name__ == \"__main__\":\n    "
    "test_moving_average()\n    print(\"all tests passed\")\n",
    "Water boils at a lower temperature on a mountain than at the coast, because the air above it "
    "is thinner and presses less on its surface. This is why food takes longer to cook there: the "
    "water is boiling, but it is not as hot. A pressure cooker does the opposite. It keeps the "
    "steam in, the pressure rises, and the water gets hotter than it ever could in an open pot, "
    "so that beans which need two hours are soft in thirty minutes. The same rule, turned around, "
    "lets a laboratory dry delicate things at room temperature under a vacuum.",
    "Question: What is the capital of France?\nAnswer: Paris.\nQuestion: What is the capital of "
    "Japan?\nAnswer: Tokyo.\nQuestion: What is the capital of Egypt?\nAnswer: Cairo.\nQuestion: "
    "What is the capital of Norway?\nAnswer: Oslo.\nQuestion: What is the capital of Canada?\n"
    "Answer: Ottawa.\nQuestion: What is the capital of Kenya?\nAnswer: Nairobi.\nQuestion: What "
    "is the capital of Peru?\nAnswer: Lima.\nQuestion: What is the capital of Poland?\nAnswer:",
)


def draw(model, seed):
  """New weights: logits of a standard deviation well above 1, attention that is neither flat nor
  one-hot, and layers that weigh as much as the embedding."""
  config = model.config
  generator = torch.Generator().manual_seed(seed)
  tied = config.tie_word_embeddings
  for name, value in model.named_parameters():
    noise = torch.randn(value.shape, generator=generator)
    fan_in = value.shape[-1]
    if name.endswith("norm.weight"):
      new = 1 + 0.2 * noise
    elif name.endswith(".bias"):
      new = 0.4 * noise
    elif "embed_tokens" in name:
      new = noise * (2.5 / fan_in**0.5 if tied else 1.0)
    elif "lm_head" in name:
      new = noise * 2.5 / fan_in**0.5
    elif "q_proj" in name or "k_proj" in name:
      new = noise * 1.3 / fan_in**0.5
    else:
      new = noise * 1.2 / fan_in**0.5
    value.data.copy_(new)


def save_checkpoint(model, folder, dtype, shards):
  state = {name: value.detach().to(dtype).contiguous()
           for name, value in model.state_dict().items()
           if not (name == "lm_head.weight" and model.config.tie_word_embeddings)}
  if shards == 1:
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return
  names = sorted(state)
  weight_map = {}
  for shard in range(shards):
    file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
    part = {name: state[name] for name in names[shard::shards]}
    save_file(part, folder / file, {"format": "pt"})
    weight_map.update({name: file for name in part})
  index = {"metadata": {"total_size": sum(v.numel() * v.element_size() for v in state.values())},
           "weight_map": dict(sorted(weight_map.items()))}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def save_tokenizer(folder):
  """A byte-level BPE of VOCAB entries, learned from TEXTS, so that a server can serve the folder."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(
      vocab_size=VOCAB, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
      initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False))
  assert tokenizer.get_vocab_size() == VOCAB
  tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def logits_of(model, tokens):
  with torch.no_grad():
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def greedy(model, tokens):
  """GREEDY_STEPS tokens and the gap at each, or None as soon as one is too close to call."""
  tokens = list(tokens)
  start = len(tokens)
  margins = []
  for _ in range(GREEDY_STEPS):
    last = logits_of(model, tokens)[-1]
    best = torch.topk(last, 2)
    margins.append((best.values[0] - best.values[1]).item())
    if margins[-1] < MIN_MARGIN * last.std().item():
      return None
    tokens.append(best.indices[0].item())
  if len(set(tokens[start:])) < MIN_DISTINCT:
    return None
  return tokens[start:], margins


def write_reference(model, prompts, strides, continue_from, path):
  """continue_from: the prompts (indices) whose continuation is kept, each at most once asked."""
  out = {}
  all_logits = []
  for i, tokens in enumerate(prompts):
    logits = logits_of(model, tokens)
    all_logits.append(logits.flatten())
    out[f"{i}.tokens"] = torch.tensor(tokens)
    out[f"{i}.stride"] = torch.tensor(strides[i])
    out[f"{i}.logits"] = logits[:, ::strides[i]]
    out[f"{i}.logsumexp"] = torch.logsumexp(logits.double(), dim=-1)
    if strides[i] != 1:
      top = torch.topk(logits, TOP)
      out[f"{i}.top_ids"] = top.indices
      out[f"{i}.top"] = top.values
    if i in continue_from:
      out[f"{i}.greedy"] = torch.tensor(continue_from[i][0])
      out[f"{i}.margin"] = torch.tensor(continue_from[i][1])
  out["std"] = torch.cat(all_logits).double().std()
  path.parent.mkdir(exist_ok=True)
  save_file({name: value.to(torch.float32).contiguous() for name, value in out.items()}, path,
            {"transformers": transformers.__version__, "torch": torch.__version__})
  path.chmod(0o644)
  print(f"{path.name}: std {out['std'].item():.3f}, {path.stat().st_size} bytes,",
        {i: f"margin {min(m):.4f}, {len(set(t))} distinct" for i, (t, m) in continue_from.items()})
  return out["std"].item()


def load(folder):
  return transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_tiny(name, seed):
  config_class, fields, dtype, shards, rewrite = TINY[name]
  folder = HERE / "tiny" / name
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  config = config_class(**fields)
  model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
  draw(model, seed)
  config.architectures = [type(model).__name__]
  text = {key: value for key, value in json.loads(config.to_json_string(use_diff=False)).items()
          if key not in NOISE and (value is not None or key == "sliding_window")}
  text["dtype"] = str(dtype).removeprefix("torch.")
  rewrite(text)
  (folder / "config.json").write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")
  (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": [0, 2]}\n')
  save_checkpoint(model, folder, dtype, shards)
  save_tokenizer(folder)

  model = load(folder)  # what the file holds, rounded to its dtype
  generator = torch.Generator().manual_seed(seed)
  prompts, continuations = [], {}
  for i, length in enumerate(LENGTHS):
    for attempt in range(200):
      tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
      if length not in (17, 97):
        break
      continuation = greedy(model, tokens)
      if continuation is not None:
        continuations[i] = continuation
        break
    else:
      return False
    prompts.append(tokens)
  strides = [1 if length <= 17 else 8 for length in LENGTHS]
  return write_reference(model, prompts, strides, continuations,
                         HERE / "reference" / f"{name}.safetensors") >= 1


def make_folder(folder, name, stride):
  model = load(folder)
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
  prompts = [texts[i % len(texts)][:length] for i, length in enumerate(LENGTHS)]
  continuations = {}
  candidates = [(text, length) for length in (33, 48, 64, 80, 97, 24, 17) for text in texts]
  for text, length in candidates:
    tokens = text[:length]
    continuation = greedy(model, tokens)
    if continuation is None:
      continue
    if tokens not in prompts:
      prompts.append(tokens)
    continuations[prompts.index(tokens)] = continuation
    if len(continuations) == 2:
      break
  if not continuations:
    sys.exit("no prompt has a continuation with clear margins")
  write_reference(model, prompts, [stride] * len(prompts), continuations,
                  HERE / "reference" / f"{name}.safetensors")


def main():
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(dest="command", required=True)
  tiny = commands.add_parser("tiny")
  tiny.add_argument("--only", choices=sorted(TINY))
  folder = commands.add_parser("folder")
  folder.add_argument("folder", type=pathlib.Path)
  folder.add_argument("name")
  folder.add_argument("--stride", type=int, default=97)
  args = parser.parse_args()
  torch.set_num_threads(2)
  torch.use_deterministic_algorithms(True)
  if args.command == "folder":
    make_folder(args.folder, args.name, args.stride)
    return
  for name in [args.only] if args.only else TINY:
    for seed in range(1, 20):
      if make_tiny(name, seed):
        break
      print(f"{name}: drawing again")
    else:
      sys.exit(f"{name}: no seed gives clear margins")


if __name__ == "__main__":
  main()
