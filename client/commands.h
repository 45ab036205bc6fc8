// The commands. Each parses its own arguments and returns the exit code of the program; main.cc
// holds the table that names them.
#pragma once

#include "client/command.h"

namespace carryover {

int RunComplete(CommandContext& context);  // cmd_complete.cc
int RunTokenize(CommandContext& context);  // cmd_tokens.cc
int RunDetokenize(CommandContext& context);
int RunVersions(CommandContext& context);  // cmd_versions.cc
int RunLoad(CommandContext& context);
int RunPromote(CommandContext& context);
int RunUnload(CommandContext& context);
int RunRemove(CommandContext& context);
int RunCalibrate(CommandContext& context);  // cmd_calibrate.cc
int RunWarm(CommandContext& context);       // cmd_cache.cc
int RunCache(CommandContext& context);
int RunFidelity(CommandContext& context);   // cmd_fidelity.cc
int RunEval(CommandContext& context);       // cmd_eval.cc
int RunEvalTasks(CommandContext& context);  // cmd_eval_tasks.cc
int RunBench(CommandContext& context);      // cmd_bench.cc
int RunHealth(CommandContext& context);     // cmd_health.cc

}  // namespace carryover
