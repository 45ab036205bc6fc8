// Asks a server every item in every way. One thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "carryover/v1/completions.grpc.pb.h"
#include "carryover/v1/fidelity.grpc.pb.h"
#include "client/command.h"
#include "client/eval/item.h"
#include "client/eval/journal.h"

namespace carryover {

struct EvalOptions {
  std::string model, source, target;
  int max_tokens = 16;      // of an item that says nothing
  double control_rate = 1;  // share of the items whose native arm is computed twice
  bool hit = true;          // also the target over its own cache
  // Ways of carrying, "tail(32)"; empty: those of the server's ladder.
  std::vector<std::string> plans;
  bool sensitivity = false;  // also which parts of the cache the divergence comes from
  double max_loss = 0.02;    // of utility, that a verdict takes for none
};

enum class RunEnd { kDone, kInterrupted, kServerGone };

class EvalRun {
 public:
  EvalRun(const EvalOptions& options, const ConnectionOptions& connection, CommandContext* context);

  // Those without a good row yet. Failed items get a row that says so. Errors: the journal cannot
  // be written.
  absl::StatusOr<RunEnd> Run(const std::vector<eval::Item>& items, eval::Journal* journal);

 private:
  grpc::Status Tokenize(const std::string& text, bool special, std::vector<int32_t>* tokens);
  // Fills the prompt's tokens and where the prefix ends; the labelled answer's first token.
  grpc::Status Prepare(const eval::Item& item, v1::EvaluateRequest* request,
                       eval::ItemResult* result);
  grpc::Status Ask(const eval::Item& item, eval::ItemResult* result);
  bool ServerAnswers();

  const EvalOptions options_;
  const ConnectionOptions connection_;
  CommandContext& context_;
  std::unique_ptr<v1::Completions::Stub> completions_;
  std::unique_ptr<v1::Fidelity::Stub> fidelity_;
};

}  // namespace carryover
