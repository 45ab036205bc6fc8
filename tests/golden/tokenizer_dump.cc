// Drives a tokenizer for tokenizer_reference.py: reads requests from standard input, one JSON
// object a line, and writes one JSON object a line.
//   {"text": T, "special": B}          → {"ids": [...]}
//   {"ids": [...], "skip_special": B}  → {"text": T, "pieces": [...]} as decoded at once and
//   streamed
//   {"repeat": N, "text": T}           → {"seconds": S, "tokens": N}: encoding T, N times
// tokenizer_dump FOLDER. A request that fails is answered with {"error": E}.
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/hash.h"
#include "engine/tokenizer.h"

namespace carryover {
namespace {

using nlohmann::json;

json Answer(const Tokenizer& tokenizer, const json& request) {
  if (request.contains("ids")) {
    const auto ids = request["ids"].get<std::vector<int32_t>>();
    const bool skip = request["skip_special"];
    json pieces = json::array();
    const auto stream = tokenizer.NewStreamDecoder(skip);
    for (const int32_t id : ids) pieces.push_back(stream->Add(id));
    pieces.push_back(stream->Finish());
    return {{"text", tokenizer.Decode(ids, skip)}, {"pieces", pieces}};
  }
  const std::string text = request["text"];
  const EncodeOptions options{.add_special_tokens = request.value("special", false)};
  if (request.contains("repeat")) {
    const auto start = std::chrono::steady_clock::now();
    size_t tokens = 0;
    for (int i = 0; i < request["repeat"].get<int>(); ++i) {
      tokens += tokenizer.Encode(text, options)->size();
    }
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    return {{"seconds", spent.count()}, {"tokens", tokens}};
  }
  const auto ids = tokenizer.Encode(text, options);
  if (!ids.ok()) return {{"error", std::string(ids.status().message())}};
  return {{"ids", *ids}};
}

int Main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: tokenizer_dump FOLDER < requests > answers\n";
    return 2;
  }
  const auto tokenizer = Tokenizer::Load(argv[1]);
  if (!tokenizer.ok()) {
    std::cerr << tokenizer.status() << "\n";
    return 1;
  }
  std::ios::sync_with_stdio(false);
  for (std::string line; std::getline(std::cin, line);) {
    // A piece that is not valid UTF-8 ends the program: dump() throws.
    std::cout << Answer(**tokenizer, json::parse(line)).dump() << "\n";
  }
  return 0;
}

}  // namespace
}  // namespace carryover

int main(int argc, char** argv) { return carryover::Main(argc, argv); }
