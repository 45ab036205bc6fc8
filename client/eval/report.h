// eval.json and eval.html of a run. Pure functions; any thread. docs/evaluator.md describes the
// JSON; fields are only ever added within one schema_version.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "client/eval/cells.h"
#include "client/eval/result.h"
#include "nlohmann/json.hpp"

namespace carryover::eval {

struct Report {
  nlohmann::ordered_json run;  // as run.json has it
  std::map<int, ItemResult> rows;
  Limits limits;
  std::vector<Cell> cells;
  std::vector<SensitivitySummary> sensitivity;
  int wanted = 0;  // items of the tasks files
  int done = 0, failed = 0;
};

Report MakeReport(nlohmann::ordered_json run, std::map<int, ItemResult> rows);

nlohmann::ordered_json ReportToJson(const Report& report);
// One file without scripts or links, for light and dark and for a phone.
std::string ReportToHtml(const Report& report);

}  // namespace carryover::eval
