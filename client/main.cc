// The carryover command line: finds the command and runs it.
#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "client/commands.h"

namespace carryover {
namespace {

constexpr Command kCommands[] = {
    {"complete", "complete a prompt", RunComplete},
    {"tokenize", "token ids of a text", RunTokenize},
    {"detokenize", "text of token ids", RunDetokenize},
    {"health", "whether the server serves", RunHealth},
    {"versions", "list versions, their traffic and caches", RunVersions},
    {"load", "load a version while serving", RunLoad},
    {"promote", "change which version serves", RunPromote},
    {"unload", "drop a version's weights, keep its caches", RunUnload},
    {"remove", "drop a version's weights and caches", RunRemove},
    {"calibrate", "fit a map from a version's cache to another's", RunCalibrate},
    {"warm", "compute a prefix ahead of its requests", RunWarm},
    {"cache", "list|stats|evict|pin|unpin|check", RunCache},
    {"fidelity", "report|watch|set|evaluate", RunFidelity},
    {"eval", "measure what carrying does to answers: run, report, tasks", RunEval},
    {"bench", "load the server and measure", RunBench},
};

}  // namespace
}  // namespace carryover

int main(int argc, char** argv) {
  static carryover::Interrupt interrupt;
  interrupt.Install();
  carryover::CommandContext context{
      .arguments = std::vector<std::string>(argv + 1, argv + argc),
      .out = std::cout,
      .err = std::cerr,
      .out_is_terminal = isatty(STDOUT_FILENO) != 0,
      .err_is_terminal = isatty(STDERR_FILENO) != 0,
      .interrupt = interrupt,
  };
  return carryover::RunSubcommand("",
                                  "carryover talks to a carryover server: completions, versions, "
                                  "the prefix cache, load tests.",
                                  carryover::kCommands, context);
}
